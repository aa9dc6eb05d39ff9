"""`micro_batches="auto"`: into how many parts a batch is divided, and by what groups of operators they run, planned and
simulated.

More micro-batches hold less at once and, with their smaller kernels, compute for longer. So the fewest are taken with
which a step fits and, simulated, takes about the least time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zinf_fx.errors import BudgetError, ConfigError, ZinfError
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import exceeding, needed_with_values
from zinf_fx.plan.placement.placing import Rooms, capacities
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.sizes import in_words
from zinf_fx.tables import table

OperatorGroup = int | Literal["auto"]
"""What a micro-batch runs before the next one does, as `Config.micro_batch_group`."""

# The share of a step by which fewer micro-batches may be slower.
_TIE = 0.01


def counts_for(batch: int) -> list[int]:
    """The numbers of micro-batches that are considered: of the divisors of the batch size, 1, and each that is at least
    twice the one before."""
    counts = [1]
    for count in range(2, batch + 1):
        if batch % count == 0 and count >= 2 * counts[-1]:
            counts.append(count)
    return counts


@dataclass(frozen=True)
class Divided:
    """A division that was considered.

    Attributes:
        micro_batches, group: as the options of these names.
        saved: bytes of activations that stay on the device for backward.
        values: bytes that an operator computes with at most.
        device, host, nvme: bytes of one rank in each memory, with what is in flight at most; on the device with
            `values`, too.
        seconds: of a simulated step; None: none was simulated.
        refused: why it doesn't fit, or can't be; empty: it does.
    """

    micro_batches: int
    group: OperatorGroup
    saved: int = 0
    values: int = 0
    device: int = 0
    host: int = 0
    nvme: int = 0
    seconds: float | None = None
    refused: str = ""

    def __str__(self) -> str:
        by = {1: "", "auto": " by groups of operators"}.get(self.group, f" by groups of {self.group} operators")
        return f"{self.micro_batches}{by}"


@dataclass(frozen=True)
class Division:
    """What "auto" decided for a graph.

    Attributes:
        chosen: that is taken.
        hardware: what it was decided for.
        considered: in order, those of fewer micro-batches first; none of more where these made no step faster.
        reason: for the choice, a clause.
    """

    chosen: Divided
    hardware: str
    considered: tuple[Divided, ...]
    reason: str

    def __str__(self) -> str:
        headers = ["", "micro-batches", "saved", "values", "device", "host", "NVMe", "s per step"]
        rows = [
            [
                "taken" if division == self.chosen else "",
                str(division),
                *("" if not nbytes else in_words(nbytes) for nbytes in (division.saved, division.values)),
                *("" if not nbytes else in_words(nbytes) for nbytes in (division.device, division.host, division.nvme)),
                "doesn't fit" if division.refused else "" if division.seconds is None else f"{division.seconds:.4g}",
            ]
            for division in self.considered
        ]
        refused = [f"{division}: {division.refused}" for division in self.considered if division.refused]
        title = f"micro_batches auto, for {self.hardware}: {self.reason}."
        return "\n".join([title, "", table(rows, headers, left=range(2)), *refused])


def decide_division(
    plan_with: Callable[[int, OperatorGroup], Plan],
    options: Mapping[int, Sequence[OperatorGroup]],
    hardware: Hardware,
    ranks: int,
) -> Division:
    """The fewest micro-batches, by such groups, with which a step fits and takes about the least simulated time.

    Args:
        plan_with: makes a graph's plan.
        options: the numbers of micro-batches to consider, the least first, and the groups for each. More than fit are
            considered as long as they make a step faster.

    Raises: BudgetError when nothing fits.
    """
    hardware = hardware.with_ranks(ranks)
    there = capacities(hardware, ranks)
    considered: list[Divided] = []
    fitting: list[Divided] = []
    for count, groups in options.items():
        least = min(map(_seconds_of, fitting), default=math.inf)
        for group in groups:
            division, plan = _considered(plan_with, count, group, there)
            if plan is not None:
                try:
                    division = replace(division, seconds=simulate_plan(plan, hardware).seconds)
                except ZinfError as error:
                    reason = f"the first that fits, {division}: no step can be simulated, because {error}"
                    return Division(division, hardware.name, (*considered, division), reason)
                fitting.append(division)
            considered.append(division)
        if fitting and min(map(_seconds_of, fitting)) >= (1 - _TIE) * least:
            break
    if not fitting:
        tried = [f"{division}: {division.refused}" for division in considered]
        message = f"micro_batches 'auto' finds none with which a step fits. With {tried[0]}"
        raise BudgetError("\n  ".join([f"{message}\nTried:", *tried]))
    least = min(map(_seconds_of, fitting))
    near = [division for division in fitting if _seconds_of(division) <= (1 + _TIE) * least]
    chosen = min(near, key=lambda division: (division.micro_batches, division.device + division.host))
    reason = f"{chosen}, with which a simulated step takes {chosen.seconds:.4g} s"
    if chosen.micro_batches > min(options):
        reason += "; fewer don't fit" if chosen.micro_batches == fitting[0].micro_batches else "; fewer take longer"
    return Division(chosen, hardware.name, tuple(considered), reason)


def _seconds_of(divided: Divided) -> float:
    assert divided.seconds is not None
    return divided.seconds


def _considered(
    plan_with: Callable[[int, OperatorGroup], Plan], count: int, group: OperatorGroup, there: Rooms
) -> tuple[Divided, Plan | None]:
    """What a division takes of each memory, and its plan; None: it doesn't fit, or can't be."""
    try:
        plan = plan_with(count, group)
    except (BudgetError, ConfigError) as error:
        return Divided(count, group, refused=str(error).splitlines()[0]), None
    values, needed = needed_with_values(plan, there)
    division = Divided(count, group, plan.kept, values, **needed)
    if (excess := exceeding(needed, there)) is not None:
        return replace(division, refused=excess[1]), None
    return division, plan
