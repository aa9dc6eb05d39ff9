"""`placement="auto"` for a model of which the graphs are captured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from zinf_fx.config import Config
from zinf_fx.frontend.abstract import abstract_inputs
from zinf_fx.frontend.auto_placement import by_rule_here, device_of_most, note, sizes_of, this_machine, trained_here
from zinf_fx.frontend.capture import Capture
from zinf_fx.frontend.dividing import Divisions
from zinf_fx.frontend.quantising import tables_in
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import Decision, decide
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.ranks import Ranks


def decided_for(
    captures: Sequence[Capture],
    parameters: Sequence[torch.Tensor],
    config: Config,
    groups: Groups,
    hardware: Hardware | None = None,
    tables: Collection[int] = (),
) -> tuple[Decision, list[Plan]]:
    """The placement of the model that these graphs are of, and their plans with it.

    `hardware`: to decide for; default this machine, at nominal rates. `tables`: ids of parameters that are looked up by
    rows. Raises: BudgetError when nothing fits.
    """
    here = trained_here(parameters)
    if hardware is None:
        hardware = this_machine(config, device_of_most(here))

    @cache
    def plans_with(placement: Placement | PlacementRules) -> list[Plan]:
        return plans_that_move(capture.planned(placement=placement) for capture in captures)

    sizes = sizes_of(here, config, groups, tables)
    decision = decide(plans_with, sizes, config, hardware, groups.ranks, len(here))
    note(decision, sizes)
    return decision, plans_with(decision.placement)


def at_first_call(
    module: fx.GraphModule, inputs: Sequence[Any], config: Config, parameters: Sequence[torch.Tensor]
) -> Placement | PlacementRules:
    """The placement of a graph's ordinary parameters, on this rank. Nothing is captured where they fit on the device,
    with room for activations. Raises: BudgetError when nothing fits."""
    groups = Ranks.of(config).groups
    here = trained_here(parameters)
    tables = tables_in(module, inputs)
    sizes = sizes_of(here, config, groups, tables)
    alone = by_rule_here(config, here, groups, sizes, "nothing leaves")
    if alone.nothing_moves:
        note(alone, sizes)
        return alone.placement
    anywhere = Config.of(config, {"placement": "nvme"})
    stored = abstract_inputs(module, inputs, anywhere)
    if anywhere.micro_batches == "auto":
        capture = Divisions(module, stored, anywhere, groups, seen=inputs).finest
    else:
        capture = Capture(module, stored, anywhere, groups=groups, seen=inputs)
    return decided_for([capture], parameters, config, groups, tables=tables)[0].placement


def plans_that_move(plans: Iterable[Plan | None]) -> list[Plan]:
    """The plans of graphs that use parameters."""
    return [plan for plan in plans if plan is not None and any(graph.tiles for graph in plan.graphs)]
