"""Packs on their way to the device: as `transfers`, all parameters of one in one transfer and one collective."""

from __future__ import annotations

import contextlib
import time

import torch

from zinf_fx.errors import RanksError, StoreError
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.memory.leases import Buffer, Ticket
from zinf_fx.runtime.ranks import Collective
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.pack import Pack, key_of, shard_starts
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


class PackedTile:
    """A pack of parameters in flight, as `StagedTile`: all that lives side by side comes in one transfer."""

    def __init__(self, pack: Pack, planned: Tile, offset: int | None = None) -> None:
        self.key = key_of(pack, planned)
        self.holds = 0
        self._planned, self._counters = planned, pack.tiers.counters
        self._refreshes = pack.begin_refresh(planned.label)
        self._windows: list[Window | DeviceWindow] = []  # of each part
        # Where the parts begin, in bytes, and the elements of the members in them; a part itself keeps its home alive.
        self._starts = [part.start * planned.dtype.itemsize for part in pack.parts]
        self._members = [(part.members, part.cut) for part in pack.parts]
        self._arena = pack.tiers.host
        if any(part.bytes.on_device is None for part in pack.parts):
            for refresh in self._refreshes:
                refresh.wait()  # what is uploaded from host memory has to be there
        try:
            for part, start in zip(pack.parts, self._starts, strict=True):
                at = None if offset is None else offset + start
                self._windows.append(part.bytes.device_window(offset=at).read_only())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """Of where the parameters live, that which the tile has."""
        versions = [window.version for window in self._windows]
        return None if None in versions else sum(versions)

    def upload(self, offset: int | None = None) -> None:
        """Start to copy it to the device, to `offset` in the region that is planned there."""
        for window, start in zip(self._windows, self._starts, strict=True):
            window.upload(None if offset is None else offset + start)

    def allgather(self, name: str) -> None:
        """This rank has all of it."""

    def follow(self, pack: Pack) -> None:
        """From now on, take over what is written to the storages."""
        for part, window in zip(pack.parts, self._windows, strict=True):
            window.follow(part.bytes)

    def wait(self) -> list[torch.Tensor]:
        """The parameters; counts the time for which compute had to wait."""
        started = time.perf_counter()
        for refresh in self._refreshes:
            refresh.wait()
        found: list[torch.Tensor | None] = [None] * len(self._planned.members)
        for window, (members, cut) in zip(self._windows, self._members, strict=True):
            for number, value in zip(members, cut.of(window.wait(), self._arena), strict=True):
                found[number] = value
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._planned.nbytes
        return found

    def close(self) -> None:
        """Give the buffers back."""
        for window in self._windows:
            window.close()


class ShardedPack:
    """A pack of which this rank has a shard, on its way to the device: see [Note: packs over ranks].

    As `ShardedTile`. Where the device computes in host memory, what comes from NVMe is read to its place among the
    shards of all ranks.
    """

    def __init__(self, pack: Pack, planned: Tile, offset: int | None = None) -> None:
        self.key = key_of(pack, planned)
        self.holds = 0
        self.version: int | None = pack.version
        self._planned, self._counters = planned, pack.tiers.counters
        self._ranks, self._device = pack.ranks, pack.device
        self._starts = shard_starts(planned)
        self._memory: torch.Tensor | None = None  # the shards of all ranks, and room for what is copied behind them
        self._buffer: Buffer | None = None
        self._tickets: list[Ticket] = []
        self._windows: list[tuple[Window | DeviceWindow, list[tuple[range, int]]]] = []  # and where what belongs
        self._gathering: Collective | None = None
        self._values: list[torch.Tensor] = []
        try:
            if pack.device.in_host_memory:
                self._buffer = pack.tiers.lease(planned.gathered_nbytes, offset)
                self._memory = self._buffer.tensor((self._count,), planned.dtype)
            for part in pack.parts:
                slots = part.slots(self._starts)
                if self._memory is None or part.bytes.in_host_memory:
                    at = None if offset is None else offset + part.start * planned.dtype.itemsize
                    self._windows.append((part.bytes.device_window(offset=at).read_only(), slots))
                    continue
                for own, start in slots:
                    ticket = part.bytes.read(own.start, self._shard[start : start + len(own)], self._buffer)
                    self._tickets.append(ticket)
        except BaseException:
            self.close()
            raise

    @property
    def _count(self) -> int:
        """Elements of all memory."""
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

    def upload(self, offset: int | None = None) -> None:
        """Start to copy the shard to the device. The place at `offset` is for the whole, and not used yet."""
        for window, _ in self._windows:
            window.upload(None)

    def follow(self, pack: Pack) -> None:
        """A tile that stays is of no use once its parameters are written: other ranks write the other shards."""

    def allgather(self, name: str) -> None:
        """Start to gather all shards, once this rank's is here. `name`: for errors."""
        if self._gathering is not None:
            return
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.empty(self._count, dtype=self._planned.dtype, device=self._device.torch_device)
        self.upload()
        with self._device.beside_compute():
            for window, slots in self._windows:
                elements = window.wait()
                for own, start in slots:
                    self._shard[start : start + len(own)].copy_(elements[own.start : own.stop])
            for ticket in self._tickets:
                ticket.wait()
            self._gathering = self._ranks.all_gather(self._shards.view(-1), self._shard, name)

    def wait(self) -> list[torch.Tensor]:
        """The parameters; counts the time for which compute had to wait."""
        started = time.perf_counter()
        self.allgather(self._planned.label)
        self._gathering.wait()
        self._counters.stall_seconds += RECORDER.waited(started)
        self._counters.gathered_bytes += self._planned.nbytes
        if not self._values:
            self._values = self._separated()
        return self._values

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

    def close(self) -> None:
        """Give the buffers back, once nothing writes to them."""
        for ticket in self._tickets:
            with contextlib.suppress(StoreError):
                ticket.wait()
        if self._gathering is not None:
            with contextlib.suppress(RanksError):
                self._gathering.wait()
            if self._gathering.failed:
                return  # what may still be written to is never used again
        for window, _ in self._windows:
            window.close()
        self._values, self._memory = [], None
        if self._buffer is not None:
            self._buffer.release()
