"""What gradients on NVMe are added to is read before they come: as many reads, the same sums, and each in its place."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from runtime import late_device
from torch import Tensor, nn

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.plan.schedule import MemoryRegions
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.tensor.stored_bytes import StoredBytes
from zinf_fx.runtime.tensor.windows import Window, WindowState
from zinf_fx.sizes import PAGE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LAYERS, WIDTH = 6, 64


def build(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    if tied:
        layers[2].weight = layers[1].weight = layers[4].weight
    return nn.Sequential(*layers)


def batch(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Window]:
    """Return the windows that are opened early."""
    read, windows = StoredBytes.prefetch, []

    def noted(self: StoredBytes, start: int, count: int, offset: int | None = None) -> Window | None:
        window = read(self, start, count, offset)
        windows.extend([] if window is None else [window])
        return window

    monkeypatch.setattr(StoredBytes, "prefetch", noted)
    return windows


KINDS = {
    "parameters": {"pack": None},
    "packs": {"pack": "8KiB"},
    "rows": {"pack": None, "tile": "6KiB"},  # which share blocks of the store, and one home
    "in a budget": {"pack": None, "host_memory": "640KiB", "chunk": "64KiB"},
}


@pytest.mark.parametrize(
    ("tied", "memory"),
    [
        (True, "host memory"),
        (False, "memory of its own"),
        slow(False, "host memory"),
        slow(True, "memory of its own"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: list[Window], kind: str, tied: bool, memory: str
) -> None:
    if memory == "memory of its own":
        late_device.install(monkeypatch)
    plain = build(tied)
    model = zinf_fx.offload(build(tied), store=tmp_path, placement="nvme", **KINDS[kind])
    compiled = torch.compile(model, backend="zinf")
    for step in range(2):
        for number in range(3):
            for net in (plain, compiled):
                net(batch(number)).square().mean().backward()
            assert tied or bool(ahead) == (number > 0), "of one use, there is nothing to add to at first"
        assert ahead and all(window.state is WindowState.STORED for window in ahead), "each was what it is for"
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            rounding = 1e-5 if kind == "rows" else 0.0  # of kernels for other shapes
            assert torch.allclose(parameter.grad.full_tensor(), other.grad, rounding, rounding * 1e-2), step
            parameter.grad = other.grad = None
        ahead.clear()


def test_as_much_is_read_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    for name in ("with", "without"):
        if name == "without":
            monkeypatch.setattr(StoredBytes, "prefetch", lambda *given: None)
        (tmp_path / name).mkdir()
        model = zinf_fx.offload(build(), store=tmp_path / name, placement="nvme", tile="6KiB")
        compiled = torch.compile(model, backend="zinf")
        for number in range(4):
            before = zinf_fx.stats(model).bytes_read
            compiled(batch(number)).sum().backward()
            EXECUTOR.reset()  # waits for what was read for the next step
        moved.append(zinf_fx.stats(model).bytes_read - before)
    assert moved[0] == moved[1] > 0


def test_what_is_written_meanwhile_is_there(tmp_path: Path) -> None:
    """It is written to some of the elements, through another window; to all, as a value."""
    parameter = nn.Linear(WIDTH, WIDTH, bias=False)
    held = zinf_fx.offload(parameter, store=tmp_path, placement="nvme").weight.stored.bytes
    values = held.copied([range(held.count)])[0].clone()
    window = held.prefetch(0, held.count)
    other = held.device_window(3, 5)
    other.wait().fill_(7.0)
    other.store()
    values[3:8] = 7.0
    current = held.device_window(0, held.count)
    assert current is window and torch.equal(current.wait(), values)
    current.wait().mul_(2.0)
    current.store()
    assert torch.equal(held.copied([range(held.count)])[0], values * 2)


def test_who_writes_all_has_no_use_for_it(tmp_path: Path) -> None:
    parameter = nn.Linear(WIDTH, WIDTH, bias=False)
    held = zinf_fx.offload(parameter, store=tmp_path, placement="nvme").weight.stored.bytes
    allocated = held.allocation.tiers.host.in_use
    window = held.prefetch(0, held.count)
    assert held.prefetch(0, held.count) is None, "it is there"
    new = held.device_window(load=False)
    assert new is not window and window.is_over
    new.close()
    assert held.allocation.tiers.host.in_use == allocated


def test_neighbours_are_read_at_the_same_time_and_change_in_turn(tmp_path: Path) -> None:
    """They have blocks of the store in common."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    held = zinf_fx.offload(layer, store=tmp_path, placement="nvme").weight.stored.bytes
    values = held.copied([range(held.count)])[0].clone()
    parts = [(0, 1500), (1500, 1500), (3000, held.count - 3000)]
    windows = [held.prefetch(*part) for part in parts]
    assert None not in windows
    for part, window in zip(parts, windows, strict=True):
        assert held.device_window(*part) is window
        window.wait().add_(1.0)
        window.store()
    assert torch.equal(held.copied([range(held.count)])[0], values + 1.0)


def test_where_the_planned_place_is_taken_nothing_is_prefetch(tmp_path: Path) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    held = zinf_fx.offload(layer, store=tmp_path, placement="nvme").weight.stored.bytes
    held.allocation.tiers.plan(MemoryRegions(host=1 << 20, chunks=0, chunk_elements=PAGE), 1 << 20)
    other = held.allocation.tiers.allocate(held.nbytes, 0)
    assert held.prefetch(0, held.count, 0) is None
    other.release()
    assert held.prefetch(0, held.count, 0) is not None
    held.drop_prefetched(0, held.count)


def test_an_error_leaves_no_buffer_behind(tmp_path: Path, ahead: list[Window]) -> None:
    model = zinf_fx.offload(build(), store=tmp_path, placement="nvme", pack=None)
    compiled = torch.compile(model, backend="zinf")
    for number in range(2):
        compiled(batch(number)).sum().backward()
    tiers = model[0].weight.stored.tiers
    tiers.drain()
    EXECUTOR.reset()
    allocated = tiers.host.in_use
    loss = compiled(batch(2)).sum()
    ahead.clear()
    inject(tiers.store, Fault("completion", nth=LAYERS, operation="read", errno=errno.EILSEQ))
    with pytest.raises(StoreError):
        loss.backward()
    clear_faults(tiers.store)
    EXECUTOR.reset()
    tiers.drain()
    assert ahead and all(window.is_over for window in ahead)
    assert not any(
        parameter.grad.stored.bytes._prefetched for parameter in model.parameters() if parameter.grad is not None
    )
    assert tiers.host.in_use <= allocated
