"""What training a model takes on given hardware, before either exists: memory, bandwidth, time and wear."""

from __future__ import annotations

from zinf_fx.estimate.prediction import Estimate, Prediction, estimate
from zinf_fx.estimate.workload import Optimizer, Workload, of_module, of_transformer

__all__ = ["Estimate", "Optimizer", "Prediction", "Workload", "estimate", "of_module", "of_transformer"]
