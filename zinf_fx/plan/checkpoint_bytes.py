"""What it costs to save a training again and again: bytes, seconds, disk and wear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from zinf_fx.plan.hardware import SECONDS_PER_DAY, Hardware
from zinf_fx.plan.plan import Plan


@dataclass(frozen=True)
class CheckpointSizes:
    """What a checkpoint has, in bytes of all ranks together. It has no gradients: steps consume them.

    Attributes:
        parameters, states: of the model's parameters, and of the optimizer's states, by dtype.
        in_store: how many of all live in the store.
    """

    parameters: Mapping[str, int]
    states: Mapping[str, int]
    in_store: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parameters.values()) + sum(self.states.values())


def checkpoint_sizes(plan: Plan) -> CheckpointSizes:
    """What a checkpoint has of a plan's parameters, as training with Adam keeps them."""
    parameters: Counter[str] = Counter()
    states: Counter[str] = Counter()
    in_store = 0
    for tile in plan.tiles:
        if tile.activation:
            continue
        dtype, size = str(tile.dtype).removeprefix("torch."), tile.dtype.itemsize
        counts = [member.numel for member in tile.members] or [tile.numel]
        count = sum(counts)
        parameters[dtype] += count * size
        in_store += count * size * (tile.tier == "nvme")
        if tile.gradient_tier is not None:
            for elements in counts:
                states += tile.states.nbytes_by_dtype(elements, dtype)
            in_store += count * sum(tile.states.bytes_each) * (tile.state_tier == "nvme")
    return CheckpointSizes(dict(parameters), dict(states), in_store)


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
        of_one: what each has.
        every: seconds from one to the next.
        kept: how many there are.
        copied: all of it.
        by_generations: what lives in the store stays there, and is rewritten elsewhere; the rest is copied. So it is
            where checkpoints are on the store's file system.
    """

    of_one: CheckpointSizes
    every: float
    kept: int
    copied: Saving
    by_generations: Saving


def checkpoints(of_one: CheckpointSizes, hardware: Hardware, *, every: float, kept: int) -> Checkpoints:
    """What checkpoints cost, one every so many seconds, of which so many are kept."""

    def saving(stays: int) -> Saving:
        written = of_one.nbytes - stays
        of_node = written / hardware.nodes
        per_day = of_node * SECONDS_PER_DAY / every
        return Saving(
            written=written,
            seconds=of_node / hardware.nvme.write,
            on_disk=kept * stays + (kept + 1) * written,
            written_per_day=per_day,
            days=hardware.nvme.days_until_worn(per_day),
        )

    return Checkpoints(of_one, every, kept, copied=saving(0), by_generations=saving(of_one.in_store))
