"""`placement="auto"` for a model of which the graphs are captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from zinf_fx.config import Config
from zinf_fx.frontend.abstract import abstract_inputs
from zinf_fx.frontend.auto_placement import by_rule_here, device_of_most, note, sizes_of, this_machine, trained_here
from zinf_fx.frontend.dividing import Divisions, PlannedGraph
from zinf_fx.frontend.each_placement import left_as_they_are
from zinf_fx.frontend.graph_inputs import input_names
from zinf_fx.frontend.quantising import tables_in
from zinf_fx.frontend.staying import is_ordinary
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import Decision, decide
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.ranks import Ranks


def decided_for(
    graphs: Sequence[Divisions],
    parameters: Sequence[torch.Tensor],
    config: Config,
    groups: Groups,
    hardware: Hardware | None = None,
    tables: Collection[int] = (),
) -> tuple[Decision, list[PlannedGraph]]:
    """The placement of the model that these graphs are of, and the graphs, planned with it. For every placement that is
    considered, it is decided anew how their batches are divided, where "auto" is to decide that, too.

    `hardware`: to decide for; default this machine, at nominal rates. `tables`: ids of parameters that are looked up by
    rows. Raises: BudgetError when nothing fits.
    """
    here = trained_here(parameters)
    if hardware is None:
        hardware = this_machine(config, device_of_most(here))

    @cache
    def planned_with(placement: Placement | PlacementRules) -> list[PlannedGraph]:
        return [graph.planned(placement, hardware) for graph in graphs]

    def plans_with(placement: Placement | PlacementRules) -> list[Plan]:
        return [one.plan for one in planned_with(placement) if one.moves]

    sizes = sizes_of(here, config, groups, tables)
    decision = decide(plans_with, sizes, config, hardware, groups.ranks, len(here))
    note(decision, sizes)
    return decision, planned_with(decision.placement)


def at_first_call(
    module: fx.GraphModule, inputs: Sequence[Any], config: Config, parameters: Sequence[torch.Tensor]
) -> tuple[Placement | PlacementRules, Mapping[str, object]]:
    """The placement of a graph's ordinary parameters, on this rank, and the options of how its batch is divided where
    planning for the placement has decided them.

    Nothing is captured where they fit on the device, with room for activations. Raises: BudgetError when nothing fits.
    """
    groups = Ranks.of(config).groups
    here = trained_here(parameters)
    named = {name: one for name, one in zip(input_names(module), inputs, strict=True) if is_ordinary(one)}
    tables = left_as_they_are(config, named, tables_in(module, inputs))
    sizes = sizes_of(here, config, groups, tables)
    alone = by_rule_here(config, here, groups, sizes, "nothing leaves")
    if alone.nothing_moves:
        note(alone, sizes)
        return alone.placement, {}
    anywhere = Config.of(config, {"placement": "nvme"})
    graph = Divisions(module, abstract_inputs(module, inputs, anywhere), anywhere, groups, seen=inputs)
    decision, (planned,) = decided_for([graph], parameters, config, groups, tables=tables)
    return decision.placement, planned.noted_division()
