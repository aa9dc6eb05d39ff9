"""`micro_batches="auto"` for a captured graph."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, ZinfError
from zinf_fx.frontend.auto_placement import device_of_most, this_machine
from zinf_fx.frontend.capture import Capture
from zinf_fx.frontend.graph_inputs import graph_inputs
from zinf_fx.frontend.micro_batches import batch_size, hold_sizes
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.division import Division, Group, counts_for, decide_division
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.tensor_parallel import of_first

log = logging.getLogger("zinf_fx")

_OPTIONS = ("micro_batches", "micro_batch_group")


@dataclass(frozen=True)
class Settled:
    """What is planned, with which options, and how those were decided that were open."""

    capture: Capture
    options: Mapping[str, Any]
    division: Division | None = None

    @property
    def plan(self) -> Plan | None:
        """The graph's plan."""
        return self.capture.planned(**self.options)

    @property
    def micro_batches(self) -> dict[str, object]:
        """The options of how the batch is divided."""
        return {name: getattr(self.capture.config_with(self.options), name) for name in _OPTIONS}


class Divisions:
    """One graph of Dynamo's, captured for each number of micro-batches that its batch may be divided into; for one
    where it isn't divided.

    The arguments are those of `Capture`; `groups`: to plan for, alone. Raises: ConfigError where it can't be told what
    the batch is.

    Attributes:
        divides: whether there is anything to decide.
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
        given = list(inputs)
        size = batch_size(module, graph_inputs(module, given, given if seen is None else seen), config)
        self.divides = size is not None and size > 1
        counts = [1] if size is None else counts_for(size)
        groupings: tuple[Group, ...] = (1, "auto") if config.micro_batch_group == 1 else (config.micro_batch_group,)
        self._options = {count: groupings if count > 1 else (1,) for count in counts}
        self._config, self._ranks = config, groups.ranks
        self._trained = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        self._captured = partial(Capture, module, given, rates=rates, groups=groups, seen=seen)

    def capture(self) -> None:
        """Get at the graphs that may be planned, and no further."""
        assert self.captures

    @cached_property
    def captures(self) -> dict[int, Capture | ConfigError]:
        """By the number of micro-batches; an error where the graph can't be divided so. Dynamo's graph is captured
        while Dynamo waits for what it compiles to."""
        found: dict[int, Capture | ConfigError] = {}
        for count, (*_, group) in self._options.items():
            options = {"micro_batches": count, "micro_batch_group": group}
            try:
                found[count] = self._captured(config=Config.of(self._config, options))
                found[count].capture()
            except ConfigError as error:
                found[count] = error
        return found

    @property
    def finest(self) -> Capture:
        """With the most micro-batches, which need least memory."""
        return [one for one in self.captures.values() if isinstance(one, Capture)][-1]

    def decided(self, asked: Mapping[str, Any], hardware: Hardware | None = None) -> Settled:
        """What the graph is planned with; `asked`: options besides the micro-batches.

        `hardware`: to decide for; default this machine, at nominal rates. Raises: BudgetError when nothing fits.
        """
        if not self.divides:
            return Settled(self.finest, asked)

        def plan_with(count: int, group: Group) -> Plan:
            found = self.captures[count]
            if isinstance(found, ConfigError):
                raise found
            return found.planned(**asked, micro_batch_group=group)

        if hardware is None:
            hardware = this_machine(self._config, device_of_most(self._trained))
        division = decide_division(plan_with, self._options, hardware, self._ranks)
        chosen = division.chosen
        log.info("micro_batches auto: %s", division.reason)
        return Settled(self.captures[chosen.micro_batches], {**asked, "micro_batch_group": chosen.group}, division)


def divided(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    config: Config,
    groups: Groups | None = None,
    seen: Sequence[Any] | None = None,
) -> Config:
    """`config` with the micro-batches of a graph that is about to be compiled, decided for this machine where they are
    "auto". Ranks take what the first one finds.

    Raises: BudgetError when nothing fits; ConfigError where it can't be told what the batch is.
    """
    if config.micro_batches != "auto":
        return config
    found: dict[str, object] | ZinfError = dict.fromkeys(_OPTIONS, 1)
    divides = True
    try:
        divisions = Divisions(module, inputs, config, groups or Ranks.of(config).groups, seen=seen)
        if divides := divisions.divides:
            found = divisions.decided({}).micro_batches
    except ZinfError as error:  # of the first rank, it is raised on every rank
        found = error
    if groups is None:
        found = of_first(config, inputs, found, "the micro-batches")
    if isinstance(found, ZinfError):
        raise found
    if divides and found["micro_batches"] == 1:
        hold_sizes(inputs)  # another batch is decided for anew
    return Config.of(config, found)
