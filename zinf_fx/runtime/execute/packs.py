"""Packs on their way to the device: as `staging`, all parameters of one in one transfer and one collective."""

from __future__ import annotations

import torch

from zinf_fx.runtime.execute.flying import FlyingTile, GatheredTile
from zinf_fx.runtime.tensor.pack import Pack, shard_starts


class PackedTile(FlyingTile[Pack]):
    """A pack that this rank has all of: all that lives side by side comes in one transfer."""

    def _fetch(self, storage: Pack, offset: int | None) -> None:
        pack = storage
        self._refreshes = pack.begin_refresh(self._planned.label)
        # Where the parts begin, in bytes, and the elements of the members in them; a part itself keeps bytes alive.
        self._starts = [part.start * self._planned.dtype.itemsize for part in pack.parts]
        self._members = [(part.members, part.cut) for part in pack.parts]
        self._arena = pack.tiers.host
        if any(part.bytes.on_device is None for part in pack.parts):
            for refresh in self._refreshes:
                refresh.wait()  # what is uploaded from host memory has to be there
        for part, start in zip(pack.parts, self._starts, strict=True):
            at = None if offset is None else offset + start
            self._windows.append(part.bytes.device_window(offset=at).read_only())

    @property
    def version(self) -> int | None:
        versions = [version for window in self._windows if (version := window.version) is not None]
        return sum(versions) if len(versions) == len(self._windows) else None

    def upload(self, offset: int | None = None) -> None:
        for window, start in zip(self._windows, self._starts, strict=True):
            window.upload(None if offset is None else offset + start)

    def follow(self, storage: Pack) -> None:
        for part, window in zip(storage.parts, self._windows, strict=True):
            window.follow(part.bytes)

    def _values(self) -> list[torch.Tensor]:
        for refresh in self._refreshes:
            refresh.wait()
        found: dict[int, torch.Tensor] = {}
        for window, (members, cut) in zip(self._windows, self._members, strict=True):
            for number, value in zip(members, cut.of(window.wait(), self._arena), strict=True):
                found[number] = value
        return [found[number] for number in range(len(self._planned.members))]


class ShardedPack(GatheredTile[Pack]):
    """A pack of which this rank has a shard: see [Note: packs over ranks]. Behind the shards of all ranks, the memory
    has room for what is copied."""

    def _fetch(self, storage: Pack, offset: int | None) -> None:
        pack = storage
        self._ranks = pack.ranks
        self._starts = shard_starts(self._planned)
        self._slots: list[list[tuple[range, int]]] = []  # where what of each window belongs
        self._allocate(pack, self._count, offset)
        for part in pack.parts:
            slots = part.slots(self._starts)
            if self._whole is None or part.bytes.in_host_memory:
                at = None if offset is None else offset + part.start * self._planned.dtype.itemsize
                self._windows.append(part.bytes.device_window(offset=at).read_only())
                self._slots.append(slots)
                continue
            for own, start in slots:
                self._reads.append(part.bytes.read(own.start, self._shard[start : start + len(own)], self._buffer))

    @property
    def _count(self) -> int:
        return self._planned.gathered_nbytes // self._planned.dtype.itemsize

    @property
    def _shards(self) -> torch.Tensor:
        """Those of all ranks, one in each row."""
        ranks, shard = self._ranks.shards, self._planned.shard
        return self._memory[: ranks * shard].view(ranks, shard)

    @property
    def _shard(self) -> torch.Tensor:
        """This rank's."""
        return self._shards[self._ranks.shard]

    def _gather(self, shards: list[torch.Tensor], name: str) -> None:
        for elements, slots in zip(shards, self._slots, strict=True):
            for own, start in slots:
                self._shard[start : start + len(own)].copy_(elements[own.start : own.stop])
        self._collectives = [self._ranks.all_gather(self._shards.view(-1), self._shard, name)]

    def _separated(self) -> list[torch.Tensor]:
        """The parameters: those that the first rank has, where they are, the others copied."""
        shards, found = self._shards, []
        end = shards.numel()
        for member, start in zip(self._planned.members, self._starts, strict=False):
            elements = shards[:, start : start + member.shard]
            if member.numel > member.shard:
                begin, end = end, end + elements.numel()
                elements = self._memory[begin:end].view(elements.shape).copy_(elements).view(-1)
            else:
                elements = elements[0]
            found.append(elements[: member.numel].view(member.shape))
        return found
