"""Several threads use stored models: what each gets is what it would get if they took turns. See [Note: threads]."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from gate import slow
from runtime.late_device import install
from torch import Tensor, nn
from twins import Net, assert_nothing_leaked, assert_same_gradients, pair, x

import zinf_fx
from zinf_fx.errors import OptimizerError
from zinf_fx.frontend.backend import zinf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

__all__ = ["pair"]  # a fixture

INSIDE: list[int] = []  # graphs that compute at this moment
MOST: list[int] = [0]  # of them together


@torch.library.custom_op("zinf_tests::interleaved", mutates_args=())
def interleaved(x: Tensor) -> Tensor:
    """Gives other threads a chance in the middle of a graph."""
    INSIDE.append(threading.get_ident())
    MOST[0] = max(MOST[0], len(set(INSIDE)))
    time.sleep(random.random() * 2e-3)
    INSIDE.remove(threading.get_ident())
    return x.clone()


interleaved.register_fake(torch.empty_like)
interleaved.register_autograd(lambda ctx, gradient: interleaved(gradient))


@pytest.fixture(autouse=True)
def nobody_inside() -> Iterator[None]:
    INSIDE.clear()
    MOST[0] = 0
    yield


def together(*actions: Callable[[], object]) -> list[object]:
    """Return what the actions return, each run in a thread of its own. Raises what the first raised that did."""
    results: list[object] = [None] * len(actions)
    failures: list[BaseException] = []
    start = threading.Barrier(len(actions))

    def run(index: int) -> None:
        try:
            start.wait()
            results[index] = actions[index]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def assert_close_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Equal but for the order in which they were added."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)


def interleaving(model: Net) -> Callable[[Tensor], Tensor]:
    model.hook = interleaved
    return torch.compile(model, backend="zinf")


@pytest.mark.parametrize("backward_in", [slow("one thread"), "each thread"])
def test_passes_in_several_threads(pair: tuple[Net, Net], backward_in: str) -> None:
    plain, model = pair
    call = interleaving(model)
    for _ in range(4):
        batches = [x() for _ in range(3)]

        def action(batch: Tensor) -> Tensor:
            loss = call(batch)
            if backward_in == "each thread":
                loss.backward()
            return loss

        losses: Sequence[Tensor] = together(*[lambda batch=batch: action(batch) for batch in batches])
        if backward_in == "one thread":
            sum(losses).backward()
        expected = [plain(batch) for batch in batches]
        sum(expected).backward()
        assert torch.equal(torch.stack(losses), torch.stack(expected))
        assert_close_gradients(model, plain)
    assert MOST[0] == 1
    model.zero_grad()
    assert_nothing_leaked(model)


def _trained(model: Net, options: dict[str, object], optimizer: type) -> tuple[list[Tensor], list[Tensor]]:
    steps = optimizer(model.parameters(), lr=1e-2, **options)
    losses = []
    generator = torch.Generator().manual_seed(1)
    call = interleaving(model)
    for _ in range(4):
        loss = call(torch.randn(3, 32, generator=generator))
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.detach())
    return losses, [p.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        slow({}, zinf_fx.optim.AdamW),
        ({"step_in_backward": True}, zinf_fx.optim.AdamW),
        slow({"fused": True}, torch.optim.AdamW),
    ],
    ids=["streamed", "in backward", "plain"],
)
def test_models_that_are_trained_in_turns(tmp_path: Path, options: dict[str, object], optimizer: type) -> None:
    torch.manual_seed(0)
    nets = [Net() for _ in range(2)]

    def stored(net: Net) -> Net:
        return zinf_fx.offload(copy.deepcopy(net), store=tmp_path, placement="nvme")

    expected = [_trained(stored(net), options, optimizer) for net in nets]
    models = [stored(net) for net in nets]
    results = together(*[lambda model=model: _trained(model, options, optimizer) for model in models])
    for (losses, values), (their_losses, their_values) in zip(results, expected, strict=True):
        assert torch.equal(torch.stack(losses), torch.stack(their_losses))
        assert all(torch.equal(value, other) for value, other in zip(values, their_values, strict=True))


@pytest.mark.parametrize("compiled", [True, slow(False)], ids=["compiled", "eager"])
def test_inference_beside_training(pair: tuple[Net, Net], compiled: bool) -> None:
    """A compiled one sees the parameters as they are before a step or after it, and never some of each."""
    plain, model = pair
    call = interleaving(model)
    probe = x()
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    twin = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    call(probe).backward()  # compiled by now, in both ways
    model.zero_grad()
    with torch.no_grad():
        expected = [plain(probe)]
        call(probe)
    over = threading.Event()

    def infer() -> list[Tensor]:
        outputs = []
        while not over.is_set():
            with torch.no_grad():
                outputs.append((call if compiled else model)(probe))
        return outputs

    def train() -> None:
        try:
            for _ in range(5):
                batch = x()
                for run, opt in ((call, optimizer), (plain, twin)):
                    run(batch).backward()
                    opt.step()
                    opt.zero_grad()
                with torch.no_grad():
                    expected.append(plain(probe))
        finally:
            over.set()

    outputs, _ = together(infer, train)
    assert len(outputs) > 1
    if compiled:
        assert all(any(torch.equal(output, seen) for seen in expected) for output in outputs)
    assert_same_values(model, plain)


def assert_same_values(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name


def test_gradients_after_threads_are_those_of_one(pair: tuple[Net, Net]) -> None:
    """What was learned from passes in threads does no harm to those that follow in one."""
    plain, model = pair
    call = interleaving(model)
    together(*[lambda: call(x()) for _ in range(3)])
    for _ in range(3):
        batch = x()
        call(batch).backward()
        plain(batch).backward()
        assert_same_gradients(model, plain)


@pytest.mark.timeout(120)
def test_two_threads_that_compile_and_one_of_them_between_steps(pair: tuple[Net, Net]) -> None:
    """While one thread compiles, another that keeps graphs from running compiles too: Dynamo has one lock for both."""
    plain, model = pair
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    within, compiling = threading.Event(), threading.Event()

    def backend(module: torch.fx.GraphModule, inputs: list) -> Callable:
        compiling.set()
        return zinf(module, inputs)

    def save() -> Tensor:
        with optimizer.between_steps():
            within.set()
            compiling.wait()
            return torch.compile(torch.sin, backend="eager")(torch.ones(2))

    def train() -> Tensor:
        within.wait()
        return torch.compile(model, backend=backend)(batch)

    batch = x()
    saved, trained = together(save, train)
    assert torch.equal(saved, torch.ones(2).sin()) and torch.equal(trained, plain(batch))


@pytest.mark.parametrize("in_backward", [False, slow(True)], ids=["overlapped", "in backward"])
def test_what_is_read_between_steps_is_of_one_step(tmp_path: Path, in_backward: bool) -> None:
    """One thread trains, another saves parameters and states until it is over."""
    torch.manual_seed(0)
    model = zinf_fx.offload(Net(), store=tmp_path, placement="nvme", chunk="64KiB")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=in_backward)
    call = interleaving(model)
    batches = [x() for _ in range(6)]
    moments: list[list[Tensor]] = []  # after each step
    over = threading.Event()

    def read() -> list[Tensor]:
        states = optimizer.state_dict()["state"]
        names = sorted({name for state in states.values() for name in state})
        states = [torch.as_tensor(states[k][name]) for k in states for name in names]
        return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in (*model.parameters(), *states)]

    def step(batch: Tensor) -> None:
        call(batch).backward()
        if in_backward:
            with pytest.raises(OptimizerError, match=r"call step\(\) before"):
                optimizer.state_dict()
        optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        try:
            for batch in batches:
                step(batch)
                with optimizer.between_steps():
                    moments.append(read())
        finally:
            over.set()

    def save() -> list[list[Tensor]]:
        readings, refused = [], 0
        while not over.is_set():
            try:
                with optimizer.between_steps():
                    readings.append(read())
            except OptimizerError:
                refused += 1
                time.sleep(1e-3)  # leaves the other thread a turn
        assert in_backward or not refused
        return readings

    step(x())
    moments.append(read())
    _, readings = together(train, save)
    assert readings
    for reading in readings:
        assert any(all(map(torch.equal, reading, moment)) for moment in moments)


ROWS, COLUMNS = 768, 1024  # 3 MiB, two of which fit in the host arena, and of which a write takes one


@pytest.mark.parametrize("device", ["CPU", "late"])
def test_eager_operations_of_many_threads_take_the_room_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Each thread writes a parameter of its own, adds to one of all, and reads; no addition is lost."""
    if device == "late":
        install(monkeypatch)
    plain = nn.ParameterList(nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(7))
    stored = zinf_fx.offload(plain, store=tmp_path, placement="infinity-nvme", host_memory="8MiB", pack=None)
    shared, *own = stored

    def work(parameter: Tensor) -> None:
        for number in range(1, 6):
            parameter.data.fill_(number)
            shared.data.add_(1)
        for _ in range(5):
            assert bool(parameter.detach().eq(number).all())

    together(*[lambda parameter=parameter: work(parameter) for parameter in own])
    assert bool(shared.detach().eq(5 * len(own)).all())
