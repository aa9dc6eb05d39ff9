"""A device with memory of its own, on the CPU: every copy is made as late as it may be, so that what must wait for a
copy, and doesn't, computes with wrong values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zinf_fx.runtime.device import Copy, Cpu


class LateDevice(Cpu):
    """Counts the copies of each direction, and refuses to lose one."""

    in_host_memory = False

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
