"""Parameters updated in backward equal those updated afterwards, and what can't go together is refused."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, inject
from runtime.late_device import install

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError, StoredTensorError, StoreError
from zinf_fx.optim.chunks import ChunkUpdate
from zinf_fx.optim.streamed import GRADIENT_BUFFER
from zinf_fx.runtime.execute.executor import EXECUTOR

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, GPTConfig, default_dtype

STEPS = 8
CONFIG = GPTConfig(layers=1, hidden=32, heads=2, context=16, vocabulary=64, tied=True)


@pytest.fixture(autouse=True)
def nothing_left(fresh_dynamo: None) -> Iterator[None]:
    yield
    torch.compiler.reset()
    EXECUTOR.reset()


def gpt(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    with default_dtype(dtype):
        return GPT(CONFIG)


class Broken(torch.nn.Module):
    """Runs two graphs, with one weight in both, one used by hand between them, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.unused = (torch.nn.Linear(16, 16) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.shared(self.first(x).tanh()).tanh()
        torch._dynamo.graph_break()
        return (self.shared(x) * self.scale - y).square().mean()


def broken() -> Broken:
    torch.manual_seed(0)
    return Broken()


def tokens() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randint(0, CONFIG.vocabulary, (2, CONFIG.context)) for _ in range(2))


def rows() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 16), torch.randn(4, 16)


def train(call: Callable, optimizer: torch.optim.Optimizer, batch: Callable, steps: int = STEPS) -> list[float]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = call(*batch())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses


def trained(store: Path, build: Callable, batch: Callable, compiled: bool = True, **options: object):
    """Return a model after `STEPS` steps, its optimizer, and the losses."""
    store.mkdir(exist_ok=True)
    fields = {name: options.pop(name) for name in ("placement", "tile", "device_memory") if name in options}
    model = zinf_fx.offload(build(), store=store, chunk="64KiB", **fields)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
    call = torch.compile(model, backend="zinf") if compiled else model
    return model, optimizer, train(call, optimizer, batch)


CASES = {
    "tied": (gpt, tokens, {}),
    "bf16": (lambda: gpt(torch.bfloat16), tokens, {}),
    "without overlap": (gpt, tokens, {"overlap": False}),
    "tiled": (gpt, tokens, {"tile": 2048}),
    "uncompiled": (gpt, tokens, {"compiled": False}),
    "two graphs": (broken, rows, {}),
    "two graphs, uncompiled": (broken, rows, {"compiled": False}),
}
IN_THE_SLOW_TESTS = ("without overlap", "uncompiled", "bf16", "tiled")


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        *((case, "nvme") for case in CASES if case not in IN_THE_SLOW_TESTS),
        *(slow(case, "nvme") for case in IN_THE_SLOW_TESTS),
        slow("tied", "host"),
        slow("tied", "device"),
    ],
)
def test_bitwise_equal_to_steps_after_backward(tmp_path: Path, case: str, placement: str) -> None:
    build, batch, options = CASES[case]
    options = {**options, "placement": placement}
    model, optimizer, losses = trained(tmp_path / "in", build, batch, step_in_backward=True, **options)
    other, reference, expected = trained(tmp_path / "after", build, batch, **options)
    assert losses == expected and losses[0] != losses[-1]
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor()), name
        entries = optimizer.state.get(mine, {}), reference.state.get(theirs, {})
        assert set(entries[0]) == set(entries[1])
        for key in entries[0]:
            assert torch.equal(torch.clone(entries[0][key]), torch.clone(entries[1][key])), (name, key)


def prepared(store: Path, build: Callable = gpt, **options: object):
    model = zinf_fx.offload(build(), store=store, placement="nvme", chunk="64KiB")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True, **options)
    return model, optimizer, torch.compile(model, backend="zinf")


def test_updates_begin_in_backward_and_gradients_never_reach_their_tier(tmp_path: Path) -> None:
    model, optimizer, call = prepared(tmp_path)
    train(call, optimizer, tokens, steps=1)
    optimizer.finish()
    before = {name: p.full_tensor() for name, p in model.named_parameters()}
    store = model.head.weight.stored.tiers.store
    written = store.counters().bytes_written
    loss = call(*tokens())
    loss.backward()
    model.head.weight.stored.tiers.background.finish()
    model.head.weight.stored.tiers.drain()
    # Weights and two moments, rounded up to whole blocks; a gradient would be a fourth.
    assert store.counters().bytes_written - written <= sum(3 * -(-p.nbytes // 4096) * 4096 for p in model.parameters())
    changed = [not torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters()]
    assert all(changed)


def test_two_graphs_wait_for_the_last_gradient(tmp_path: Path) -> None:
    model, optimizer, call = prepared(tmp_path, broken)
    train(call, optimizer, rows, steps=1)
    call(*rows()).backward()
    assert model.unused.weight.grad is None
    for parameter in (model.shared.weight, model.first.weight, model.scale):
        with pytest.raises(StoredTensorError, match="step_in_backward"):
            parameter.grad.full_tensor()


def test_a_gradient_that_is_gone_says_so(tmp_path: Path) -> None:
    model, optimizer, call = prepared(tmp_path)
    call(*tokens()).backward()
    for read in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model.head.weight.grad.sum(),
        lambda: model.head.weight.grad.zero_(),
        lambda: scaler().unscale_(optimizer),
        lambda: scaler().step(optimizer),
    ):
        with pytest.raises(StoredTensorError, match=r"consumed by its update in backward .*leave step_in_backward out"):
            read()
    optimizer.step()
    assert optimizer.torn is None


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=8.0)
    made.scale(torch.ones(()))
    return made


def test_a_closure_is_refused(tmp_path: Path) -> None:
    _, optimizer, _ = prepared(tmp_path)
    with pytest.raises(OptimizerError, match="got a closure"):
        optimizer.step(lambda: 1.0)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_backward_before_step_is_refused(tmp_path: Path, zero: bool, compiled: bool) -> None:
    model, optimizer, call = prepared(tmp_path)
    call = call if compiled else model
    call(*tokens()).backward()
    with pytest.raises(OptimizerError, match=r"call step\(\) before state_dict"):
        optimizer.state_dict()
    if zero:
        optimizer.zero_grad()
    with pytest.raises(OptimizerError if zero else StoredTensorError, match="step_in_backward"):
        call(*tokens()).backward()


@pytest.mark.slow
def test_a_forward_pass_without_backward_is_harmless(tmp_path: Path) -> None:
    losses = []
    for directory, options in (("in", {"step_in_backward": True}), ("after", {})):
        (tmp_path / directory).mkdir()
        model = zinf_fx.offload(gpt(), store=tmp_path / directory, placement="nvme")
        call = torch.compile(model, backend="zinf")

        def twice(*batch: torch.Tensor, call: Callable = call) -> torch.Tensor:
            call(*batch)
            return call(*batch)

        losses.append(train(twice, optim.AdamW(model.parameters(), lr=1e-2, **options), tokens, steps=4))
    assert losses[0] == losses[1]


def test_an_interrupted_backward_tears_the_step(tmp_path: Path) -> None:
    model, optimizer, call = prepared(tmp_path)
    train(call, optimizer, tokens, steps=1)
    loss = call(*tokens())
    interrupting = Interrupting(optimizer)
    for parameter in model.blocks[0].parameters():  # what backward comes to in the end
        parameter.stored.gradient.consumer = interrupting
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert "parameter 0 of group 0" in str(optimizer.torn) or optimizer.torn.untouched
    assert optimizer.torn.updated + optimizer.torn.partial + optimizer.torn.untouched
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OptimizerError, match="step was interrupted"):
            refused()


class Interrupting:
    """Presses Ctrl-C when a gradient arrives."""

    def __init__(self, consumer: object) -> None:
        self.make_room, self.abandon = consumer.make_room, consumer.abandon

    def take_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        raise KeyboardInterrupt


def test_a_fault_in_backward(tmp_path: Path) -> None:
    model, optimizer, call = prepared(tmp_path)
    train(call, optimizer, tokens, steps=1)
    optimizer.finish()
    loss = call(*tokens())
    tiers = model.head.weight.stored.tiers
    inject(tiers.store, Fault("completion", operation="write", nth=2, errno=errno.EIO))
    with pytest.raises(StoreError, match="errno 5"):
        loss.backward()
        optimizer.step()
        optimizer.finish()
    assert optimizer.torn is not None and tiers.background is None
    with pytest.raises(OptimizerError, match="step was interrupted"):
        optimizer.step()


def test_one_consumer_per_parameter(tmp_path: Path) -> None:
    model, first, _ = prepared(tmp_path)
    with pytest.raises(OptimizerError, match="two optimizers with step_in_backward"):
        optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)
    del first
    optim.SGD(model.parameters(), lr=0.1, step_in_backward=True)


@pytest.mark.parametrize(
    ("placement", "pack"),
    [("infinity-cpu", "auto"), ("zero-offload", None), slow("infinity-cpu", None), slow("zero-offload", "auto")],
)
def test_gradients_that_wait_in_host_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, pack: str | None
) -> None:
    """A device copies them there faster than the CPU updates."""
    install(monkeypatch)
    monkeypatch.setattr("zinf_fx.optim.streamed.GRADIENT_BUFFER", 8192)
    run = ChunkUpdate.run
    monkeypatch.setattr(ChunkUpdate, "run", lambda *arguments: (time.sleep(0.02), run(*arguments)))
    model = zinf_fx.offload(gpt(), store=tmp_path, placement=placement, chunk="64KiB", pack=pack)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    call = torch.compile(model, backend="zinf")
    train(call, optimizer, tokens, steps=1)
    optimizer.finish()
    arena = model.head.weight.stored.tiers.host
    before, came, held, in_use = arena.in_use, [], [], []
    room = optimizer.make_room

    def make_room(nbytes: int) -> None:
        room(nbytes)
        came.append(nbytes)
        held.append(nbytes + optimizer._last_step.bytes_held)
        in_use.append(arena.in_use - before)

    monkeypatch.setattr(optimizer, "make_room", make_room)
    call(*tokens()).backward()
    nbytes = [p.nbytes for p in model.parameters()]
    assert sum(came) >= sum(nbytes)
    assert max(in_use) <= sum(nbytes) / 3  # whole blocks, of small ones too
    assert pack == "auto" or max(held) <= max(8192, *nbytes)
    optimizer.finish()


def test_gradients_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinf_fx.optim.streamed.GRADIENT_BUFFER", 8192)
    assert GRADIENT_BUFFER > 8192
    model, optimizer, call = prepared(tmp_path)
    train(call, optimizer, tokens, steps=1)
    held = []
    room = optimizer.make_room
    monkeypatch.setattr(
        optimizer, "make_room", lambda nbytes: (room(nbytes), held.append(nbytes + optimizer._last_step.bytes_held))
    )
    loss = call(*tokens())
    inject(model.head.weight.stored.tiers.store, Fault("completion", operation="read", count=10**6, delay=0.005))
    loss.backward()
    largest = max(p.nbytes for p in model.parameters())
    assert held and max(held) <= max(8192, largest)
