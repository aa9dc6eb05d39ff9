"""`zinf_fx.export_plan`: a model's plan ahead of time, for a machine that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinf_fx.adam import MasterForm, StateForm
from zinf_fx.config import Config
from zinf_fx.frontend.explain import Planning, plan_model
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates


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
    `plan.save(path)`, then `torch.compile(model, backend="zinf", options={"plan": path})`.

    Needs no store, GPU or weights: the model may be on the meta device, and is neither changed nor run. Forward and
    backward, or inference alone under `torch.no_grad()`. What is on the meta device is planned for the CPU.

    Args:
        config, fields: the options to plan with, as for `zinf_fx.offload`; and `state_dtype` and `master_dtype`,
            as of the optimizer.
        world_size: ranks that train together.
        replicas: groups that they divide into, each of which has all model states, as with a two-dimensional mesh.
        hardware: what `placement="auto"` decides for; default this machine, at nominal rates. Other choices
            (`activations="auto"`) are weighed with its rates; default nominal ones, or measured ones for an offloaded
            model.

    Raises: ConfigError for bad options; BudgetError when a budget is too small; PlanError when the model can't be
    captured as one graph that uses parameters; StoredTensorError for a parameter that can't be stored.
    """
    options = {"world_size": world_size, "replicas": replicas, **fields}
    return planning_for(hardware, model, example_inputs, config, **options).only("a plan file")


def planning_for(
    hardware: Hardware | None,
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config | None = None,
    *,
    world_size: int,
    replicas: int,
    state_dtype: torch.dtype | StateForm | None = None,
    master_dtype: torch.dtype | MasterForm | None = None,
    **fields: object,
) -> Planning:
    """As `plan_model`, with choices weighed with the rates of a described machine, if there is one."""
    rates = None
    if hardware is not None:
        asked = Config.of(config, fields)
        rates = Rates.of(
            hardware, _dtype_of_most(model, hardware), "nvme" if asked.placement == "auto" else asked.activation_tier
        )
    how = {"hardware": hardware, "state_dtype": state_dtype, "master_dtype": master_dtype}
    return plan_model(model, example_inputs, config, rates, world_size, replicas, **how, **fields)


def _dtype_of_most(model: torch.nn.Module, hardware: Hardware) -> str:
    """What most elements of a model's parameters are, of the dtypes that the hardware has a peak for: codes of a frozen
    parameter, for one, are no numbers to compute with."""
    elements: Counter[str] = Counter()
    for parameter in model.parameters():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(hardware.peak, key=elements.__getitem__, default="float32")
