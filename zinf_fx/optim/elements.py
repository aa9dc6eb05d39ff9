"""Consecutive elements of a tensor that may be stored or ordinary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

import torch

from zinf_fx.interrupts import let_through
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window
from zinf_fx.sizes import pieces_of


class OrdinaryWindow:
    """The part of a `Window` that readers use, over an ordinary tensor."""

    def __init__(self, elements: torch.Tensor) -> None:
        self._elements = elements

    ready = is_current = True

    def wait(self) -> torch.Tensor:
        """Return the elements, 1-D."""
        return self._elements

    arrived = wait

    def store(self) -> None:
        """Write nothing back: what is changed is the tensor itself."""

    close = store


class AnyWindow(Protocol):
    """What an update uses of a window, over stored elements or ordinary ones."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    @property
    def is_current(self) -> bool:
        """Whether nothing was written to where the elements live since they were read."""
        ...

    def arrived(self) -> object:
        """Wait for the read, and change nothing."""

    def wait(self) -> torch.Tensor:
        """Return the elements, 1-D, once they are there."""
        ...

    def store(self) -> None:
        """Start writing the elements back."""

    def close(self) -> None:
        """Give the memory back without writing."""


def open_window(
    storage: TensorStorage, place: Device, start: int, count: int, *, load: bool = True
) -> Window | DeviceWindow:
    """Open a window where `place` computes. `start` counts the tensor's elements, of which these are held."""
    held = storage.settled()
    window = held.window if place.in_host_memory else held.device_window
    return window(storage.shard.position(start), count, load=load)


def open_elements(tensor: torch.Tensor, place: Device, start: int, count: int) -> AnyWindow:
    """Start to read `count` elements of `tensor` from `start` on, in row-major order, where `place` computes."""
    if isinstance(tensor, StoredTensor):
        if not tensor.views:
            return open_window(tensor.stored, place, start, count)
        tensor = tensor.full_tensor()
    return OrdinaryWindow(tensor.detach().reshape(-1)[start : start + count].to(place.torch_device))


def moved(value: Any, place: Device) -> Any:
    """Return `value`, where `place` computes if it is a tensor."""
    return value.to(place.torch_device) if isinstance(value, torch.Tensor) else value


def copy_into(target: StoredTensor, value: torch.Tensor) -> None:
    """Write the elements of `value`, stored or not, to `target`, a chunk at a time: those that it has here."""
    value = divided_as(target, value)
    for part in current_chunks(target):
        let_through()
        source = open_elements(value, CPU, part.start, len(part))
        try:
            with overwritten(target, part) as elements:
                elements.copy_(source.wait())
        finally:
            source.close()


def fill(target: StoredTensor, value: float) -> None:
    """Set all elements of `target` to `value`, a chunk at a time."""
    for part in current_chunks(target):
        let_through()
        with overwritten(target, part) as elements:
            elements.fill_(value)


def divided_as(target: StoredTensor, value: torch.Tensor, shards: Shards | None = None) -> torch.Tensor:
    """Return a value, or all of it where it is divided over other ranks than the target. `shards` says how it would be
    divided alike, if it hasn't the target's elements."""
    if not isinstance(value, StoredTensor):
        return value
    mine, theirs = target.stored.shard, value.stored.shard
    alike = (theirs.partitioned and theirs.shards) == (mine.partitioned and (shards or mine.shards))
    return value if alike else value.full_tensor()


def current_chunks(tensor: StoredTensor, itemsize: int | None = None) -> Iterator[range]:
    """Cut the elements that this rank has the present version of into ranges of about `Config.chunk` bytes each.
    `itemsize` is how many bytes of an element count, if not the tensor's."""
    for current in tensor.stored.shard.current:
        yield from pieces_of(current, itemsize or tensor.dtype.itemsize, tensor.stored.config.chunk)


@contextmanager
def overwritten(target: StoredTensor, part: range) -> Iterator[torch.Tensor]:
    """Yield elements to set in the block, whose writes then start; no more than two chunks are on their way to the
    store."""
    storage = target.stored
    storage.tiers.limit_writes(storage.config.chunk)
    window = storage.settled().window(storage.shard.position(part.start), len(part), load=False)
    try:
        yield window.wait()
        window.store()
    finally:
        window.close()


W = TypeVar("W", bound=AnyWindow)


class OpenWindows:
    """The windows of one update: wait for their reads, and `close` in any case."""

    def __init__(self) -> None:
        self._windows: list[AnyWindow] = []
        self._close = ExitStack()

    @property
    def ready(self) -> bool:
        """Whether `arrive` would return at once."""
        return all(window.ready for window in self._windows)

    @property
    def shows_the_present(self) -> bool:
        """Whether nothing was written to where they are from since they were opened."""
        return all(window.is_current for window in self._windows)

    def arrive(self) -> None:
        """Wait for the reads, and change nothing."""
        for window in self._windows:
            window.arrived()

    def close(self) -> None:
        """Give back what was not stored."""
        self._close.close()

    def _keep(self, window: W) -> W:
        self._close.callback(window.close)
        self._windows.append(window)
        return window
