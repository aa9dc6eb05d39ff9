"""What a step in the background is writing is read where it comes from."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from injecting import Fault, clear_faults, inject

import zinf_fx
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.windows import Window

COUNT = 5 * 4096 + 100  # of float32, in 21 blocks
LATE = 0.3


@pytest.fixture
def storage(tmp_path: Path) -> TensorStorage:
    """Return a storage in the store, with the values 0, 1, ..."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.arange(COUNT, dtype=torch.float32))])
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    stored = model[0].stored
    stored.tiers.drain()
    stored.model = model
    stored.tiers.background = Step()
    return stored


class Step:
    """Stands for an optimizer's step that goes on in the background."""

    asks = False

    def settle(self, keys: object) -> None:
        """Nothing is left to update."""

    def finish(self) -> bool:
        return False


def write_late(storage: TensorStorage, start: int, count: int, value: float) -> None:
    inject(storage.tiers.store, Fault("completion", operation="write", delay=LATE))
    window = storage.settled().window(start, count, load=False)
    window.wait().fill_(value)
    window.store()


def bytes_read(storage: TensorStorage) -> int:
    return storage.tiers.store.counters().bytes_read


def test_the_step_itself_and_others_without_it_read_the_store(storage: TensorStorage) -> None:
    before = bytes_read(storage)
    storage.tiers.background.asks = True
    write_late(storage, 0, COUNT, 7.0)
    assert torch.equal(storage.value(), torch.full((COUNT,), 7.0))
    storage.tiers.background = None
    write_late(storage, 0, COUNT, 8.0)
    assert torch.equal(storage.value(), torch.full((COUNT,), 8.0))
    assert bytes_read(storage) - before == 2 * -(-COUNT * 4 // 4096) * 4096


def test_nothing_is_read_that_is_being_written(storage: TensorStorage) -> None:
    before = bytes_read(storage)
    write_late(storage, 0, COUNT, 7.0)
    assert torch.equal(storage.value(), torch.full((COUNT,), 7.0))
    assert bytes_read(storage) == before
    storage.tiers.drain()
    assert torch.equal(storage.value(), torch.full((COUNT,), 7.0))
    assert bytes_read(storage) > before


@pytest.mark.parametrize(("start", "count"), [(0, 4096), (4096, 8192), (4 * 4096, 4196)])
def test_only_what_is_not_being_written_is_read(storage: TensorStorage, start: int, count: int) -> None:
    before = bytes_read(storage)
    write_late(storage, start, count, -1.0)
    expected = torch.arange(COUNT, dtype=torch.float32)
    expected[start : start + count] = -1.0
    assert torch.equal(storage.value(), expected)
    assert bytes_read(storage) - before == sum(-(-4 * part // 4096) * 4096 for part in (start, COUNT - start - count))
    storage.tiers.drain()
    assert torch.equal(storage.value(), expected)


def test_several_writes_at_once(storage: TensorStorage) -> None:
    for start, value in ((8192, 2.0), (0, 1.0)):
        write_late(storage, start, 4096, value)
    expected = torch.arange(COUNT, dtype=torch.float32)
    expected[:4096], expected[8192:12288] = 1.0, 2.0
    assert torch.equal(storage.value(), expected)


def test_a_write_that_fails_is_told_to_who_reads_after_it(storage: TensorStorage) -> None:
    inject(storage.tiers.store, Fault("completion", operation="write", errno=5, delay=LATE))
    window = storage.settled().window(0, 4096, load=False)
    window.wait().fill_(7.0)
    window.store()
    assert torch.equal(storage.value()[:4096], torch.full((4096,), 7.0))
    with pytest.raises(zinf_fx.errors.StoreError, match="errno 5"):
        storage.tiers.drain()
    clear_faults(storage.tiers.store)
    with pytest.raises(zinf_fx.errors.StoreError, match="errno 5"):
        storage.value()


def test_windows_follow_while_a_step_in_a_thread_looks_who_does(storage: TensorStorage) -> None:
    allocation, windows, failures = storage.bytes.allocation, [], []

    def look() -> None:
        try:
            while len(windows) < 2000:
                allocation.present_followers()
        except RuntimeError as error:
            failures.append(error)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(2000):
        windows.append(Window(storage.bytes, 0, torch.empty(0), None, None).read_only())
        allocation.follow(windows[-1])
    looking.join()
    assert not failures and set(allocation.present_followers()) == set(windows)
