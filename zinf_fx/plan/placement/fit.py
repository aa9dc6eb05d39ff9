"""Whether a plan fits the memories of described hardware."""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.placement import Tier
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import exceeding, needed_with_values
from zinf_fx.plan.placement.placing import capacities
from zinf_fx.plan.plan import Plan


@dataclass(frozen=True)
class MemoryFit:
    """One memory of a rank, in bytes: `needed` at most with what is in flight, of which `values` are what operators
    compute with; and what there is of it, `capacity`."""

    needed: int
    values: int
    capacity: int

    @property
    def fits(self) -> bool:
        """Whether there is as much as is needed."""
        return self.needed <= self.capacity


@dataclass(frozen=True)
class Fit:
    """The memories of a rank, and the reason why the first that is too small is; None: all are large enough.

    Device and host that are one memory are one here too: "device".
    """

    memories: dict[Tier, MemoryFit]
    refused: str | None


def fit_of(plan: Plan, hardware: Hardware) -> Fit:
    """A plan's use of the memories that one of its ranks has on the hardware."""
    there = capacities(hardware, plan.world_size)
    values, needed = needed_with_values(plan, there)
    excess = exceeding(needed, there)
    memories: dict[Tier, MemoryFit] = {
        tier: MemoryFit(nbytes, values if tier == "device" else 0, getattr(there, tier))
        for tier, nbytes in needed.items()
        if tier != "host" or there.host
    }
    return Fit(memories, None if excess is None else excess[1])
