"""What one of many ranks has of a stored tensor's elements, and whether that is their present version."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.ranks import ALONE, Collective, Ranks


class LocalShard:
    """This rank's part in the elements of one stored tensor.

    [Note: shards in storages]
    Of a partitioned tensor, a rank holds its shard alone; `position` says where in it an element is. Where every rank
    has all elements, but each updates its own shard only (ZeRO, stages 1 and 2), the tensor is `stale` from an update
    until the other shards are gathered, before the next look at the whole.

    Attributes:
        ranks: the ranks over which the tensor is divided into `shards`.
        partitioned: whether this rank holds its shard alone.
        held: how many elements this rank holds, padding of its shard included.
        stale: whether other ranks have newer elements, which nobody has begun to gather.
        refreshing: what gathers them, until it was waited for.
        agreed: whether every rank that has all elements has the same.
        part_of: the process groups over whose ranks the tensor is divided that this is a part of (tensor parallelism).
        wrapper: the wrapper of a model with this parameter, whose `no_sync` holds for it too.
    """

    def __init__(self, shards: Shards, ranks: Ranks = ALONE, partitioned: bool = False) -> None:
        """`shards` divides the elements of the tensor over the ranks of a group."""
        self.ranks, self.shards = ranks, shards
        self.partitioned = partitioned and ranks.shards > 1
        self.held = shards.held_by(ranks.shard) if self.partitioned else shards.numel
        self.stale = False
        self.refreshing: Refresh | None = None
        self.agreed = True
        self.part_of: tuple[dist.ProcessGroup, ...] = ()
        self.wrapper: weakref.ref[DistributedDataParallel] | None = None

    @property
    def own(self) -> tuple[range, ...]:
        """The elements of the tensor that this rank's shard has."""
        return self.shards.of_rank(self.ranks.shard)

    def position(self, element: int) -> int:
        """Return where an element of the tensor is among those held."""
        return self.shards.position(self.ranks.shard, element) if self.partitioned else element

    def held_of(self, start: int, count: int) -> range:
        """Return where so many elements of the tensor from `start` on are among those held, with padding: whole
        segments of a partitioned one."""
        if not self.partitioned:
            return range(start, start + count)
        segments = self.shards.within(start, count)
        first = segments[0].held_by(self.ranks.shard).start
        return range(first, first + sum(len(segment.held_by(self.ranks.shard)) for segment in segments))

    @property
    def in_shards(self) -> bool:
        """Whether each rank has the present version of its own shard only. All ranks answer alike, also where one's
        shard is the whole of a small tensor: collectives depend on it."""
        return self.partitioned or self.stale

    @property
    def current(self) -> tuple[range, ...]:
        """The elements of the tensor that are here, in their present version."""
        return self.own if self.in_shards else (range(self.shards.numel),)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds of a value of the whole tensor: flat, and padded."""
        if not self.partitioned:
            return value
        flat, rank = value.reshape(-1), self.ranks.shard
        parts = []
        for segment in self.shards.segments:
            own = segment.of_rank(rank)
            parts.append(_padded(flat[own.start : own.stop], len(segment.held_by(rank))))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather(self, full: torch.Tensor, held: torch.Tensor, name: str) -> None:
        """Fill `full`, with room for padding, with what every rank holds; this one has `held`. `name` is for errors."""
        collectives = []
        for segment in self.shards.segments:
            part = segment.held_by(self.ranks.shard)
            target, mine = full[segment.start : segment.start + segment.padded], held[part.start : part.stop]
            collectives.append(self.ranks.all_gather(target, mine, name, segment.owner))
        for collective in collectives:
            collective.wait()

    def take_state(self, source: LocalShard) -> None:
        """Take over what is known of `source`, of the same tensor under another dtype, shape or device."""
        self.agreed, self.part_of, self.wrapper = source.agreed, source.part_of, source.wrapper

    def settle(self) -> None:
        """Wait until the shards of others that are on their way are there."""
        if (refreshing := self.refreshing) is not None:
            refreshing.wait()  # one that failed stays: the values are lost, and every later access says so
            self.refreshing = None


class Refresh:
    """Fills memory that has elements of all shards with those that other ranks updated.

    The shards of several tensors, of one segment each, are gathered in one collective; of one, those of each segment by
    itself, to where they live.
    """

    def __init__(self, tensors: Sequence[tuple[LocalShard, torch.Tensor]], name: str) -> None:
        """Start to gather the elements of each tensor, by its local shard. `name` is for errors."""
        self._collectives: list[Collective] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of what is gathered somewhere else
        if len(tensors) > 1:
            self._gather_together(tensors, name)
            return
        ((shard, elements),) = tensors
        for segment in shard.shards.segments:
            own = segment.of_rank(shard.ranks.shard)
            mine, full = elements[own.start : own.stop], elements[segment.start : segment.start + segment.count]
            if segment.padded > segment.count:  # which has no room there
                mine, target, full = _padded(mine, segment.shard), full, elements.new_empty(segment.padded)
                self._copies.append((target, full[: segment.count]))
            self._collectives.append(shard.ranks.all_gather(full, mine, name, segment.owner))

    def _gather_together(self, tensors: Sequence[tuple[LocalShard, torch.Tensor]], name: str) -> None:
        ranks = tensors[0][0].ranks
        *starts, end = accumulate((shard.shards.size for shard, _ in tensors), initial=0)
        full = tensors[0][1].new_empty(ranks.shards, end)
        for (shard, elements), start in zip(tensors, starts, strict=True):
            (own,) = shard.own
            full[ranks.shard, start : start + len(own)].copy_(elements[own.start : own.stop])
            self._copies += by_ranks(elements, full[:, start : start + shard.shards.size])
        self._collectives.append(ranks.all_gather(full.view(-1), full[ranks.shard], name))

    def wait(self) -> None:
        """Return when every shard is there."""
        for collective in self._collectives:
            collective.wait()
        if self._copies:
            torch._foreach_copy_([target for target, _ in self._copies], [gathered for _, gathered in self._copies])
            self._copies = []


def by_ranks(elements: torch.Tensor, shards: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return parts of a tensor's elements, flat, and the same parts of its shards `[ranks, shard]`, without padding."""
    full, rest = divmod(elements.numel(), shards.shape[1])
    whole = full * shards.shape[1]
    parts = [(elements[:whole].view(full, -1), shards[:full])] if full else []
    return [*parts, (elements[whole:], shards[full, :rest])] if rest else parts


def _padded(elements: torch.Tensor, size: int) -> torch.Tensor:
    missing = size - elements.numel()
    return torch.nn.functional.pad(elements, (0, missing)) if missing else elements
