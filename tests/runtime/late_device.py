"""A device with memory of its own, on the CPU: every copy is made as late as it may be, and a place in its arena is
spoiled as soon as it is given back, so that what must wait for a copy, or looks at a tile too late, computes with wrong
values."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from zinf_fx.plan import packs
from zinf_fx.runtime.memory.arena import Buffer, DeviceArena
from zinf_fx.runtime.memory.device import MAKERS, Copy, Device


class LateDevice(Device):
    """Counts the copies of each direction, and refuses to lose one."""

    in_host_memory = False
    computes_apart = True

    def __init__(self) -> None:
        self.uploads = self.downloads = 0

    def upload(self, value: torch.Tensor) -> LateCopy:
        self.uploads += 1
        return LateCopy(value)

    def download(self, value: torch.Tensor, host: torch.Tensor, after: Iterable[Copy] = ()) -> LateCopy:
        self.downloads += 1
        copy = LateCopy(host, list(after))
        copy.start(value.detach().reshape(-1))
        return copy


class LateCopy:
    """Copies when somebody waits for it or joins it."""

    _one_at_a_time = threading.RLock()

    def __init__(self, value: torch.Tensor, after: Iterable[Copy] = ()) -> None:
        self.value = value
        self._after = after
        self._source: torch.Tensor | None = None
        self._started = False

    def start(self, host: torch.Tensor) -> None:
        assert not self._started
        self._source, self._started = host, True

    def done(self) -> bool:
        return self._started and self._source is None

    def wait(self) -> None:
        assert self._started
        with self._one_at_a_time:
            if self._source is not None:
                for copy in self._after:
                    copy.wait()
                with torch.no_grad(), _disable_current_modes():  # a finalizer may wait while a graph is being captured
                    self.value.copy_(self._source)
                self._source = None

    join = wait

    def drop(self) -> None:
        if self._started:
            self.wait()
        self.value = None


def install(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Stored tensors on the CPU compute on a late device from now on, and are planned for one."""
    late = LateDevice()
    monkeypatch.setitem(MAKERS, "cpu", lambda device: late)
    monkeypatch.setattr(packs, "IN_HOST_MEMORY", frozenset())
    monkeypatch.setattr(Buffer, "release", _release_and_spoil)
    return late


_release = Buffer.release


def _release_and_spoil(buffer: Buffer) -> None:
    if isinstance(buffer._arena, DeviceArena):
        with torch.no_grad(), _disable_current_modes():
            buffer.tensor((buffer.capacity,), torch.uint8).fill_(0xFF)  # NaN
    _release(buffer)
