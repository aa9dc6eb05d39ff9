"""The plans that steps follow, from a recording of them: to capture the model once more takes as long as a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import zinf_fx
from zinf_fx.plan.plan import Plan


@contextmanager
def followed_plans(model: nn.Module) -> Iterator[list[Plan]]:
    """Yield the plans of the graphs that run in the block, there once it is over."""
    plans: list[Plan] = []
    with zinf_fx.record(model) as recording:
        yield plans
    plans += recording.plans
