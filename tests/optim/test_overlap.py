"""A step that goes on in the background is never seen half done."""

from __future__ import annotations

import copy
import errno
import gc
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from injecting import Fault, clear_faults, inject

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.optim.chunk_queue import ChunkQueue
from zinf_fx.optim.step import StreamedStep
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.tensor.storage import new_storages

SHAPES = ((3 * 16384,), (100,), (2 * 16384,), (7,), (40_000,))
LATE = 0.05


def prepared(twins, dtype: torch.dtype = torch.float32, **fields: object):
    """Twins after one step, with new gradients, and a store that answers reads late."""
    pair = twins(shapes=SHAPES, dtype=dtype, placement="infinity-nvme", **fields)
    optimizer = optim.AdamW(pair.stored, lr=1e-2)
    reference = torch.optim.AdamW(pair.masters, lr=1e-2, fused=True)
    pair.train(optimizer, reference, steps=1)
    pair.give_stored_gradients()
    pair.stored[0].stored.tiers.drain()
    return pair, optimizer, reference


def late_reads(pair, count: int = 1000) -> None:
    store = pair.stored[0].stored.tiers.store
    inject(store, Fault("completion", operation="read", count=count, delay=LATE))


def background(pair) -> object:
    return pair.stored[0].stored.tiers.background


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_returns_while_it_goes_on_and_readers_wait(twins, dtype):
    pair, optimizer, reference = prepared(twins, dtype)
    late_reads(pair)
    optimizer.step()
    assert background(pair) is not None
    optimizer.zero_grad()
    reference.step()
    pair.check()  # reads every parameter
    optimizer.finish()
    assert background(pair) is None and optimizer.torn is None
    assert pair.stored[0].stored.tiers.host.in_use == 0
    clear_faults(pair.stored[0].stored.tiers.store)
    pair.train(optimizer, reference)


def test_without_overlap_step_ends_within_step(twins):
    pair, optimizer, reference = prepared(twins)
    optimizer.overlap = False
    late_reads(pair, count=5)
    optimizer.step()
    assert background(pair) is None and optimizer.step_seconds >= LATE
    reference.step()
    pair.check()


@pytest.mark.parametrize("value", [3.0, torch.tensor(3.0)])
def test_what_changes_after_step_is_for_the_next(twins, value):
    pair, optimizer, reference = prepared(twins)
    late_reads(pair)
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["lr"] = torch.tensor(1e-2) if isinstance(value, torch.Tensor) else 1e-2
    optimizer.step()
    reference.step()
    for group in (*optimizer.param_groups, *reference.param_groups):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
    for parameter in pair.stored:
        parameter.grad.zero_()  # in place: waits for the step that consumes it
    pair.check()


def test_writes_states_and_copies_wait_for_their_turn(twins):
    pair, optimizer, reference = prepared(twins)
    late_reads(pair)
    optimizer.step()
    reference.step()
    with torch.no_grad():
        pair.stored[-1].mul_(2)
        pair.masters[-1].mul_(2)
    pair.check()
    optimizer.step()
    reference.step()
    twin = copy.deepcopy(optimizer)
    assert background(pair) is None
    for mine, theirs in zip(twin.state.values(), reference.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"].full_tensor(), theirs["exp_avg"])


def test_autograd_notices_at_once(twins):
    pair, optimizer, _ = prepared(twins)
    loss = (pair.stored[-1] * torch.ones(40_000, requires_grad=True)).sum()
    late_reads(pair)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_fault_in_the_background_is_raised_where_it_is_met(twins):
    pair, optimizer, _ = prepared(twins)
    gradients = pair.stored[0].stored.tiers.host.in_use
    store = pair.stored[0].stored.tiers.store
    inject(store, Fault("completion", operation="read", count=1, delay=LATE))
    inject(store, Fault("completion", operation="write", nth=4, errno=errno.EIO))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.torn is None
    with pytest.raises(StoreError, match="errno 5"):
        optimizer.finish()
    assert optimizer.torn.partial and background(pair) is None
    assert pair.stored[0].stored.tiers.host.in_use < gradients  # no chunk is left
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OptimizerError, match="step was interrupted"):
            refused()


def test_ctrl_c_while_it_waits_leaves_the_step_whole(twins):
    pair, optimizer, reference = prepared(twins)
    late_reads(pair)
    optimizer.step()
    ctrl_c = threading.Timer(LATE / 3, signal.raise_signal, (signal.SIGINT,))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        pair.stored[-1].full_tensor()
    ctrl_c.join()
    assert optimizer.torn is None and background(pair) is not None
    reference.step()
    pair.check()
    pair.train(optimizer, reference)


def test_ctrl_c_while_a_gradient_is_still_written_leaves_the_step_whole(twins):
    pair, optimizer, reference = prepared(twins)
    store = pair.stored[0].stored.tiers.store
    inject(store, Fault("completion", operation="write", count=1000, delay=10 * LATE))
    for parameter in pair.stored:
        value, parameter.grad = parameter.grad, None
        parameter.grad = zinf_fx.StoredTensor.of(new_storages([parameter.stored], "nvme")[0], parameter.shape, "cpu")
        parameter.grad.copy_(value.full_tensor())
    ctrl_c = threading.Timer(LATE, signal.raise_signal, (signal.SIGINT,))
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.start()
        optimizer.step()
    ctrl_c.join()
    clear_faults(store)
    assert optimizer.torn is None and background(pair) is not None
    reference.step()
    pair.check()
    assert optimizer.torn is None
    pair.train(optimizer, reference)


def test_a_step_that_could_not_begin_in_the_background_is_torn_too(twins):
    pair, optimizer, _ = prepared(twins)
    inject(
        pair.stored[0].stored.tiers.store,
        Fault("completion", operation="read", count=100, delay=LATE, errno=errno.EIO),
    )
    optimizer.step()
    optimizer.zero_grad()  # so the gradients are gone, and no step can be taken again
    with pytest.raises(StoreError):
        pair.stored[0].full_tensor()
    assert len(optimizer.torn.untouched) == len(SHAPES)


@pytest.mark.parametrize("by", ["step", "thread"])
def test_a_step_that_fails_before_it_returns_is_taken_again(twins, monkeypatch, by):
    """Whoever finds it out, `step()` raises, and the gradients are there still."""
    pair, optimizer, reference = prepared(twins)
    store = pair.stored[0].stored.tiers.store

    def read(stage: object) -> None:
        """What forward begins with."""
        if by == "step":
            pair.stored[0].full_tensor()
        else:
            errors.append(in_a_thread(pair.stored[0].full_tensor))

    errors: list[BaseException | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(ChunkQueue, "ready", False)  # all is left to the background
        patch.setattr(EXECUTOR, "end", read)
        inject(store, Fault("submission", operation="read", count=100, errno=errno.ENOMEM))
        with pytest.raises(StoreError) as raised:
            optimizer.step()
    clear_faults(store)
    assert optimizer.torn is None and background(pair) is None
    assert not errors or errors == [raised.value]
    optimizer.step()
    reference.step()
    pair.check()
    pair.train(optimizer, reference)


def test_a_step_that_goes_on_behind_an_interrupt_is_torn_where_that_fails(twins, monkeypatch):
    pair, optimizer, _ = prepared(twins)

    def interrupt(stage: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ChunkQueue, "ready", False)
        patch.setattr(EXECUTOR, "end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert optimizer.torn is None and background(pair) is not None
    optimizer.zero_grad()
    inject(pair.stored[0].stored.tiers.store, Fault("completion", operation="read", count=100, errno=errno.EIO))
    with pytest.raises(StoreError):
        optimizer.finish()
    assert len(optimizer.torn.untouched) == len(SHAPES)


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    """Returns what `call` raises in another thread."""
    raised: list[BaseException] = []

    def catch() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_two_optimizers_over_one_store(twins):
    pair, optimizer, reference = prepared(twins)
    second = optim.SGD(pair.stored[:2], lr=0.1)
    second_reference = torch.optim.SGD(pair.masters[:2], lr=0.1, fused=True)
    late_reads(pair)
    optimizer.step()
    reference.step()
    second.step()
    second_reference.step()
    pair.check()


def test_what_comes_while_somebody_waits_is_updated_before_he_goes_on(twins, monkeypatch):
    pair, optimizer, reference = prepared(twins)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkQueue, "ready", False)  # all is left to be done
        optimizer.take_gradients(pair.stored)
        step = background(pair)
        patch.setattr(StreamedStep, "_until", lambda *_: None)  # nothing had come
        assert step.finish() and not step._queue and not step.closed
    step.close(overlap=False)
    reference.step()
    pair.check()


def test_an_optimizer_that_is_dropped_finishes_its_step(twins):
    pair, optimizer, reference = prepared(twins)
    late_reads(pair)
    optimizer.step()
    del optimizer
    gc.collect()
    reference.step()
    pair.check()
    pair.stored[-1].stored.tiers.background and pair.stored[-1].stored.tiers.background.finish()


def test_everything_dropped_in_the_middle(twins):
    pair, optimizer, _ = prepared(twins)
    directory = pair.stored[0].stored.tiers.store.directories[0]
    late_reads(pair)
    optimizer.step()
    del pair, optimizer
    gc.collect()
    assert not list(directory.iterdir())


def test_a_small_host_budget_ends_the_step_early(twins):
    pair, optimizer, reference = prepared(twins, host_memory="2MiB")
    late_reads(pair, count=3)
    optimizer.step()
    tiers = pair.stored[0].stored.tiers
    assert tiers.background is not None
    tiers.allocate(tiers.host.capacity - (512 << 10)).release()
    assert tiers.background is None
    reference.step()
    pair.check()
