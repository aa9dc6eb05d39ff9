"""What it costs to save a training again and again: bytes, seconds, disk and wear."""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.plan.hardware import SECONDS_PER_DAY, Hardware


@dataclass(frozen=True)
class Saving:
    """One way to save; of all nodes, where nothing else is said.

    Attributes:
        written: bytes that are written for a checkpoint.
        seconds: that it takes to write them, each node its share to its own drives, which do nothing else.
        on_disk: bytes of the checkpoints that are kept and, until it has replaced the oldest, of what is written of the
            next one; besides what training has there.
        written_per_day: bytes per day on one node.
        days: until a node's drives have written what they endure, if they write nothing else; None where that isn't
            known or nothing is written.
    """

    written: int
    seconds: float
    on_disk: int
    written_per_day: float
    days: float | None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a training.

    Attributes:
        nbytes: of one: parameters and the optimizer's states, without gradients, which steps consume.
        every: seconds from one to the next.
        kept: how many there are.
        copied: all of it.
        by_generations: what lives in the store stays there, and is rewritten elsewhere; the rest is copied. So it is
            where checkpoints are on the store's file system.
    """

    nbytes: int
    every: float
    kept: int
    copied: Saving
    by_generations: Saving


def checkpoints(nbytes: int, in_store: int, hardware: Hardware, *, every: float, kept: int) -> Checkpoints:
    """What checkpoints of so many bytes cost, of which `in_store` live in the store."""

    def saving(stays: int) -> Saving:
        written = nbytes - stays
        of_node = written / hardware.nodes
        per_day = of_node * SECONDS_PER_DAY / every
        return Saving(
            written=written,
            seconds=of_node / hardware.nvme.write,
            on_disk=kept * stays + (kept + 1) * written,
            written_per_day=per_day,
            days=hardware.nvme.days_until_worn(per_day),
        )

    return Checkpoints(nbytes, every, kept, copied=saving(0), by_generations=saving(in_store))
