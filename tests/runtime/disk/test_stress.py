"""A store under random operations, with many under way and faults that it must survive, against a dictionary.

The long version: python -m pytest -m slow tests/runtime/disk/test_stress.py
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from injecting import Fault, clear_faults, inject

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import provider_names
from zinf_fx.runtime.disk.store import Extent, Store
from zinf_fx.runtime.memory.host import aligned_empty

PAGE = 4096
LARGEST = 1 << 20
BLOCK = 64 << 10  # small, so that most transfers have several
BYTES_AT_MOST = 64 << 20

SURVIVABLE = [
    Fault("submission", count=3, errno=errno.EAGAIN),
    Fault("submission", count=2, errno=errno.EINTR),
    Fault("submission", count=4, length=2 * PAGE),
    Fault("submission", count=2),
    Fault("submission", count=2, delay=0.002),
    Fault("completion", count=2, errno=errno.EAGAIN),
    Fault("completion", count=4, length=PAGE),
    Fault("completion", count=3, delay=0.002),
]


@pytest.fixture(params=["disk", "memory", "both"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """Yield a directory on a disk's file system, one on tmpfs, and both as one store."""
    shm = Path("/dev/shm") / f"zinf-stress-{os.getpid()}"
    if request.param != "disk" and not os.access(shm.parent, os.W_OK):
        pytest.skip("no tmpfs")
    shm.mkdir()
    yield {"disk": [tmp_path], "memory": [shm], "both": [tmp_path, shm]}[request.param]
    shutil.rmtree(shm)


class Model:
    """What the store must hold, and what is under way to and from it."""

    def __init__(self, places: list[Path], provider: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.bytes = torch.Generator().manual_seed(seed)
        self.places = places
        self.provider = provider
        self.expected: dict[Extent, torch.Tensor] = {}
        self.under_way: dict[Extent, list] = {}
        self.open()

    def open(self) -> None:
        weights = (2.0, 1.0)[: len(self.places)]
        self.store = Store(self.places, provider=self.provider, block=BLOCK, weights=weights)

    def filled(self, nbytes: int) -> torch.Tensor:
        return aligned_empty(nbytes).random_(0, 256, generator=self.bytes)

    def pick(self) -> Extent:
        return self.random.choice(list(self.expected))

    def window(self, extent: Extent) -> tuple[int, int]:
        first = self.random.randrange(extent.capacity // PAGE) * PAGE
        return first, self.random.randint(1, extent.capacity - first)

    def settle(self, extent: Extent) -> None:
        for ticket, back, wanted in self.under_way.pop(extent, []):
            ticket.wait()
            assert back is None or back.equal(wanted), f"wrong bytes from {extent}"

    def allocate(self) -> None:
        if sum(extent.capacity for extent in self.expected) > BYTES_AT_MOST:
            return self.free()
        extent = self.store.allocate(self.random.choice([1, PAGE, self.random.randint(1, LARGEST)]))
        data = self.filled(extent.capacity)
        self.expected[extent] = data.clone()
        ticket = self.store.write(extent, data.data_ptr(), 0, extent.nbytes, owner=data)
        self.under_way[extent] = [(ticket, None, None)]

    def write(self) -> None:
        extent = self.pick()
        self.settle(extent)
        first, nbytes = self.window(extent)
        data = self.filled(nbytes)
        ticket = self.store.write(extent, data.data_ptr(), first, nbytes, owner=data)
        self.expected[extent][first : first + data.numel()] = data
        self.under_way[extent] = [(ticket, None, None)]

    def read(self) -> None:
        extent = self.pick()
        if any(back is None for _, back, _ in self.under_way.get(extent, [])):
            self.settle(extent)
        first, nbytes = self.window(extent)
        back = aligned_empty(nbytes)
        wanted = self.expected[extent][first : first + back.numel()].clone()
        ticket = self.store.read(extent, back.data_ptr(), first, nbytes, owner=back)
        self.under_way.setdefault(extent, []).append((ticket, back, wanted))

    def free(self) -> None:
        extent = self.pick()
        self.settle(extent)
        del self.expected[extent]
        self.store.free(extent)

    def disturb(self) -> None:
        clear_faults(self.store)
        inject(self.store, self.random.choice(SURVIVABLE))

    def reopen(self) -> None:
        """Closes with everything under way; what was asked for is done, and the next store starts empty."""
        self.store.close()
        for extent in list(self.under_way):
            self.settle(extent)
        assert not any(list(place.glob("zinf-scratch-*")) for place in self.places)
        self.expected.clear()
        self.open()

    def check(self) -> None:
        assert self.store.in_use == sum(extent.capacity for extent in self.expected)
        for extent, wanted in self.expected.items():
            self.settle(extent)
            back = aligned_empty(extent.capacity)
            self.store.read(extent, back.data_ptr(), 0, extent.capacity).wait()
            assert back.equal(wanted)

    def run(self, operations: int) -> None:
        actions = [self.allocate, self.write, self.read, self.free, self.disturb, self.reopen]
        for step in range(operations):
            (action,) = self.random.choices(actions, [20, 30, 38, 10, 2, 0.1])
            if not self.expected and action in (self.write, self.read, self.free):
                action = self.allocate
            action()
            if sum(map(len, self.under_way.values())) > 80:
                self.settle(self.random.choice(list(self.under_way)))
            if step % 1000 == 999:
                self.check()
        clear_faults(self.store)
        self.check()
        self.store.close()


def live(places: list[Path], provider: str, seed: int, operations: int) -> None:
    try:
        model = Model(places, provider, seed)
    except StoreError as error:
        assert provider == "libaio", error
        pytest.skip(str(error))
    model.run(operations)


@pytest.mark.parametrize("provider", provider_names())
def test_a_short_life(places: list[Path], provider: str):
    live(places, provider, 1, 250)


@pytest.mark.slow
@pytest.mark.parametrize("provider", provider_names())
def test_ten_thousand_operations(places: list[Path], provider: str):
    live(places, provider, 2, 10_000)
