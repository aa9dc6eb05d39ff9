"""What "auto" decides by planning captured graphs: the micro-batches that each runs in, and the placement of a model.

How many micro-batches there are, `Config.micro_batches` says, or "auto" decides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import fx

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.auto_placement import by_rule_here, device_of_most, note, sizes_of, this_machine, trained_here
from zinf_fx.frontend.capture import Capture
from zinf_fx.frontend.graph_inputs import abstract_inputs, graph_inputs, input_names, tables_in
from zinf_fx.frontend.micro_batches import batch_size, hold_sizes
from zinf_fx.frontend.parameters import is_ordinary, kept_in_their_format
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.codec import encode
from zinf_fx.plan.files.digest import digest_of
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import Decision, decide
from zinf_fx.plan.placement.division import Division, OperatorGroup, counts_for, decide_division
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import GraphKind
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.execute.inductor import CompiledRegion
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.tensor_parallel import found_by_first

log = logging.getLogger("zinf_fx")


@dataclass(frozen=True)
class PlannedGraph:
    """A graph of Dynamo's with a plan.

    Attributes:
        capture: what was planned.
        asked: with which options, in the place of its own.
        plan: None for a graph without anything to plan.
        division: how the micro-batches were decided; None: there was nothing to decide.
    """

    capture: Capture
    asked: Mapping[str, Any]
    plan: Plan | None
    division: Division | None = None

    @property
    def moves(self) -> bool:
        """Whether the graph uses parameters."""
        return self.plan is not None and any(graph.tiles for graph in self.plan.graphs)

    def runnable(self) -> dict[GraphKind, tuple[fx.Graph, dict[str, CompiledRegion]]]:
        """Return the graphs that run: see `Capture.runnable`."""
        self.capture.planned(**self.asked)  # which may have been asked for another plan since
        return self.capture.runnable()

    def noted_division(self) -> dict[str, object]:
        """The options of how the batch is divided. Where they were decided, the log says so."""
        if self.division is not None:
            log.info("micro_batches auto: %s", self.division.reason)
        config = self.capture.config_with(self.asked)
        return _division(config.micro_batches, config.micro_batch_group)


class Divisions:
    """One graph of Dynamo's, and the numbers of micro-batches that its batch may be divided into: that of the options
    or, with "auto", those to decide among. For each that is asked for, the graph is captured once.

    The arguments are those of `Capture`; `groups`: to plan for, alone. Raises: ConfigError where "auto" can't tell what
    the batch is.

    Attributes:
        decides: whether there are several.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        config: Config,
        groups: Groups,
        rates: Rates | None = None,
        seen: Sequence[Any] | None = None,
    ) -> None:
        self._config, self._ranks, self._inputs = config, groups.ranks, list(inputs)
        self._options: dict[int, tuple[OperatorGroup, ...]]
        if config.micro_batches == "auto":
            captured_inputs = graph_inputs(module, self._inputs, self._inputs if seen is None else seen)
            groupings = (1, "auto") if config.micro_batch_group == 1 else (config.micro_batch_group,)
            counts = counts_for(batch_size(module, captured_inputs, config) or 1)
            self._options = {count: groupings if count > 1 else (1,) for count in counts}
        else:
            self._options = {config.micro_batches: (config.micro_batch_group,)}
        self.decides = len(self._options) > 1
        self._capture = partial(Capture, module, self._inputs, config, rates=rates, groups=groups, seen=seen)
        self._captures: dict[int, Capture | ConfigError] = {}

    def capture(self) -> None:
        """Get at the graphs that may be planned, while Dynamo waits for what it compiles to, and no further. Raises:
        ConfigError where none can be."""
        captures = []
        for count in self._options:
            with suppress(ConfigError):
                captures.append(self._captured(count))
        self._check_any()
        if any(capture.holds_sizes for capture in captures):  # as where the plan will be followed
            hold_sizes(self._inputs)

    def planned(
        self, placement: Placement | PlacementRules | None = None, hardware: Hardware | None = None, **options: object
    ) -> PlannedGraph:
        """The graph, planned as if its parameters lived where `placement` says, if that is given.

        `hardware`: to decide for; default this machine, at nominal rates. `options`: of planning, in the place of the
        graph's own. Raises: BudgetError when nothing fits; ConfigError where the graph can't be divided.
        """
        asked = options if placement is None else {**options, "placement": placement}
        if not self.decides:
            (count,) = self._options
            capture = self._captured(count)
            return PlannedGraph(capture, asked, capture.planned(**asked))

        @cache
        def plan_with(count: int, group: OperatorGroup) -> Plan:
            plan = self._captured(count).planned(**asked, micro_batch_group=group)
            assert plan is not None
            return plan

        self._check_any()
        if hardware is None:
            trained = [tensor for tensor in self._inputs if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
            hardware = this_machine(self._config, device_of_most(trained))
        division = decide_division(plan_with, self._options, hardware, self._ranks)
        count, group = division.chosen.micro_batches, division.chosen.group
        plan = plan_with(count, group)
        return PlannedGraph(self._captured(count), {**asked, "micro_batch_group": group}, plan, division)

    def _check_any(self) -> None:
        """Raises: ConfigError where the graph can be captured with no number of micro-batches."""
        for count in self._options:
            with suppress(ConfigError):
                self._captured(count)
                return
        self._captured(next(iter(self._options)))

    def _captured(self, count: int) -> Capture:
        """Raises: ConfigError where the graph can't be divided so."""
        if count not in self._captures:
            division = _division(count, self._options[count][-1]) if self._config.micro_batches == "auto" else {}
            capture: Capture | ConfigError
            try:
                capture = self._capture(division=division)
                capture.capture()
            except ConfigError as error:
                capture = error
            self._captures[count] = capture
        capture = self._captures[count]
        if isinstance(capture, ConfigError):
            raise capture
        return capture


def decided_division(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    config: Config,
    groups: Groups | None = None,
    seen: Sequence[Any] | None = None,
) -> Mapping[str, Any]:
    """The options of how the batch of a graph is divided that is about to be compiled, decided for this machine where
    `config` leaves them to "auto"; else none. Ranks take what the first one finds.

    Raises: BudgetError when nothing fits; ConfigError where it can't be told what the batch is.
    """

    def find() -> Mapping[str, Any]:
        divisions = Divisions(module, inputs, config, groups or ranks.groups, seen=seen)
        return divisions.planned().noted_division() if divisions.decides else _division(1, 1)

    if config.micro_batches != "auto":
        return {}
    if groups is not None:
        return find()
    ranks = Ranks.of(config)
    if ranks.size == 1:  # no rank needs it when the others don't: each size of a batch is decided for
        return found_by_first(config, inputs, find, "the micro-batches")
    captured_inputs = graph_inputs(module, list(inputs), list(inputs if seen is None else seen))
    parameters = [
        [graph_input.name, *graph_input.taken.shape] for graph_input in captured_inputs if graph_input.is_stored
    ]
    key = f"micro-batches {digest_of([encode(config), torch.is_grad_enabled(), parameters])}"
    decided = ranks.decided_once(key, lambda: found_by_first(config, inputs, find, "the micro-batches"))
    # This rank's batch may be of another size than that for which it was decided.
    count = math.gcd(decided["micro_batches"], batch_size(module, captured_inputs, config) or 1)
    return _division(count, decided["micro_batch_group"] if count > 1 else 1)


def _division(count: int | Literal["auto"], group: OperatorGroup) -> dict[str, Any]:
    return {"micro_batches": count, "micro_batch_group": group}


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

    `hardware`: to decide for; default this machine, at nominal rates. `tables`: ids of parameters that are not to be
    quantised. Raises: BudgetError when nothing fits.
    """
    here = trained_here(parameters)
    if hardware is None:
        hardware = this_machine(config, device_of_most(here))

    @cache
    def planned_with(placement: Placement | PlacementRules) -> list[PlannedGraph]:
        return [graph.planned(placement, hardware) for graph in graphs]

    def plans_with(placement: Placement | PlacementRules) -> list[Plan]:
        return [graph.plan for graph in planned_with(placement) if graph.plan is not None and graph.moves]

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
    named = {name: value for name, value in zip(input_names(module), inputs, strict=True) if is_ordinary(value)}
    tables = kept_in_their_format(config, named, tables_in(module, inputs))
    sizes = sizes_of(here, config, groups, tables)
    alone = by_rule_here(config, here, groups, sizes, "nothing leaves")
    if alone.nothing_moves:
        note(alone, sizes)
        return alone.placement, {}
    anywhere = Config.of(config, {"placement": "nvme"})
    graph = Divisions(module, abstract_inputs(module, inputs, anywhere), anywhere, groups, seen=inputs)
    decision, (planned,) = decided_for([graph], parameters, config, groups, tables=tables)
    return decision.placement, planned.noted_division()
