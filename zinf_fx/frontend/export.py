"""`zinf_fx.export_plan`: a model's plan ahead of time, for a machine that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinf_fx.arguments import check_model
from zinf_fx.config import Config
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan


def export_plan(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config | None = None,
    world_size: int = 1,
    replicas: int = 1,
    hardware: Hardware | None = None,
    **fields: object,
) -> Plan:
    """The plan of `model(*example_inputs)` (a mapping: keyword arguments), to be saved and used elsewhere:
    `Plan.save(path)`, then `torch.compile(model, backend="zinf", options={"plan": path})`.

    Needs no store, GPU or weights: the model may be on the meta device, and is neither changed nor run. Forward and
    backward, or inference alone under `torch.no_grad()`. What is on the meta device is planned for the CPU.

    Args:
        config, fields: the options to plan with, as for `zinf_fx.offload`; and `state_dtype` and `master_dtype`,
            as of the optimizer.
        world_size: ranks that train together.
        replicas: groups that they divide into, each of which has all model states, as with a two-dimensional mesh.
        hardware: what `placement="auto"` decides for; default this machine, at nominal rates. Other choices
            (`activations="auto"`) are weighed with its rates; default those that are measured here, where the store is
            there if they depend on it, and else nominal ones.

    Raises: ConfigError for bad options; BudgetError when a budget is too small; PlanError when the model can't be
    captured as one graph that uses parameters; StoredTensorError for a parameter that can't be stored.
    """
    check_model(model, "export_plan")
    ranks = {"world_size": world_size, "replicas": replicas}
    return plan_model(model, example_inputs, config, hardware=hardware, **ranks, **fields).only("a plan file")
