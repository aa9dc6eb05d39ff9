"""Models on a CUDA device train bitwise as plain PyTorch trains them there, within the memory of the schedule."""

from __future__ import annotations

import copy
import gc
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from injecting import Fault, clear_faults, inject
from planned_shapes import SHAPES
from torch import nn

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.memory.device import MAX_BYTES_OFFLOADING
from zinf_fx.runtime.memory.host import SLAB

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, default_dtype
from master_adamw import MasterAdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CUDA = "cuda"
STEPS = 6
CONFIG = GPTConfig(layers=2, hidden=32, heads=2, context=16, vocabulary=64, tied=True)
PLACEMENTS = {
    "device": "device",
    "host": "host",
    "nvme": "nvme",
    "infinity-nvme": "infinity-nvme",
    "zero-offload": "zero-offload",
    "updated on the device": {"parameters": "nvme", "gradients": "host", "optimizer": "device"},
    "gradients on the device": {"parameters": "nvme", "gradients": "device", "optimizer": "nvme"},
}
ON_DEVICE = ("device", "updated on the device")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that give the same bits each time, and new memory that is filled with NaN."""
    torch._dynamo.reset()
    flags = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )
    setters = torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp
    setters = (*setters, torch.backends.cuda.enable_cudnn_sdp)
    for setter in setters:
        setter(False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    for setter, flag in zip(setters, flags, strict=True):
        setter(flag)
    EXECUTOR.reset()
    torch._dynamo.reset()


def build(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    with default_dtype(dtype):
        return GPT(CONFIG).to(CUDA)


def exactly(model: nn.Module, **options: object) -> Callable:
    """Return the model compiled, with PyTorch's own kernels: to the bit."""
    return torch.compile(model, backend="zinf", options={"compute": "eager", **options})


def train(call: Callable, optimizer: torch.optim.Optimizer, accumulate: int = 1, clip: float | None = None) -> list:
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        for _ in range(accumulate):
            tokens, targets = torch.randint(0, CONFIG.vocabulary, (2, 2, CONFIG.context)).to(CUDA)
            loss = call(tokens, targets) / accumulate
            loss.backward()
            losses.append(loss.item())
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            losses.append(nn.utils.clip_grad_norm_(parameters, clip, foreach=False).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class OnCpu(torch.optim.AdamW):
    """Runs the plain loop of ZeRO-Offload: AdamW over fp32 copies of the parameters in host memory."""

    def __init__(self, parameters: list[nn.Parameter], **options: float) -> None:
        self.parameters = parameters
        copies = [p.detach().to("cpu", torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        super().__init__(copies, fused=True, **options)
        self.copies = copies

    @torch.no_grad()
    def step(self) -> None:
        for p, c in zip(self.parameters, self.copies, strict=True):
            c.grad = p.grad.to("cpu", c.dtype)
        super().step()
        for p, c in zip(self.parameters, self.copies, strict=True):
            p.copy_(c)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def plain_run(on_device: bool, dtype: torch.dtype = torch.float32, accumulate: int = 1) -> tuple[GPT, list[float]]:
    model = build(dtype)
    if not on_device:
        optimizer: torch.optim.Optimizer = OnCpu(list(model.parameters()), lr=1e-2)
    elif dtype == torch.float32:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        optimizer = MasterAdamW(model.parameters(), lr=1e-2)
    return model, train(model, optimizer, accumulate)


def assert_equal(model: GPT, losses: list[float], plain: GPT, expected: list[float]) -> None:
    assert losses == expected and losses[-1] != losses[0]
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, StoredTensor) and p.device == q.device, name
        value = p.full_tensor()
        assert value.device == q.device and torch.equal(value, q), name


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("prefetch", [(1, 2, 3), None])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_offloaded_model(tmp_path: Path, placement: str, prefetch: tuple | None, accumulate: int) -> None:
    plain, expected = plain_run(placement in ON_DEVICE, accumulate=accumulate)
    model = zinf_fx.offload(build(), store=tmp_path, placement=PLACEMENTS[placement], prefetch=prefetch)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    assert_equal(model, train(exactly(model), optimizer, accumulate), plain, expected)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bf16_with_an_fp32_master(tmp_path: Path, placement: str, accumulate: int) -> None:
    plain, expected = plain_run(placement in ON_DEVICE, torch.bfloat16, accumulate)
    model = zinf_fx.offload(build(torch.bfloat16), store=tmp_path, placement=PLACEMENTS[placement])
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    assert_equal(model, train(exactly(model), optimizer, accumulate), plain, expected)


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_without_a_compiler(tmp_path: Path, placement: str) -> None:
    plain, expected = plain_run(placement in ON_DEVICE)
    model = zinf_fx.offload(build(), store=tmp_path, placement=placement)
    assert_equal(model, train(model, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)), plain, expected)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_plain_fused_optimizer(tmp_path: Path, placement: str) -> None:
    plain, expected = plain_run(placement in ON_DEVICE)
    model = zinf_fx.offload(build(), store=tmp_path, placement=PLACEMENTS[placement])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    assert_equal(model, train(exactly(model), optimizer), plain, expected)


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
def test_partitioned_construction(tmp_path: Path, placement: str) -> None:
    def build_there() -> GPT:
        torch.manual_seed(0)
        with torch.device(CUDA):
            return GPT(CONFIG)

    plain = build_there()
    kind = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    expected = train(plain, kind if placement == "device" else OnCpu(list(plain.parameters()), lr=1e-2))
    with zinf_fx.offloading(store=tmp_path, placement=placement):
        model = build_there()
    losses = train(exactly(model), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert_equal(model, losses, plain, expected)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_one_line_use(tmp_path: Path, placement: str) -> None:
    plain, expected = plain_run(on_device=False)
    model = build()
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    call = exactly(model, placement=placement, store=tmp_path)
    assert_equal(model, train(call, optimizer), plain, expected)


@pytest.mark.parametrize("placement", ["device", "infinity-nvme"])
def test_inductor_computes_where_nothing_else_is_asked_for(tmp_path: Path, placement: str) -> None:
    _, expected = plain_run(placement in ON_DEVICE)
    model = zinf_fx.offload(build(), store=tmp_path, placement=placement)
    call = torch.compile(model, backend="zinf")
    with zinf_fx.record(model) as recording:
        losses = train(call, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert {plan.config.compute for plan in recording.plans} == {"inductor"}
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("placement", ["host", "infinity-nvme"])
def test_tiled(tmp_path: Path, placement: str) -> None:
    _, expected = plain_run(on_device=False)
    model = zinf_fx.offload(build(), store=tmp_path, placement=placement, tile=2500)
    losses = train(exactly(model), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert losses == pytest.approx(expected, rel=1e-3)


def test_auto_keeps_what_fits(tmp_path: Path) -> None:
    model = build()
    exactly(model)(*torch.zeros(2, 2, 16, dtype=torch.int64, device=CUDA)).backward()
    assert not any(isinstance(p, StoredTensor) for p in model.parameters())
    zinf_fx.offload(model, store=tmp_path, device_memory="64KiB")
    assert model.head.weight.stored.placement.optimizer == "host"


@pytest.mark.parametrize("placement", ["device", "nvme"])
def test_clipping(tmp_path: Path, placement: str) -> None:
    plain, model = build(), zinf_fx.offload(build(), store=tmp_path, placement=placement)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(exactly(model), optimizer, clip=0.5)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), clip=0.5)
    assert losses == expected if placement == "device" else losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("placement", ["device", "zero-offload", "nvme"])
def test_gradient_scaler(tmp_path: Path, placement: str) -> None:
    """A scale so large that the first steps are skipped."""
    results = []
    for store in (False, True):
        model = build()
        if store:
            zinf_fx.offload(model, store=tmp_path, placement=placement)
        kind = zinf_fx.optim.AdamW if store else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler(CUDA, init_scale=2.0**60, backoff_factor=2.0**-20)
        torch.manual_seed(1)
        seen = []
        for _ in range(STEPS):
            tokens, targets = torch.randint(0, CONFIG.vocabulary, (2, 2, CONFIG.context)).to(CUDA)
            with torch.autocast(CUDA, torch.float16):
                loss = model(tokens, targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.item(), scaler.get_scale()]
        results.append(seen)
    assert results[1] == pytest.approx(results[0], rel=1e-3) and results[0][1] < 2.0**60
    assert placement != "device" or results[1] == results[0]


# -- the tensor ------------------------------------------------------------------------------------------------------

WRITES = {
    "fill_": lambda p: p.fill_(3),
    "mul_": lambda p: p.mul_(2),
    "add_ itself": lambda p: p.add_(p),
    "normal_": lambda p: p.normal_(),
    "copy_ from the CPU": lambda p: p.copy_(torch.arange(24.0).view(4, 6)),
    "copy_ half precision": lambda p: p.copy_(torch.ones(4, 6, device=CUDA, dtype=torch.bfloat16)),
    "row zero_": lambda p: p.data[2].zero_(),
    "strided slice": lambda p: p[1:3, ::2].mul_(2),
    "uniform_": lambda p: nn.init.uniform_(p),
    "twice": lambda p: p.mul_(2).add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_reach_the_store(tmp_path: Path, tier: str, write: Callable) -> None:
    plain = nn.Parameter(torch.randn(4, 6, device=CUDA))
    holder = nn.ParameterList([nn.Parameter(plain.detach().clone())])
    stored = zinf_fx.offload(holder, store=tmp_path, placement=tier)[0]
    for p in (plain, stored):
        torch.manual_seed(0)
        with torch.no_grad():
            write(p)
    assert torch.equal(stored.full_tensor(), plain)


def test_copies_of_a_model(tmp_path: Path, tier: str) -> None:
    plain = build()
    model = zinf_fx.offload(build(), store=tmp_path, placement=tier)

    def same(values: dict) -> bool:
        return all(torch.equal(values[n].full_tensor() if stored(values[n]) else values[n], p) for n, p in expected)

    def stored(value: torch.Tensor) -> bool:
        return isinstance(value, StoredTensor)

    expected = list(plain.named_parameters())
    assert same(dict(copy.deepcopy(model).named_parameters())) and same(model.state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert same(loaded) and loaded["head.weight"].device.type == "cuda"
    with zinf_fx.gathered(model, modify=True) as values:
        for value in values:
            value.mul_(2)
    with torch.no_grad():
        assert all(torch.equal(dict(model.named_parameters())[name].full_tensor(), 2 * p) for name, p in expected)
    model.load_state_dict({name: value.cpu() for name, value in loaded.items()})
    assert same(dict(model.named_parameters()))
    with torch.no_grad():
        there = model.to("cpu")
    assert {p.device.type for p in there.parameters()} == {"cpu"}
    assert torch.equal(there.head.weight.full_tensor(), plain.head.weight.cpu())


def test_values_larger_than_a_slab(tmp_path: Path, tier: str) -> None:
    count = SLAB // 4 + 5
    holder = nn.ParameterList(nn.Parameter(torch.randn(count, device=CUDA)) for _ in range(3))
    plain = [p.detach().clone() for p in holder]
    zinf_fx.offload(holder, store=tmp_path, placement=tier)
    for stored, expected in zip(holder, plain, strict=True):
        assert torch.equal(stored.full_tensor(), expected)
        with torch.no_grad():
            stored.mul_(2)
            assert torch.equal(stored.full_tensor(), expected * 2)


def test_host_memory_is_pinned(tmp_path: Path) -> None:
    holder = zinf_fx.offload(nn.Linear(64, 64).to(CUDA), store=tmp_path, placement="host")
    assert holder.weight.stored.settled().window().wait().is_pinned()


# -- time and memory -------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_device_memory_is_that_of_the_schedule(tmp_path: Path, placement: str) -> None:
    """The program runs ahead of the device, which is kept busy, and still no more tiles are there than planned."""
    layers, width, rows = 24, 1024, 8
    # In packs, of which two are in flight, most of these small layers would be there.
    model = zinf_fx.offload(Layers(layers, width).to(CUDA), store=tmp_path, placement=placement, pack=None)
    x = torch.randn(rows, width, device=CUDA)
    (plan,) = plan_model(model, (x,)).plans
    compiled = exactly(model)
    compiled(x).backward()
    model.zero_grad()
    planned = max(flow.device for graph in plan.graphs for flow in flows(plan, graph))
    arena = zinf_fx.stats(model).planned_device_arena_bytes
    assert arena == plan.regions.device
    EXECUTOR.reset()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() - arena
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(100_000_000)
    compiled(x).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    tile = width * width * 4
    leaving = MAX_BYTES_OFFLOADING  # of gradients on their way to host memory
    assert planned < layers * tile / 2
    assert peak <= planned + leaving + 2 * tile
    model.zero_grad()
    EXECUTOR.reset()
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= arena + leaving + 2 * tile


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_the_arena_holds_what_its_plan_says(tmp_path: Path, name: str, overlap: bool) -> None:
    shape = SHAPES[name]
    torch.manual_seed(0)

    def batch() -> tuple[torch.Tensor, ...]:
        return tuple(values.to(CUDA) for values in shape.batch())

    model = zinf_fx.offload(shape.model().to(CUDA), store=tmp_path, **shape.options)
    (plan,) = plan_model(model, batch()).plans
    compiled = exactly(model)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=overlap, **shape.states)
    for _ in range(4):
        compiled(*batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zinf_fx.stats(model)
    assert stats.planned_device_arena_bytes == plan.regions.device > 0
    assert stats.peak_device_arena_bytes == pytest.approx(plan.regions.device, rel=0.05), str(stats)


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_uploads_take_nothing_of_pytorchs_allocator(tmp_path: Path, placement: str) -> None:
    model = zinf_fx.offload(Layers(12, 1024).to(CUDA), store=tmp_path, placement=placement)
    compiled = exactly(model)
    x = torch.randn(8, 1024, device=CUDA)
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(x)
        torch.cuda.synchronize()
    tile, activation = 1024 * 1024 * 4, x.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 8 * activation < tile


def test_steps_on_streams_that_take_turns(tmp_path: Path) -> None:
    """A place in the arena that one stream has used is used by another next."""
    results = []
    for stored in (False, True):
        model = build()
        if stored:
            zinf_fx.offload(model, store=tmp_path, placement="host")
        call = exactly(model) if stored else model
        torch.manual_seed(1)
        streams, losses = [torch.cuda.Stream() for _ in range(3)], []
        for number in range(9):
            torch.cuda.synchronize()  # what was given to the streams is read
            tokens, targets = torch.randint(0, CONFIG.vocabulary, (2, 2, CONFIG.context)).to(CUDA)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[number % 3]):
                if not number % 2:
                    torch.cuda._sleep(20_000_000)  # so that the next stream begins before this one
                losses.append(call(tokens, targets).detach())
            with torch.no_grad(), torch.cuda.stream(streams[(number + 1) % 3]):
                losses.append(call(tokens, targets).detach())
        torch.cuda.synchronize()
        results.append([loss.item() for loss in losses])
    assert results[0] == results[1]


def test_the_program_runs_ahead_of_the_device(tmp_path: Path) -> None:
    model = zinf_fx.offload(Layers(6, 256).to(CUDA), store=tmp_path, placement="host")
    compiled = exactly(model)
    x = torch.randn(8, 256, device=CUDA)
    expected = None
    for _ in range(3):
        loss = compiled(x)
        loss.backward()
        model.zero_grad()
        expected = loss.item()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    loss = compiled(x)
    loss.backward()
    assert not torch.cuda.current_stream().query()  # nothing has waited for the device
    assert loss.item() == expected


def test_an_exception_in_the_middle_gives_memory_back(tmp_path: Path) -> None:
    model = zinf_fx.offload(Layers(6, 256).to(CUDA), store=tmp_path, placement="nvme", pack=None)
    compiled = exactly(model)
    compiled(torch.randn(8, 256, device=CUDA)).backward()
    model.zero_grad()
    EXECUTOR.reset()
    storage = model.layers[4].weight.stored
    storage.tiers.drain()
    before = torch.cuda.memory_allocated()
    fault = Fault("completion", operation="read", errno=5, nth=3)
    inject(storage.tiers.store, fault)
    with pytest.raises(zinf_fx.errors.StoreError):
        compiled(torch.randn(8, 256, device=CUDA)).backward()
    clear_faults(storage.tiers.store)
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 3 * 256 * 256 * 4
    storage.tiers.drain()
    assert storage.tiers.host.in_use == 0


def test_statistics(tmp_path: Path) -> None:
    model = zinf_fx.offload(Layers(2, 64).to(CUDA), store=tmp_path, placement="nvme")
    model(torch.randn(8, 64, device=CUDA)).backward()
    stats = zinf_fx.stats(model)
    assert stats.peak_device_bytes > 0 and "device at most" in str(stats)
