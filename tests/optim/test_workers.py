"""Threads share the update of a chunk, natively or piece by piece: the results are those of one thread, whatever
happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import nn

import zinf_fx
from zinf_fx.errors import OptimizerError
from zinf_fx.native import kernels
from zinf_fx.optim import chunk_queue, chunks
from zinf_fx.optim import threads as workers
from zinf_fx.optim.threads import at_the_same_time, lanes_for, serves, update_threads
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.processors import Processors, Quota
from zinf_fx.runtime.memory.device import Device
from zinf_fx.sizes import WINDOW_ALIGNMENT

R = TypeVar("R")

THREADS = 3
FORMS: dict[str, dict[str, object]] = {
    "fp32": {},
    "masters": {},
    "8bit": {"state_dtype": "8bit"},
    "split": {"master_dtype": "split", "state_dtype": torch.bfloat16},
}
BY_PYTORCH = {"fused": False}
"""The option with which the torch class updates pieces, because no native kernel computes as it does."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch has some threads, each with a core, and pieces are small."""
    monkeypatch.setattr(workers, "processors", lambda: Processors(64, 64, (0,)))
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    for module, name in ((workers, "AT_A_TIME"), (workers, "LEAST"), (chunk_queue, "AT_A_TIME")):
        monkeypatch.setattr(module, name, WINDOW_ALIGNMENT)
    yield
    torch.set_num_threads(before)


def of_each(work: Callable[[None, int], R], count: int) -> list[R]:
    """Return what some work gives of so many pieces, in as many lanes."""
    with closing(at_the_same_time(work, [None] * count, range(count))) as results:
        return list(results)


def where(lane: None, number: int) -> int:
    """Return the thread that works."""
    return threading.get_ident()


def elsewhere(work: Callable[[], R]) -> R:
    """Return what some work gives in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def trained(store: Path, placement: str, form: dict[str, object], threads: int | None = None) -> list[torch.Tensor]:
    """Return a model after some steps, and the optimizer's first moments."""
    store.mkdir()
    torch.manual_seed(0)
    dtype = torch.float32 if store.name.endswith("fp32") else torch.bfloat16
    model = nn.Sequential(nn.Linear(64, 512, dtype=dtype), nn.Linear(512, 63, dtype=dtype))
    x = torch.randn(4, 64, dtype=dtype)
    zinf_fx.offload(model, store=store, placement=placement, pack=None, update_threads=threads)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, **form)
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [tensor.full_tensor() for tensor in (*model.parameters(), *moments)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_training_is_that_of_one_thread(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, placement: str, form: str
) -> None:
    alone = trained(tmp_path / f"alone-{form}", placement, FORMS[form] | BY_PYTORCH)
    request.getfixturevalue("threads")
    used: set[int] = set()
    served, lanes = workers._served, []

    def update(work: Callable, those: list[object], pieces: list[object]) -> Iterator[object]:
        lanes.append(len(those))
        return at_the_same_time(work, those, pieces)

    monkeypatch.setattr(workers, "_served", lambda *given: used.add(threading.get_ident()) or served(*given))
    monkeypatch.setattr(chunks, "at_the_same_time", update)
    together = trained(tmp_path / f"together-{form}", placement, FORMS[form] | BY_PYTORCH)
    assert used and threading.get_ident() not in used and max(lanes) == THREADS
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("form", FORMS)
def test_a_chunk_is_one_call_of_a_native_kernel(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """It divides the elements among threads itself, and returns when all are updated."""
    alone = trained(tmp_path / f"alone-{form}", "nvme", FORMS[form])
    request.getfixturevalue("threads")
    run, update, calls = chunks.ChunkUpdate.run, kernels.update, []

    def counting(of_step: chunks.ChunkUpdate, opened: chunks.OpenChunk, *given: object) -> None:
        before = len(calls)
        run(of_step, opened, *given)
        assert len(calls) == before + 1

    def native(options: object, operands: object, instructions: int, threads: int) -> None:
        calls.append((threading.get_ident(), threads))
        update(options, operands, instructions, threads)

    monkeypatch.setattr(chunks.ChunkUpdate, "run", counting)
    monkeypatch.setattr(kernels, "update", native)
    together = trained(tmp_path / f"together-{form}", "nvme", FORMS[form])
    assert set(calls) == {(threading.get_ident(), THREADS)}
    assert all(map(torch.equal, alone, together))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_threads_trains_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Those that a kernel is divided among, and those that update a piece each."""
    results, lanes = {}, []
    native, numbers = kernels.update, set()

    def update(options: object, operands: object, instructions: int, threads: int) -> None:
        numbers.add(threads)
        native(options, operands, instructions, threads)

    def together(work: Callable, those: list[object], pieces: list[object]) -> Iterator[object]:
        lanes.append(len(those))
        return at_the_same_time(work, those, pieces)

    monkeypatch.setattr(kernels, "update", update)
    monkeypatch.setattr(chunks, "at_the_same_time", together)
    for threads in (1, 2, 5):
        results[threads] = trained(tmp_path / f"{threads}-{form}", "nvme", FORMS[form], threads)
        assert max([*lanes, *numbers]) == threads
    assert all(map(torch.equal, results[1], results[2])) and all(map(torch.equal, results[1], results[5]))


@pytest.mark.parametrize(
    ("wanted", "of_pytorch", "found", "beside_gpu", "threads"),
    [
        (None, 8, Processors(16, 8, (0,)), False, 8),
        (None, 16, Processors(16, 8, (0,)), False, 8),
        (None, 4, Processors(16, 8, (0,)), True, 4),
        (None, 8, Processors(16, 8, (0,)), True, 7),
        (None, 2, Processors(2, 2, (0,)), True, 2),
        (None, 8, Processors(16, 8, (0,), Quota(0.5, "cpu.max")), False, 1),
        (None, 8, Processors(16, 8, (0,), Quota(4, "cpu.max")), True, 3),
        (12, 8, Processors(16, 8, (0,)), True, 12),
    ],
)
def test_how_many_threads_update(
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    of_pytorch: int,
    found: Processors,
    beside_gpu: bool,
    threads: int,
) -> None:
    monkeypatch.setattr(workers, "processors", lambda: found)
    assert update_threads(wanted, of_pytorch, beside_gpu=beside_gpu) == threads


@pytest.mark.usefixtures("threads")
def test_an_error_of_one_piece_ends_the_step_when_all_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 512, dtype=torch.bfloat16)
    zinf_fx.offload(model, store=tmp_path, placement="nvme", pack=None)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2, overlap=False, fused=False)
    tiers = model.weight.stored.tiers
    update, calls = chunks.update_elements, []

    def fails(*given: object) -> bool:
        calls.append(threading.get_ident())
        if len(calls) == 3:
            raise RuntimeError("no more")
        return update(*given)

    def step() -> None:
        model(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tiers.drain()
    leased = tiers.host.in_use
    monkeypatch.setattr(chunks, "update_elements", fails)
    with pytest.raises(RuntimeError, match="no more"):
        step()
    assert threading.get_ident() not in calls
    optimizer.zero_grad()
    assert tiers.host.in_use <= leased
    with pytest.raises(OptimizerError, match="was interrupted"):
        step()


@pytest.mark.usefixtures("threads")
def test_a_step_goes_on_when_pytorch_gets_more_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for what is in other dtypes is for the pieces that were counted on when the step began."""
    expected = trained(tmp_path / "as many", "nvme", FORMS["8bit"] | BY_PYTORCH)
    plan, lease = chunk_queue.ChunkMemory.plan, chunk_queue.ChunkMemory._allocate_scratch

    def with_some(self: chunk_queue.ChunkMemory, batch: UpdateBatch) -> None:
        torch.set_num_threads(THREADS)
        plan(self, batch)

    def with_more_behind_it(self: chunk_queue.ChunkMemory, place: Device) -> torch.Tensor:
        scratch = lease(self, place)
        torch.set_num_threads(THREADS + 2)
        return scratch

    monkeypatch.setattr(chunk_queue.ChunkMemory, "plan", with_some)
    monkeypatch.setattr(chunk_queue.ChunkMemory, "_allocate_scratch", with_more_behind_it)
    assert all(map(torch.equal, trained(tmp_path / "more", "nvme", FORMS["8bit"] | BY_PYTORCH), expected))


def test_each_thread_takes_one_for_an_operation(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch 2.11 to 2.13: the number is each thread's own, and one that has none yet takes the last that was set.
    Who asks for threads, and threads that come later, have the numbers that they would have without."""
    monkeypatch.setattr(workers, "_count", 0)
    asked = [threading.Event() for _ in range(2)]

    def count(lane: None, number: int) -> int:
        asked[number].set()
        assert asked[1 - number].wait(10), "both are at work at the same time"
        return torch.get_num_threads()

    elsewhere(lambda: torch.set_num_threads(THREADS + 1))
    assert of_each(count, 2) == [1, 1]
    assert [torch.get_num_threads(), elsewhere(torch.get_num_threads)] == [THREADS, THREADS + 1]


@pytest.mark.usefixtures("threads")
def test_what_is_given_comes_in_order_and_nothing_goes_on_behind() -> None:
    first_may_end, third_began, done = threading.Event(), threading.Event(), []

    def work(lane: None, number: int) -> int:
        if number == 0:
            first_may_end.wait(10)
        if number == 1:
            first_may_end.set()
        if number == 2:
            assert third_began.wait(10)
            raise RuntimeError("two")
        if number == 3:
            third_began.set()
            time.sleep(0.1)
        done.append(number)
        return number

    results = at_the_same_time(work, [None] * 2, range(9))
    with pytest.raises(RuntimeError, match="two"), closing(results):
        assert [next(results), next(results)] == [0, 1]
        next(results)
    assert 3 in done, "what was under way is over"
    so_far = list(done)
    time.sleep(0.05)
    assert done == so_far


@pytest.mark.usefixtures("threads")
def test_a_lane_does_one_piece_of_work_at_a_time() -> None:
    """However many threads there are."""
    of_each(lambda lane, number: None, THREADS + 2)
    busy: set[str] = set()

    def work(lane: str, number: int) -> str:
        assert lane not in busy
        busy.add(lane)
        time.sleep(0.01)
        busy.remove(lane)
        return lane

    with closing(at_the_same_time(work, ["one", "other"], range(8))) as lanes:
        assert set(lanes) == {"one", "other"}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("flushes", [True, False])
def test_subnormal_numbers_are_flushed_as_by_who_gives_the_work(tmp_path: Path, flushes: bool) -> None:
    """A class without a kernel, whose moments are subnormal."""
    if not torch.set_flush_denormal(not flushes):
        pytest.skip("this processor can't")
    try:
        of_each(where, THREADS)  # threads are there, and do otherwise
        torch.set_flush_denormal(flushes)
        model = nn.Linear(64, 512, bias=False)
        zinf_fx.offload(model, store=tmp_path, placement="nvme", pack=None)
        optimizer = zinf_fx.optim.RMSprop(model.parameters(), overlap=False)
        model(torch.full((1, 64), 1e-19)).sum().backward()
        optimizer.step()
        moments = optimizer.state[model.weight]["square_avg"].full_tensor()
    finally:
        torch.set_flush_denormal(False)
    assert bool((moments == 0).all() if flushes else (moments > 0).all())


@pytest.mark.usefixtures("threads")
def test_who_waits_for_a_thread_asks_in_it() -> None:
    me = threading.get_ident()
    assert of_each(lambda lane, number: (serves(me), serves(me + 1)), 2) == [(True, False)] * 2
    assert not serves(me)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("threads")
def test_a_thread_that_steps_for_itself_does_all_the_work() -> None:
    """A finalizer does, that runs in one: it may want more threads than there are."""

    def work(lane: None, number: int) -> bool:
        return of_each(where, THREADS + 5) == [threading.get_ident()] * (THREADS + 5)

    assert of_each(work, THREADS) == [True] * THREADS


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("threads")
def test_who_steps_while_work_is_given_to_threads_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer does, that runs in the middle of `submit`, which has a lock then."""
    of_each(where, 2)  # threads are there
    make, thread_ids = futures.Future, []

    def with_a_finalizer() -> futures.Future:
        if not thread_ids:
            thread_ids.append(None)
            thread_ids[0] = of_each(where, 2)
        return make()

    monkeypatch.setattr(futures.thread._base, "Future", with_a_finalizer)
    assert threading.get_ident() not in of_each(where, 2)
    assert thread_ids == [[threading.get_ident()] * 2]


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("threads")
def test_who_steps_while_threads_start_does_all_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer does, in any of the threads that take part."""
    monkeypatch.setattr(workers, "_count", 0)
    start, took_all = workers._started, []

    def started(count: int) -> ThreadPoolExecutor:
        took_all.append(of_each(where, 2) == [threading.get_ident()] * 2)
        return start(count)

    monkeypatch.setattr(workers, "_started", started)
    assert threading.get_ident() not in of_each(where, 2)
    assert took_all == [True]


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("threads")
def test_an_interrupt_while_threads_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_count", 0)
    before = threading.active_count()

    def interrupted(barrier: threading.Barrier) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Barrier, "wait", interrupted)
        of_each(where, 2)
    assert threading.active_count() <= before
    assert threading.get_ident() not in of_each(where, 2)


@pytest.mark.usefixtures("threads")
def test_without_threads_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threading.get_ident() not in of_each(where, 2)
    monkeypatch.setattr(workers, "_count", 0)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("zinf-update_1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert of_each(where, 2) == [threading.get_ident()] * 2
    assert [torch.get_num_threads(), elsewhere(torch.get_num_threads)] == [THREADS, THREADS]
    assert threading.get_ident() not in of_each(where, 2), "the next chunk tries again"


class AdamOfSomebodyElse(torch.optim.Adam):
    """Which has something that threads would share."""


@pytest.mark.usefixtures("threads")
def test_classes_of_others_run_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 512)
    zinf_fx.offload(model, store=tmp_path, placement="host", pack=None)
    optimizer = AdamOfSomebodyElse(model.parameters())
    update, used = chunks.update_elements, set()
    monkeypatch.setattr(chunks, "update_elements", lambda *given: used.add(threading.get_ident()) or update(*given))
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    assert used == {threading.get_ident()}


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("threads")
def test_a_process_made_by_fork_has_threads_of_its_own() -> None:
    def count() -> int:
        return sum(process == os.getpid() for process in of_each(lambda lane, number: os.getpid(), 4))

    assert count() == 4
    child = os.fork()
    if not child:
        os._exit(count() != 4 or threading.get_ident() in of_each(where, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pieces_are_of_a_size_that_gives_each_thread_some() -> None:
    lanes = {}
    for threads in (1, 2, 8, 16, 64):
        lanes[threads] = [lanes_for(elements, threads) for elements in (8 << 20, 1 << 20, WINDOW_ALIGNMENT)]
    small = (1, WINDOW_ALIGNMENT)
    assert lanes == {
        1: [(1, 1 << 20), (1, 1 << 20), small],
        2: [(2, 1 << 20), (2, 1 << 19), small],
        8: [(8, 1 << 20), (4, 1 << 18), small],
        16: [(16, 1 << 19), (4, 1 << 18), small],
        64: [(32, 1 << 18), (4, 1 << 18), small],
    }
