"""On a device with memory of its own, tiles lie where their plan says, in one region that holds what the plan says."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import named, slow
from planned_shapes import SHAPES
from runtime.late_device import LateDevice, install
from twins import Net, assert_same_gradients

import zinf_fx
from zinf_fx.errors import StoredTensorError, StoreError
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.memory.arena import DeviceArena
from zinf_fx.runtime.memory.transfers import Counters
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.sizes import PAGE

TOLERANCE = 0.05


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """Yield what stored tensors on the CPU compute on."""
    late = install(monkeypatch)
    torch._dynamo.reset()
    yield late
    torch._dynamo.reset()
    EXECUTOR.reset()
    gc.collect()


# Of the shapes, those that differ in what lies in the device's region: whole tiles or ranges of them, of parameters
# from disk and from host memory, and what comes back of activations that left.
ON_DEVICE = ("untied, bf16", "activations on disk")
IN_THE_GATE = named(SHAPES, ON_DEVICE)
# Those that are trained in fp32 by nothing but their optimizer, as plain PyTorch does it.
PLAIN = ("recomputed", "activations on disk", "in host memory", "activations in host memory")


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", IN_THE_GATE)
def test_predicted_peaks_are_the_measured_ones_and_training_is_that_of_plain_pytorch(
    tmp_path: Path, name: str, overlap: bool
) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)
    plain = shape.model()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, **shape.options)
    sides = [
        (
            torch.compile(model, backend="zinf"),
            zinf_fx.optim.AdamW(model.parameters(), overlap=overlap, **shape.states),
        ),
        (plain, torch.optim.AdamW(plain.parameters(), fused=True)),
    ]
    with followed_plans(model) as plans:
        for _ in range(4):
            batch, losses = shape.batch(), []
            for call, optimizer in sides if name in PLAIN else sides[:1]:
                losses.append(call(*batch))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert all(torch.equal(loss, losses[0]) for loss in losses)
    (plan,) = plans
    stats = zinf_fx.stats(model)
    assert stats.planned_device_arena_bytes == plan.regions.device > 0
    assert stats.peak_device_arena_bytes == pytest.approx(plan.regions.device, rel=TOLERANCE), str(stats)


@pytest.mark.parametrize("optimizer", [slow({"overlap": False}), {}, {"step_in_backward": True}])
@pytest.mark.parametrize("placement", [slow("infinity-cpu"), "infinity-nvme"])
def test_what_stays_on_the_device_takes_over_what_the_optimizer_writes(
    tmp_path: Path, placement: str, optimizer: dict[str, bool], device: LateDevice
) -> None:
    plain = Net(96)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placement, device_memory="64MiB")
    call = torch.compile(model, backend="zinf")
    plain_optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    own = zinf_fx.optim.AdamW(model.parameters(), **optimizer)
    for step in range(4):
        x = torch.randn(3, 96)
        if step == 3:
            own.finish()
        uploads, read = device.uploads, zinf_fx.stats(model).bytes_read
        loss, expected = call(x), plain(x)
        moved = device.uploads - uploads, zinf_fx.stats(model).bytes_read - read
        for value, stepped in ((loss, own), (expected, plain_optimizer)):
            value.backward()
            stepped.step()
            stepped.zero_grad()
        assert torch.equal(loss, expected)
    assert moved == (0, 0)
    own.finish()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), expected), name


@pytest.mark.parametrize("pack", ["auto", None])
def test_a_gradient_has_its_place_again_and_its_token_stands_for_nothing_meanwhile(
    tmp_path: Path, pack: str | None
) -> None:
    plain = Net(32)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="infinity-cpu", pack=pack)
    call = torch.compile(model, backend="zinf")
    spaces = []
    for _ in range(2):
        x = torch.randn(3, 32)
        for net in (call, plain):
            net(x).backward()
        gradient = model.scale.grad
        assert torch.equal(gradient.full_tensor(), plain.scale.grad)
        token = gradient.token.clone()
        spaces.append(TensorStorage.of_token(token))
        del gradient
        for net in (model, plain):
            net.zero_grad()
        gc.collect()
        with pytest.raises(StoredTensorError, match="stands for no living stored tensor"):
            TensorStorage.of_token(token)
    assert spaces[0] is spaces[1]


@pytest.mark.parametrize("placement", [slow("infinity-cpu"), "nvme"])
def test_models_share_the_region_of_a_device(tmp_path: Path, placement: str) -> None:
    """What one holds there, the other finds taken, and lies elsewhere; it grows for the one that needs more."""
    plains, models, calls = [Net(16), Net(96), Net(48)], [], []
    for plain in plains:
        models.append(zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placement))
        calls.append(torch.compile(models[-1], backend="zinf"))
    sizes: list[int] = []
    regions: set[int] = set()
    for _ in range(3):
        batches = [torch.randn(3, width) for width in (16, 96, 48)]
        with followed_plans(models[0]) as plans:
            for nets in (plains, calls):
                for loss in [call(batch) for call, batch in zip(nets, batches, strict=True)]:
                    loss.backward()
        regions |= {plan.regions.device for plan in plans}
        sizes.append(zinf_fx.stats(models[0]).planned_device_arena_bytes)
        for model, plain in zip(models, plains, strict=True):
            assert_same_gradients(model, plain)
    assert sizes == [max(regions)] * 3 and len(regions) > 1
    stats = zinf_fx.stats(models[0])
    assert stats.displaced_buffers > 0 and stats.peak_device_arena_bytes > max(regions)
    EXECUTOR.reset()
    assert zinf_fx.stats(models[0]).device_arena_bytes == 0


def test_what_a_model_returns_of_its_weights_is_not_overwritten(tmp_path: Path) -> None:
    class Gives(Net):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.layers[1].weight.t()[1:]

    plain = Gives()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="infinity-cpu")
    call = torch.compile(model, backend="zinf")
    given = []
    for _ in range(3):
        loss, weight = call(torch.randn(3, 32))
        given.append(weight)
        loss.backward()
    EXECUTOR.reset()
    assert all(torch.equal(weight, plain.layers[1].weight.t()[1:]) for weight in given)


def test_the_region_goes_with_the_last_model(tmp_path: Path) -> None:
    model = zinf_fx.offload(Net(), store=tmp_path, placement="infinity-cpu")
    torch.compile(model, backend="zinf")(torch.randn(3, 32)).backward()
    (arena,) = map(weakref.ref, model.scale.stored.tiers.device_arenas.values())
    assert arena().capacity > 0
    del model
    torch._dynamo.reset()
    EXECUTOR.reset()
    gc.collect()
    assert arena() is None


# -- the arena -------------------------------------------------------------------------------------------------------


def test_a_taken_place_is_counted_and_another_found(device: LateDevice) -> None:
    counters = Counters()
    arena = DeviceArena(device, 2 * PAGE, counters)
    buffer, other = arena.allocate(PAGE, 100), arena.allocate(PAGE, PAGE)
    assert (counters.placed, counters.displaced) == (1, 1)
    values = [b.tensor((25,), torch.float32).fill_(n) for n, b in enumerate((buffer, other))]
    before = values[0]._version
    values[1].add_(1)
    assert [v.unique().item() for v in values] == [0, 2] and values[0]._version == before
    assert values[0].storage_offset() == 0 and buffer.address == values[0].data_ptr()
    assert arena.in_use == arena.touched == 2 * PAGE
    buffer.release()
    other.release()
    again = arena.allocate(PAGE, PAGE)
    assert again.address == buffer.address and (arena.in_use, arena.touched) == (PAGE, 2 * PAGE)
    arena.restart_peak()
    assert arena.touched == PAGE and arena.allocate(0, 1).address == buffer.address - PAGE
    assert arena.touched == 2 * PAGE


def test_a_region_beyond_the_device_is_refused(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(nbytes: int, torch_device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr("zinf_fx.runtime.memory.arena._allocate", allocate)
    with pytest.raises(StoreError, match=r"device_memory.*tried to allocate"):
        DeviceArena(device, PAGE, Counters())
