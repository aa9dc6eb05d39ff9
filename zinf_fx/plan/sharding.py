"""How ranks are grouped, and how the elements of a tensor are divided over those of a group: in equal parts, so that
every rank's link and disk works on every tile (bandwidth-centric partitioning; ZeRO-Infinity, section 6.1); or all to
one rank, its owner (ZeRO-Offload)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from zinf_fx.config import Config
from zinf_fx.sizes import BLOCK, PAGE, round_up

# Shards of what may live on NVMe are whole pages of the store in every dtype: bytes, which are frozen, by themselves,
# and all that has gradients and states of other dtypes, divided alike. Others are whole blocks.
_NVME_BYTES = PAGE
_NVME_ELEMENTS = PAGE // 2
_MEMORY_ELEMENTS = BLOCK


@dataclass(frozen=True)
class Groups:
    """`replicas` groups of `shards` ranks each: a group has all of a model, divided over its ranks.

    With one group, everything is partitioned over all ranks. With several, as of the ranks of a node each, what is
    partitioned is gathered within a group (hybrid sharding). Where nothing is partitioned, in data parallelism, each
    rank is a group by itself.
    """

    replicas: int = 1
    shards: int = 1

    @classmethod
    def of(cls, ranks: int, replicas: int, stage: int) -> Groups:
        """The grouping of so many ranks, of which `replicas` are to divide into groups, at a stage of ZeRO."""
        return cls(ranks, 1) if stage == 0 else cls(replicas, ranks // replicas)

    @property
    def ranks(self) -> int:
        """How many ranks all groups have."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.ranks} rank(s)" + (f" in {self.replicas} groups" if 1 < self.replicas < self.ranks else "")


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a tensor that are divided over ranks by themselves.

    Attributes:
        start, count: which of the tensor's they are.
        ranks: how many there are.
        shard: elements of each rank's part; of the last ones with padding, or all padding.
        held: where this part begins among all elements that a rank holds.
        owner: the rank that has all of it, and the only part; None: there is none.
    """

    start: int
    count: int
    ranks: int
    shard: int
    held: int
    owner: int | None = None

    @property
    def padded(self) -> int:
        """Elements of all parts together."""
        return self.shard if self.owner is not None else self.ranks * self.shard

    def held_by(self, rank: int) -> range:
        """Return where a rank's part, with padding, is among all elements that it holds."""
        if self.owner not in (None, rank):
            return range(0)
        return range(self.held, self.held + self.shard)

    def gathered_from(self, rank: int) -> range:
        """Where a rank's part, with padding, is among those of all ranks in a row."""
        first = 0 if self.owner is not None else rank * self.shard
        return range(first, first + len(self.held_by(rank)))

    def of_rank(self, rank: int) -> range:
        """The tensor's elements in one rank's part, without padding."""
        if self.owner is not None:
            return range(self.start, self.start + len(self.held_by(rank)))
        first, end = (min(number * self.shard, self.count) for number in (rank, rank + 1))
        return range(self.start + first, self.start + end)


@dataclass(frozen=True)
class Shards:
    """How `numel` elements, flat, are divided over ranks.

    [Note: segments]
    Each of the tensor's segments, of `segment` elements and what is left in the last, is divided into equal parts, and
    a rank's shard is its parts of all segments in a row. So a tile of whole segments is gathered, and its gradient
    reduced, from consecutive elements of every rank's shard, as large as the tile over the ranks. All segments but the
    last divide without padding: gathered side by side they are the tensor.

    `step`: what the size of a part is a multiple of. `owner`: the rank that has all segments whole, and the others
    nothing; None: there is none.
    """

    numel: int
    ranks: int
    segment: int
    step: int = 1
    owner: int | None = None

    @classmethod
    def of(
        cls, numel: int, ranks: int, on_nvme: bool, owner: int | None = None, dtype: torch.dtype | None = None
    ) -> Shards:
        """The division over so many ranks as one segment. `on_nvme`: whether any state of the parameter lives there:
        all of them are divided alike. `dtype`: where it is not known, one of at least two bytes."""
        in_store = _NVME_BYTES if dtype is not None and dtype.itemsize == 1 else _NVME_ELEMENTS
        step = in_store if on_nvme else _MEMORY_ELEMENTS
        return cls(numel, ranks, numel, step if ranks > 1 else 1, owner if ranks > 1 else None)

    def in_tiles(self, per_row: int, limit: int) -> Shards:
        """Return the division in tiles of about `limit` elements, each a segment of whole rows of `per_row`."""
        rows = self.numel // per_row
        together = self.step if self.owner is not None else self.ranks * self.step
        unit = together // math.gcd(together, per_row)  # of so many rows, each rank gets equal parts
        most = max(limit // (per_row * unit), 1) * unit
        rows_of_tile = round_up(-(-rows // -(-rows // most)), unit)
        return replace(self, segment=min(rows_of_tile * per_row, self.numel))

    def in_blocks(self, elements: int) -> Shards:
        """The division of the tensor's blocks of so many elements, each of which is a part of one shard."""
        assert self.ranks == 1 or self.step % elements == 0, self
        numel, segment = -(-self.numel // elements), -(-self.segment // elements)
        return replace(self, numel=numel, segment=segment, step=max(self.step // elements, 1))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in order; there is one if there are no elements."""
        segments: list[Segment] = []
        held = 0
        for start in range(0, max(self.numel, 1), max(self.segment, 1)):
            shard = count = min(self.segment, self.numel - start)
            if self.owner is None:
                shard = round_up(count, self.ranks * self.step) // self.ranks
            segments.append(Segment(start, count, self.ranks, shard, held, self.owner))
            held += shard
        return tuple(segments)

    @property
    def is_one_part(self) -> bool:
        """Whether every rank's shard is one part of the tensor, and all are of the same size."""
        return len(self.segments) == 1 and self.owner is None

    @property
    def size(self) -> int:
        """Elements of a rank's shard, with padding; where there are owners, on average over the ranks."""
        return -(-self.padded // self.ranks)

    @cached_property
    def padded(self) -> int:
        """Elements of all shards together."""
        return sum(segment.padded for segment in self.segments)

    def held_by(self, rank: int) -> int:
        """Elements of one rank's shard, with padding."""
        return self.segments[-1].held_by(rank).stop

    def within(self, start: int, count: int) -> tuple[Segment, ...]:
        """The segments that so many elements from `start` on are."""
        per_segment = max(self.segment, 1)
        first = start // per_segment
        covered = self.segments[first : first + max(-(-count // per_segment), 1)]
        elements = sum(segment.count for segment in covered)
        assert covered and (covered[0].start, elements) == (start, count), (self, start, count)
        return covered

    def of_rank(self, rank: int) -> tuple[range, ...]:
        """The elements of one rank's shard, without padding: none of small tensors for the last ranks."""
        parts = [segment.of_rank(rank) for segment in self.segments]
        return tuple(part for part in parts if part) or (range(self.numel, self.numel),)

    def position(self, rank: int, element: int) -> int:
        """Return where an element of the rank's shard, or the one after the last, is in it."""
        segment = self.segments[min(element // max(self.segment, 1), len(self.segments) - 1)]
        held = segment.held_by(rank)
        return held.start + min(max(element - segment.of_rank(rank).start, 0), len(held))


class Owners:
    """Deals a model's parameters, in the order in which they come, to the ranks of a group: each to the one that owns
    the fewest bytes so far."""

    def __init__(self, ranks: int) -> None:
        self._bytes = [0] * ranks

    def next(self, nbytes: int) -> int:
        """The owner of so many bytes, if there is to be one."""
        owner = self._bytes.index(min(self._bytes))
        self._bytes[owner] += nbytes
        return owner


# Of the least budget, the smallest tiles that "auto" tries.
_SMALLEST_TILE = 64


def shards_of(shape: Sequence[int], dtype: torch.dtype, ranks: int, config: Config, owner: int | None = None) -> Shards:
    """The division of a parameter over the ranks of a group: with segments of the size of `Config.tile`. `owner`: the
    rank that has all of it where `Config.partition` says that one has; default the first."""
    owner = (owner or 0) if config.partition == "owner" else None
    limit = config.tile
    if limit == "auto":
        budgets = [budget for budget in (config.device_memory, config.host_memory) if budget is not None]
        limit = max(min(budgets) // _SMALLEST_TILE, 1) if budgets else None
    whole = Shards.of(math.prod(shape), ranks, config.on_nvme, owner, dtype)
    if limit is None or ranks == 1 or len(shape) < 2 or whole.numel * dtype.itemsize <= limit:
        return whole
    return whole.in_tiles(math.prod(shape[1:]), limit // dtype.itemsize)
