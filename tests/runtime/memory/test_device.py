"""A device with memory of its own: what has to wait for a copy waits, whenever the copy is made."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from runtime.late_device import LateCopy, LateDevice, install
from torch import nn

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.memory import arena as arenas
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.memory.host import SLAB, slabs
from zinf_fx.sizes import PAGE

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from gpt import GPT, GPTConfig, default_dtype
from master_adamw import adamw

CONFIG = GPTConfig(layers=1, hidden=32, heads=2, context=16, vocabulary=64, tied=True)
PLACEMENTS = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "infinity-nvme": "infinity-nvme",
    "zero-offload": "zero-offload",
    "updated on the device": {"parameters": "nvme", "gradients": "host", "optimizer": "device"},
    "updated there from memory": {"parameters": "host", "gradients": "nvme", "optimizer": "device"},
    "gradients on the device": {"parameters": "nvme", "gradients": "device", "optimizer": "nvme"},
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """Yield what stored tensors on the CPU compute on."""
    late = install(monkeypatch)
    torch._dynamo.reset()
    yield late
    EXECUTOR.reset()
    torch._dynamo.reset()


def build(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    with default_dtype(dtype):
        return GPT(CONFIG)


def train(call: Callable, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        for _ in range(accumulate):
            loss = call(*torch.randint(0, CONFIG.vocabulary, (2, 2, CONFIG.context))) / accumulate
            loss.backward()
            losses.append(loss.item())
        losses.append(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_equal(model: GPT, plain: GPT) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name


@cache
def plainly_trained(accumulate: int) -> tuple[GPT, list[float]]:
    plain = build()
    return plain, train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), accumulate)


IN_THE_SLOW_TESTS = {"host", "nvme", "zero-offload", "updated on the device", "gradients on the device"}


# One after the other with two micro-batches and with one, so that every tier of gradients comes with both;
# some of them slowly.
@pytest.mark.parametrize(
    ("placement", "accumulate"),
    [
        slow(placement, count) if name in IN_THE_SLOW_TESTS else (placement, count)
        for (name, placement), count in zip(PLACEMENTS.items(), cycle([2, 1]), strict=False)
    ],
    ids=PLACEMENTS,
)
def test_training(tmp_path: Path, device: LateDevice, placement: object, accumulate: int) -> None:
    model = zinf_fx.offload(build(), store=tmp_path, placement=placement)
    plain, expected = plainly_trained(accumulate)
    call = torch.compile(model, backend="zinf")
    assert train(call, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2), accumulate) == expected
    assert_equal(model, plain)
    assert (device.uploads + device.downloads > 0) == (placement != "device")
    in_place = model.head.weight.stored.in_place
    assert bool(zinf_fx.stats(model).peak_device_arena_bytes) != in_place


@pytest.mark.parametrize(
    "name", ["updated there from memory", slow("infinity-nvme"), slow("device"), slow("zero-offload")]
)
def test_training_with_a_plain_optimizer(tmp_path: Path, name: str) -> None:
    """Its states are on each tier, updated on the CPU and on the device."""
    model = zinf_fx.offload(build(), store=tmp_path, placement=PLACEMENTS[name])
    plain, expected = plainly_trained(1)
    call = torch.compile(model, backend="zinf")
    assert train(call, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)) == expected
    assert_equal(model, plain)


@pytest.mark.parametrize("placement", ["infinity-nvme", slow("zero-offload"), slow("device")])
def test_training_in_bf16(tmp_path: Path, placement: str) -> None:
    plain, model = build(torch.bfloat16), build(torch.bfloat16)
    zinf_fx.offload(model, store=tmp_path, placement=placement)
    runs = []
    for call, optimizer in (
        (plain, adamw(plain.parameters(), torch.bfloat16, lr=1e-2)),
        (torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)),
    ):
        torch.manual_seed(1)
        runs.append([])
        for _ in range(4):
            loss = call(*torch.randint(0, CONFIG.vocabulary, (2, 2, CONFIG.context)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            runs[-1].append(loss.item())
    assert runs[0] == runs[1]
    assert_equal(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_tiles_and_no_prefetch(tmp_path: Path, tier: str) -> None:
    _, expected = plainly_trained(2)
    model = zinf_fx.offload(build(), store=tmp_path, placement=tier, tile=2500, prefetch=None)
    losses = train(torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2), 2)
    assert losses == pytest.approx(expected, rel=1e-3)


def test_without_a_compiler(tmp_path: Path, tier: str) -> None:
    model = zinf_fx.offload(build(), store=tmp_path, placement=tier)
    plain, expected = plainly_trained(2)
    assert train(model, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2), 2) == expected
    assert_equal(model, plain)


def test_copies_and_writes(tmp_path: Path, tier: str) -> None:
    plain, model = build(), zinf_fx.offload(build(), store=tmp_path, placement=tier)
    assert_equal(copy.deepcopy(model), plain)
    with zinf_fx.gathered(model, modify=True) as values:
        for value in values:
            value.mul_(2)
    doubled = build()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
        for net in (model, doubled):
            net.head.weight[1:3].add_(net.head.weight[0]).mul_(0.5)
    assert_equal(model, doubled)
    model.load_state_dict(plain.state_dict())
    assert_equal(model, plain)
    assert_equal(model.to(torch.bfloat16), plain.to(torch.bfloat16))


@pytest.mark.parametrize("placement", ["device", "zero-offload"])
def test_what_stays_on_the_device_stays_in_its_memory(tmp_path: Path, placement: str) -> None:
    model, others = nn.Linear(8, 8), torch.arange(32.0)
    model.bias = nn.Parameter(others[:8])
    before, values = model.weight.data_ptr(), [parameter.detach().clone() for parameter in model.parameters()]
    zinf_fx.offload(model, store=tmp_path, placement=placement, pack=None)
    assert model.weight.stored.bytes.on_device.data_ptr() == before
    assert model.bias.stored.bytes.on_device.data_ptr() != others.data_ptr(), "memory that others have, too"
    assert all(map(torch.equal, (parameter.full_tensor() for parameter in model.parameters()), values))


def test_who_has_the_values_from_before_keeps_them(tmp_path: Path) -> None:
    """What stays on the device is copied for them."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
    first, second = (layer.weight for layer in model)
    values = first.detach().clone(), second.detach().clone()
    outputs, detached = model[0](x), second.detach()
    zinf_fx.offload(model, store=tmp_path, placement="device", pack=None)
    optimizer = zinf_fx.optim.SGD(model.parameters(), lr=1.0)
    model(x.detach()).sum().backward()
    optimizer.step()
    assert not any(
        torch.equal(parameter.full_tensor(), value) for parameter, value in zip((first, second), values, strict=True)
    )
    outputs.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8) @ values[0]) and torch.equal(detached, values[1])


@pytest.mark.parametrize("tier", [slow("host"), "nvme"])
def test_nothing_is_left_behind(tmp_path: Path, tier: str) -> None:
    model = zinf_fx.offload(build(), store=tmp_path, placement=tier)
    tiers = model.head.weight.stored.tiers
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    train(torch.compile(model, backend="zinf"), optimizer)
    optimizer.finish()  # the thread beside has the parameters until then
    del model, optimizer
    EXECUTOR.reset()
    torch._dynamo.reset()
    gc.collect()
    tiers.drain()
    gc.collect()
    assert tiers.host.in_use == 0
    assert tiers.store_in_use is None or tiers.store.in_use == 0


def test_a_delayed_write_that_fails_is_reported_where_it_is_missed(tmp_path: Path) -> None:
    model = zinf_fx.offload(nn.Linear(8, 8), store=tmp_path, placement="nvme")
    tiers = model.weight.stored.tiers
    tiers.drain()
    inject(tiers.store, Fault("completion", operation="write", errno=5))
    with torch.no_grad():
        model.weight.fill_(1)  # the value has not left the device yet
    with pytest.raises(StoreError, match="write"):
        model.weight.full_tensor()
    with pytest.raises(StoreError, match="write"):
        tiers.drain()
    clear_faults(tiers.store)


# -- host memory that a device knows ---------------------------------------------------------------------------------


class Registry:
    def __init__(self, room: int = 1 << 40) -> None:
        self.known: dict[int, int] = {}
        self.room = room

    def register(self, address: int, nbytes: int) -> str | None:
        if sum(self.known.values()) + nbytes > self.room:
            return "it is full"
        assert address not in self.known
        self.known[address] = nbytes
        return None

    def unregister(self, address: int) -> None:
        del self.known[address]


def test_slabs_are_cut_at_multiples() -> None:
    assert list(slabs(0, 0)) == []
    assert list(slabs(SLAB - 8, 16)) == [(SLAB - 8, SLAB), (SLAB, SLAB + 8)]
    assert list(slabs(SLAB, 2 * SLAB)) == [(SLAB, 2 * SLAB), (2 * SLAB, 3 * SLAB)]


def test_what_is_leased_is_registered_once_and_until_the_memory_goes() -> None:
    arena, registry = Arena("host", 3 * SLAB + PAGE), Registry()
    first = arena.allocate(PAGE)
    assert not registry.known
    arena.serve(registry)
    second = arena.allocate(PAGE)
    assert list(registry.known.values()) == [SLAB] and min(registry.known) % SLAB == 0
    arena.allocate(2 * SLAB)
    arena.allocate(SLAB // 2)
    assert sum(registry.known.values()) in (3 * SLAB, 3 * SLAB + PAGE)
    value = second.tensor((PAGE,), torch.uint8)
    del arena, first, second
    gc.collect()
    assert registry.known
    del value
    gc.collect()
    assert not registry.known


def test_registered_memory_is_not_trimmed() -> None:
    arena, registry = Arena("host", 4 * SLAB), Registry()
    unknown = arena.allocate(SLAB)
    arena.serve(registry)
    known = arena.allocate(SLAB)
    values = [buffer.tensor((SLAB,), torch.uint8).fill_(7) for buffer in (unknown, known)]
    unknown.release(), known.release()
    arena.trim()
    assert values[1].eq(7).all() and values[0].eq(0).any()


def test_memory_that_is_refused_is_used_unregistered(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena("host", 4 * SLAB)
    arena.serve(Registry(room=SLAB))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            arena.allocate(SLAB).tensor((SLAB,), torch.uint8)[0] = 1
    assert caplog.text.count("can't be pinned") == 1 and "it is full" in caplog.text


def test_a_buffer_that_a_device_reads_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena("host", 4 * PAGE)
    copies = []
    for _ in range(4):
        buffer = arena.allocate(PAGE)
        copies.append(LateCopy(torch.empty(PAGE, dtype=torch.uint8)))
        copies[-1].start(buffer.tensor((PAGE,), torch.uint8))
        buffer.release_after(copies[-1])
    assert arena.in_use == 4 * PAGE and not any(c.done() for c in copies)
    arena.allocate(PAGE)  # waits for the oldest copy
    assert [c.done() for c in copies] == [True, False, False, False]
    copies[1].wait()
    assert arena.in_use == 3 * PAGE
    monkeypatch.setattr(arenas, "_MAX_BYTES_TO_READ", PAGE)
    last = LateCopy(torch.empty(PAGE, dtype=torch.uint8))
    buffer = arena.allocate(PAGE)
    last.start(buffer.tensor((PAGE,), torch.uint8))
    buffer.release_after(last)
    assert [c.done() for c in copies] == [True] * 4 and not last.done()
