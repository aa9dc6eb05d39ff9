"""A step that is interrupted says how far it got, and no further step is taken on what it left."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import pytest
import torch
from injecting import Fault, clear_faults, inject
from noticed import Noticed

from zinf_fx import optim
from zinf_fx.errors import OptimizerError, StoreError
from zinf_fx.optim import step as steps
from zinf_fx.optim.chunk_queue import ChunkQueue
from zinf_fx.optim.update_batch import UpdateBatch
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.tensor.windows import Window

SHAPES = ((16384,), (3 * 16384,), (2 * 16384,))


def prepared(twins, **fields: object):
    """A chunk is one window of the first parameter, a third of the second, half of the third."""
    pair = twins(shapes=SHAPES, **fields)
    names = [(name, p) for name, p in zip("abc", pair.stored, strict=True)]
    optimizer = optim.AdamW(names)
    reference = torch.optim.AdamW(pair.masters, fused=True)
    pair.train(optimizer, reference, steps=1)
    pair.give_gradients()
    return pair, optimizer, reference


def interrupt_store(monkeypatch, number: int, error: BaseException) -> None:
    """The `number`-th window to be stored raises instead, counted from 1."""
    store, count = Window.store, 0

    def failing(window: Window) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise error
        store(window)

    monkeypatch.setattr(Window, "store", failing)


@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        ({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, torch.bfloat16),
        ("nvme", torch.float32),
    ],
    ids=["bf16", "fp32"],
)
@pytest.mark.parametrize("error", [RuntimeError("lightning"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("piece", "last", "updated", "partial", "untouched"),
    [
        (0, False, "", "a", "bc"),
        (0, True, "", "a", "bc"),
        (1, False, "a", "b", "c"),
        (3, True, "a", "b", "c"),
        (4, False, "ab", "c", ""),
    ],
)
def test_interrupted(twins, monkeypatch, placement, dtype, error, piece, last, updated, partial, untouched):
    """It strikes at the first or the last window of a piece that is stored: of a parameter, its states and its master,
    if any."""
    pair, optimizer, _ = prepared(twins, placement=placement, dtype=dtype)
    windows = 4 if dtype == torch.bfloat16 else 3
    number = windows * (piece + last) + (not last)
    state = {k: {n: torch.clone(v) for n, v in s.items()} for k, s in optimizer.state_dict()["state"].items()}
    arena = pair.stored[0].stored.tiers.host
    allocated = arena.in_use
    with monkeypatch.context() as patch:
        interrupt_store(patch, number, error)
        with pytest.raises(type(error)):
            optimizer.step()
    assert arena.in_use == allocated
    torn = optimizer.torn
    assert ("".join(torn.updated), "".join(torn.partial), "".join(torn.untouched)) == (updated, partial, untouched)
    for parameter, name in zip(pair.stored, "abc", strict=True):
        assert optimizer.state[parameter]["step"].item() == (2 if name in updated else 1)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OptimizerError, match=r"step was interrupted .*load the model's parameters"):
            refused()
    groups = optimizer.param_groups[0]
    saved = {"state": state, "param_groups": [{**groups, "params": [0, 1, 2]}]}
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for stored, plain in zip(pair.stored, pair.plain, strict=True):
            stored.copy_(plain)
    reference = torch.optim.AdamW(pair.masters, fused=True)
    reference.load_state_dict(saved)
    pair.train(optimizer, reference)


def test_a_write_that_fails_later(twins):
    pair, optimizer, _ = prepared(twins)
    store = pair.stored[0].stored.tiers.store
    # A chunk stores three windows of one block each: the fifth write is of a state of the second parameter.
    inject(store, Fault("completion", nth=5, operation="write", errno=errno.EIO))
    with pytest.raises(StoreError):
        optimizer.step()
    assert "b" in optimizer.torn.partial
    assert pair.stored[0].stored.tiers.host.in_use == 0
    with pytest.raises(OptimizerError, match="errno 5"):
        optimizer.step()


def test_a_read_that_fails_before_anything_changed(twins):
    pair, optimizer, reference = prepared(twins)
    store = pair.stored[0].stored.tiers.store
    inject(store, Fault("submission", nth=1, count=100, operation="read", errno=errno.ENOMEM))
    with pytest.raises(StoreError):
        optimizer.step()
    clear_faults(store)
    assert optimizer.torn is None and pair.stored[0].stored.tiers.host.in_use == 0
    optimizer.step()
    reference.step()
    pair.check()


def test_ordinary_parameters_are_not_updated_again_after_a_step_that_failed(twins):
    """They are updated first: the step is torn, though no stored parameter changed."""
    pair = twins(shapes=SHAPES)
    ordinary = torch.nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([*zip("abc", pair.stored, strict=True), ("d", ordinary)], lr=1.0)
    pair.give_gradients()
    ordinary.grad = torch.ones(4)
    store = pair.stored[0].stored.tiers.store
    inject(store, Fault("submission", nth=1, count=100, operation="read", errno=errno.ENOMEM))
    with pytest.raises(StoreError):
        optimizer.step()
    clear_faults(store)
    assert (optimizer.torn.updated, optimizer.torn.partial, optimizer.torn.untouched) == (("d",), (), ("a", "b", "c"))
    with pytest.raises(OptimizerError, match=r"step was interrupted .* 1 \(d\) updated"):
        optimizer.step()
    assert (ordinary == -1).all()


def test_parameters_without_names_are_numbered(twins, monkeypatch):
    pair = twins(shapes=((10,),) * 40)
    optimizer = optim.AdamW(pair.stored)
    pair.give_gradients()
    interrupt_store(monkeypatch, 3, RuntimeError("lightning"))
    with pytest.raises(RuntimeError, match="lightning"):
        optimizer.step()
    assert optimizer.torn.partial[3] == "parameter 3 of group 0"
    assert "and 28 more" in str(optimizer.torn)


@pytest.mark.parametrize("error", [StoreError("read", "data-0", "lightning"), KeyboardInterrupt()], ids=type)
def test_a_step_that_ends_while_parameters_are_added_is_taken_again(twins, monkeypatch, error):
    """It is whole: that it began in backward is not believed."""
    pair, optimizer, reference = prepared(twins)

    def failing(queue: ChunkQueue, batch: UpdateBatch) -> None:
        raise error

    called_back = []
    with monkeypatch.context() as patch:
        patch.setattr(ChunkQueue, "add", failing)
        patch.setattr(steps, "drain_after", lambda *_: called_back.append(optimizer._last_step.asks))
        with pytest.raises(type(error)):
            optimizer.step()
    assert optimizer.torn is None and called_back == [True]
    optimizer.step()
    reference.step()
    pair.check()


class Other(threading.Thread):
    """Steps in another thread. `error`: what it got for that."""

    error: Exception | None = None

    def __init__(self, step: Callable[[], object], lock: Noticed) -> None:
        super().__init__()
        self._step, self._lock = step, lock

    def run(self) -> None:
        try:
            self._step()
        except Exception as error:
            self.error = error

    def begin(self) -> None:
        """Return when it waits for the lock, or is over."""
        self.start()
        while self.is_alive() and not self._lock.is_asked_for.wait(0.01):
            pass


@pytest.mark.parametrize("in_backward", [False, True])
def test_who_steps_while_another_step_fails_waits_until_it_is_known_how_far_that_got(twins, monkeypatch, in_backward):
    pair, optimizer, _ = prepared(twins, placement="infinity-nvme")
    pair.give_stored_gradients()
    with monkeypatch.context() as patch:
        patch.setattr(ChunkQueue, "ready", False)  # all is left to the background
        if in_backward:
            optimizer.take_gradients(pair.stored)
        else:
            optimizer.step()
    optimizer._last_step._lock = lock = Noticed()
    other, drain_after = Other(optimizer.step, lock), steps.drain_after

    def late(*arguments: object) -> None:
        other.begin()
        drain_after(*arguments)

    monkeypatch.setattr(steps, "drain_after", late)
    interrupt_store(monkeypatch, 1, RuntimeError("lightning"))
    with pytest.raises(RuntimeError, match="lightning"):
        pair.stored[0].full_tensor()
    other.join()
    assert optimizer.torn.partial and isinstance(other.error, OptimizerError)


@pytest.mark.parametrize("step", ["step", "step_stored"])
def test_who_waited_to_step_while_another_step_failed_is_refused(twins, monkeypatch, step):
    _, optimizer, _ = prepared(twins)
    monkeypatch.setattr(RUNNING, "lock", lock := Noticed())
    other, add = Other(getattr(optimizer, step), lock), ChunkQueue.add

    def late(queue: ChunkQueue, batch: UpdateBatch) -> None:
        if other.ident is None:
            other.begin()
        add(queue, batch)

    monkeypatch.setattr(ChunkQueue, "add", late)
    interrupt_store(monkeypatch, 1, RuntimeError("lightning"))
    with pytest.raises(RuntimeError, match="lightning"):
        optimizer.step()
    other.join()
    assert optimizer.torn.partial and isinstance(other.error, OptimizerError)
