"""Where a device computes apart from the CPU, the CPU's update of parameters has a thread of its own."""

from __future__ import annotations

import errno
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from noticed import Noticed
from runtime.late_device import LateDevice, install
from torch import nn

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.native import kernels
from zinf_fx.optim import threads as workers
from zinf_fx.optim.chunk_queue import ChunkMemory, ChunkQueue
from zinf_fx.optim.threads import BackgroundThread
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.processors import Processors
from zinf_fx.runtime.execute.executor import EXECUTOR

PLACEMENTS = ("infinity-cpu", "infinity-nvme", "zero-offload")
SHAPES = ((3 * 16384,), (100,), (2 * 16384,), (7,), (40_000,))
SECONDS = 60.0


class Gated:
    """Threads of the device begin when the gate is open. `threads`: all of them."""

    def __init__(self, device: LateDevice) -> None:
        self.open = threading.Event()
        self.open.set()
        self.threads: list[threading.Thread] = []
        self._make, device.thread = device.thread, self._thread

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        def through_the_gate() -> None:
            assert self.open.wait(SECONDS)
            work()

        self.threads.append(self._make(through_the_gate))
        return self.threads[-1]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    torch._dynamo.reset()
    gated = Gated(install(monkeypatch))
    yield gated
    gated.open.set()
    for thread in gated.threads:
        thread.join(SECONDS)
    EXECUTOR.reset()
    torch._dynamo.reset()


def prepared(twins, placement: str, **fields: object):
    """Twins after one step, with new gradients where backward would leave them."""
    pair = twins(shapes=SHAPES, placement=placement, **fields)
    optimizer, reference = optim.AdamW(pair.stored, lr=1e-2), torch.optim.AdamW(pair.masters, lr=1e-2, fused=True)
    pair.train(optimizer, reference, steps=1)
    pair.give_stored_gradients()
    return pair, optimizer, reference


def background(pair) -> object:
    return pair.stored[0].stored.tiers.background


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_returns_at_once_and_the_thread_does_it(twins, gate: Gated, placement: str) -> None:
    pair, optimizer, reference = prepared(twins, placement)
    gate.open.clear()
    optimizer.step()
    optimizer.zero_grad()
    assert background(pair) is not None and optimizer.step_seconds < SECONDS
    gate.open.set()
    reference.step()
    pair.check()  # reads every parameter
    optimizer.finish()
    assert background(pair) is None and optimizer.torn is None and len(gate.threads) == 1
    pair.train(optimizer, reference)


def test_a_step_begins_when_the_end_of_the_last_is_over(twins, gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lets go of gradients at the end, and the same updates come again with the next ones."""
    pair, optimizer, reference = prepared(twins, "infinity-cpu")
    let_go, ending = UpdateBatch.let_go_of_gradients, threading.Event()

    def late(batch: UpdateBatch) -> None:
        ending.set()
        time.sleep(0.2)
        let_go(batch)

    monkeypatch.setattr(UpdateBatch, "let_go_of_gradients", late)
    for _ in range(3):
        ending.clear()
        optimizer.step()
        reference.step()
        gate.open.set()
        assert ending.wait(SECONDS)
        gate.open.clear()  # the thread of the next step comes behind the end of this one
    optimizer.step()
    reference.step()
    gate.threads[-2].join(SECONDS)
    gate.open.set()
    pair.check()


def test_the_thread_updates_with_as_many_threads_as_who_steps_has(
    twins, gate: Gated, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Another thread may have set another number last, as one does that pins a DataLoader's memory."""
    pair, optimizer, reference = prepared(twins, "infinity-cpu")
    native, used = kernels.update, set()

    def update(options: object, operands: object, instructions: int, threads: int) -> None:
        used.add((threading.get_ident(), threads))
        native(options, operands, instructions, threads)

    monkeypatch.setattr(kernels, "update", update)
    monkeypatch.setattr(workers, "processors", lambda: Processors(8, 8, (0,)))
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(5)
    other = threading.Thread(target=torch.set_num_threads, args=(1,))
    other.start()
    other.join()
    optimizer.step()
    reference.step()
    pair.check()
    optimizer.finish()
    assert used == {(gate.threads[-1].ident, 5)}


@pytest.mark.parametrize("placement", ["device", "infinity-cpu"])
def test_without_overlap_or_where_the_device_updates_there_is_no_thread(twins, gate: Gated, placement: str) -> None:
    pair, optimizer, reference = prepared(twins, placement)
    optimizer.overlap = placement == "device"
    optimizer.step()
    reference.step()
    assert background(pair) is None and not gate.threads
    pair.check()


def interrupt_when(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < end:
        time.sleep(0.001)
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_gets_through_to_who_waits_for_the_thread(twins, gate: Gated) -> None:
    pair, optimizer, reference = prepared(twins, "infinity-cpu")
    gate.open.clear()
    optimizer.step()
    waiting = background(pair)._beside._changed._waiters
    ctrl_c = threading.Thread(target=interrupt_when, args=(lambda: len(waiting) > 0,))
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.start()
        pair.stored[-1].full_tensor()
    ctrl_c.join()
    assert optimizer.torn is None and background(pair) is not None
    gate.open.set()
    reference.step()
    pair.check()
    pair.train(optimizer, reference)


def test_a_fault_in_the_thread_is_raised_by_who_asks_next(twins, gate: Gated) -> None:
    pair, optimizer, _ = prepared(twins, "infinity-nvme")
    inject(pair.stored[0].stored.tiers.store, Fault("completion", operation="read", count=100, errno=errno.EIO))
    gate.open.clear()
    optimizer.step()
    optimizer.zero_grad()
    gate.open.set()
    for thread in gate.threads:
        thread.join(SECONDS)
    assert optimizer.torn is None and background(pair) is not None
    with pytest.raises(StoreError, match="errno 5"):
        pair.stored[0].full_tensor()
    assert background(pair) is None and len(optimizer.torn.untouched) == len(SHAPES)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OptimizerError, match="step was interrupted"):
            refused()


def test_who_abandons_a_step_that_goes_on_waits_for_the_thread_without_its_lock(
    twins, gate: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, optimizer, reference = prepared(twins, "infinity-cpu")
    gate.open.clear()
    locked = []

    def fail(stage: object) -> None:
        raise StoreError("read", "data-0", "lightning")

    def wait(beside: BackgroundThread, is_so: Callable[[], bool]) -> None:
        locked.append(background(pair)._lock._is_owned())

    with monkeypatch.context() as patched:
        patched.setattr(EXECUTOR, "end", fail)
        patched.setattr(BackgroundThread, "wait", wait)  # nobody else is at work
        with pytest.raises(StoreError, match="lightning"):
            optimizer.step()
    assert locked and not any(locked) and optimizer.torn is None
    reference.step()
    pair.check()


@pytest.mark.parametrize("placement", ["infinity-cpu", "infinity-nvme"])
def test_where_no_thread_can_be_started_the_step_is_done_without(
    twins, gate: Gated, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """It is done by `step()`, as far as nothing has to be waited for, and by who asks."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("too many threads")

    pair, optimizer, reference = prepared(twins, placement)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.warns(RuntimeWarning, match="no thread beside training, which does its work itself: too many"):
            optimizer.step()
        assert gate.threads and (placement == "infinity-nvme" or background(pair) is None)
        gate.threads.clear()
        reference.step()
        pair.check()
    gate.threads.clear()
    assert optimizer.torn is None
    pair.train(optimizer, reference)


def test_a_step_without_a_thread_that_fails_at_once_is_taken_again(
    twins, gate: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, optimizer, reference = prepared(twins, "infinity-nvme")
    store = pair.stored[0].stored.tiers.store

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("too many threads")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        patched.setattr(ChunkQueue, "ready", True)  # what failed has arrived
        inject(store, Fault("submission", operation="read", count=100, errno=errno.ENOMEM))
        with pytest.warns(RuntimeWarning, match="no thread"), pytest.raises(StoreError):
            optimizer.step()
    gate.threads.clear()
    clear_faults(store)
    assert optimizer.torn is None
    optimizer.step()
    reference.step()
    pair.check()


@pytest.mark.parametrize("in_backward", [False, True])
def test_who_drops_the_optimizer_does_not_wait_for_the_thread(
    twins, gate: Gated, monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    """The collector may run in the middle of a block that has a lock which the thread needs."""
    pair, optimizer, reference = prepared(twins, "infinity-cpu")
    gate.open.clear()
    optimizer.take_gradients(pair.stored) if in_backward else optimizer.step()
    waits = []
    with monkeypatch.context() as patched:
        patched.setattr(
            BackgroundThread, "wait", lambda beside, is_so: waits.append(is_so)
        )  # and nobody else is at work
        del optimizer
        gc.collect()
    assert not waits and background(pair) is not None
    gate.open.set()
    for thread in gate.threads:
        thread.join(SECONDS)
    assert background(pair) is None
    reference.step()
    pair.check()


class Layers(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(call: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], None] = lambda: None) -> list:
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        loss = call(torch.randn(8, 64))
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("in_backward", [False, slow(True)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_is_the_same_to_the_bit(tmp_path: Path, gate: Gated, placement: str, in_backward: bool) -> None:
    torch.manual_seed(0)
    plain = Layers()
    torch.manual_seed(0)
    model = zinf_fx.offload(Layers(), store=tmp_path, placement=placement, chunk="64KiB", pack=None)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=in_backward)
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    before = []
    losses = trained(torch.compile(model, backend="zinf"), optimizer, lambda: before.append(len(gate.threads)))
    assert losses == expected
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), other)
    assert gate.threads and (before[0] > 0) == in_backward  # what is updated in backward is updated beside it


def test_backward_does_not_wait_for_the_thread(tmp_path: Path, gate: Gated) -> None:
    """It doesn't as long as there is room for the gradients that wait."""
    model = zinf_fx.offload(Layers(), store=tmp_path, placement="infinity-cpu", chunk="64KiB", pack=None)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    call = torch.compile(model, backend="zinf")
    call(torch.randn(8, 64)).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = call(torch.randn(8, 64))
    optimizer.finish()
    gate.open.clear()
    loss.backward()
    assert gate.threads[-1].is_alive() and all(parameter.grad is not None for parameter in model.parameters())
    gate.open.set()
    optimizer.step()
    optimizer.finish()


def test_a_step_that_is_closed_while_the_thread_looks_ends_behind_all_updates(
    tmp_path: Path, gate: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has filled no chunk until then is updated, too."""
    torch.manual_seed(0)
    plain = Layers(2)
    torch.manual_seed(0)
    model = zinf_fx.offload(Layers(2), store=tmp_path, placement="infinity-cpu", chunk="64KiB", pack=None)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    fills_a_chunk, closed, looks = ChunkQueue.fills_a_chunk.fget, threading.Event(), []

    def late(queue: ChunkQueue) -> bool:
        looks.append(threading.current_thread() in gate.threads)
        if len(looks) > 1:
            return fills_a_chunk(queue)
        assert closed.wait(SECONDS)
        return False

    monkeypatch.setattr(ChunkQueue, "fills_a_chunk", property(late))
    x = torch.randn(8, 64)
    torch.compile(model, backend="zinf")(x).backward()
    optimizer.step()
    closed.set()
    optimizer.finish()
    plain(x).backward()
    torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True).step()
    assert looks[0]
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), other)


def test_who_needs_memory_waits_for_the_chunk_that_the_thread_updates(
    tmp_path: Path, gate: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it takes the last one out of the queue while they look, and more parameters may come."""
    options = {"placement": "infinity-cpu", "chunk": "64KiB", "pack": None}
    model = zinf_fx.offload(Layers(1), store=tmp_path, **options)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=True)
    call = torch.compile(model, backend="zinf")
    trained(call, optimizer)
    loss = call(torch.randn(8, 64))
    optimizer.finish()
    begun = threading.Event()
    scratch_at, any_there = ChunkMemory.scratch_at, ChunkQueue.__bool__

    def later(memory: ChunkMemory, place: object) -> object:
        begun.set()
        assert lock.is_asked_for.wait(SECONDS)
        return scratch_at(memory, place)

    def look(queue: ChunkQueue) -> bool:
        if not gate.open.is_set():
            gate.open.set()
            assert begun.wait(SECONDS)
        return any_there(queue)

    monkeypatch.setattr(ChunkMemory, "scratch_at", later)
    gate.open.clear()
    loss.backward()
    step = next(model.parameters()).stored.tiers.background
    step._lock = lock = Noticed()
    monkeypatch.setattr(ChunkQueue, "__bool__", look)
    try:
        assert step.finish() and not step._queue and not step.closed
    finally:
        lock.is_asked_for.set()
    optimizer.step()
    optimizer.finish()
    assert optimizer.torn is None
