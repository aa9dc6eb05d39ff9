"""A process made by fork has its parent's objects, but neither its memory, nor its I/O threads, nor its locks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from gate import slow
from torch import Tensor, nn

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.optim.step import StreamedStep
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.tensor.tiers import Tiers

HOST = {"parameters": "host", "gradients": "host", "activations": "device"}
SECONDS = 20  # after which a child counts as hanging


class Training:
    """A model with a step that goes on in the background: its states are on disk, in several chunks."""

    def __init__(self, store: Path, parameters: str, compiled: bool = False) -> None:
        torch.manual_seed(0)
        placement = {**HOST, "parameters": parameters, "optimizer": "nvme"}
        layers = [nn.Linear(256, 256) for _ in range(6)]
        self.model = zinf_fx.offload(nn.Sequential(*layers), store=store, placement=placement, chunk="64KiB")
        self.call = torch.compile(self.model, backend="zinf") if compiled else self.model
        self.optimizer = zinf_fx.optim.AdamW(self.model.parameters())
        self.backward()
        self.optimizer.step()
        self.backward()
        with mock.patch.object(StreamedStep, "advance"):  # on a quick disk it would be over
            self.optimizer.step()
        assert self.tiers.background is not None

    def backward(self) -> None:
        self.call(torch.randn(4, 256)).sum().backward()

    @property
    def tiers(self) -> object:
        return self.model[0].weight.stored.tiers

    def drop(self) -> None:
        del self.model, self.call, self.optimizer
        gc.collect()

    def values(self) -> list[Tensor]:
        return [p.full_tensor() for p in self.model.parameters()]


def _backward_runs_in_children() -> bool:
    """Builds with CUDA refuse it where autograd has run on a device before, fake devices of other tests included."""
    return _in_child(lambda: torch.ones(1, requires_grad=True).sum().backward()) == ""


def _in_child(action: Callable[[], object]) -> str:
    """Return what a forked child that did this says of it: nothing, or the error."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            action()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    ends = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > ends:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    with os.fdopen(reads) as pipe:
        return pipe.read()


TOUCHES: dict[str, Callable[[Training], object]] = {
    "forward": lambda t: t.call(torch.randn(4, 256)),
    "step": lambda t: t.optimizer.step(),
    "finish": lambda t: t.optimizer.finish(),
    "state_dict": lambda t: t.optimizer.state_dict(),
    "value": lambda t: t.model[0].weight.full_tensor(),
    "write": lambda t: nn.init.zeros_(t.model[0].weight),
}


@pytest.mark.parametrize("parameters", [slow("host"), "nvme"])
def test_a_child_that_touches_its_parents_model_is_told(tmp_path: Path, parameters: str) -> None:
    training = Training(tmp_path, parameters)
    for what, touch in TOUCHES.items():
        said = _in_child(lambda touch=touch: touch(training))
        assert said.startswith("StoreError") and "fork" in said, (what, said)
    assert training.tiers.background is not None
    training.optimizer.finish()
    assert len(training.values()) == 12


def test_a_child_that_drops_its_parents_model_leaves_it_alone(tmp_path: Path) -> None:
    twin, training = Training(tmp_path, "host"), Training(tmp_path, "host")
    (scratch,) = tmp_path.iterdir()
    assert _in_child(training.drop) == ""
    assert [scratch] == list(tmp_path.iterdir())
    for value, other in zip(training.values(), twin.values(), strict=True):
        assert torch.equal(value, other)


def test_a_child_that_drops_its_parents_gradients_gives_no_memory_back(tmp_path: Path) -> None:
    """They live side by side, and have the same memory in every step."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    placement = {**HOST, "parameters": "nvme"}
    model = zinf_fx.offload(nn.Sequential(*layers), store=tmp_path, placement=placement, pack="auto")
    torch.compile(model, backend="zinf")(torch.randn(4, 8)).sum().backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    allocation = model[0].weight.grad.stored.bytes.allocation
    assert allocation.is_reused and allocation is model[2].bias.grad.stored.bytes.allocation

    def drop() -> None:
        model.zero_grad()
        gc.collect()
        assert allocation._host_buffer._is_there

    assert _in_child(drop) == ""
    assert all(map(torch.equal, before, [p.grad.full_tensor() for p in model.parameters()]))
    model.zero_grad()
    gc.collect()
    assert not allocation._host_buffer._is_there


def test_a_child_that_drops_its_parents_tensors_gives_no_memory_back() -> None:
    arena = Arena("host memory", 1 << 20)
    taken = [*arena.allocate(4096).owning_tensors([(0, torch.Size([1024]), torch.float32)])]

    def drop() -> None:
        taken.clear()
        assert arena.in_use == 4096
        own = arena.allocate(4096).owning_tensors([(0, torch.Size([1024]), torch.float32)])
        assert arena.in_use == 8192
        del own
        assert arena.in_use == 4096

    assert _in_child(drop) == ""
    taken.clear()
    assert arena.in_use == 0


def test_a_child_waits_for_no_lock_of_another_thread(tmp_path: Path) -> None:
    training = Training(tmp_path, "nvme", compiled=True)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        tiers, step = training.tiers, training.optimizer._last_step
        arena = tiers.host._read_by_device.lock
        with RUNNING.lock, EXECUTOR.tiles._lock, step._lock, tiers._lock, arena, Tiers._open_lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        for what, touch in TOUCHES.items():
            said = _in_child(lambda touch=touch: touch(training))
            assert said.startswith("StoreError") and "fork" in said, (what, said)
        assert _in_child(training.drop) == ""
        if _backward_runs_in_children():
            assert _in_child(lambda: Training(tmp_path, "nvme").values()) == ""
    finally:
        over.set()
        holder.join()


def test_a_child_may_have_a_model_of_its_own(tmp_path: Path) -> None:
    if not _backward_runs_in_children():
        pytest.skip("PyTorch refuses backward in forks of this process")
    training = Training(tmp_path, "nvme")
    assert _in_child(lambda: Training(tmp_path, "nvme").values()) == ""
    training.optimizer.finish()


def test_an_error_of_the_store_reaches_the_parent_of_a_pool(tmp_path: Path) -> None:
    INHERITED.append(Training(tmp_path, "host"))
    try:
        with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(StoreError, match="fork"):
            pool.apply_async(_inherited_values).get(SECONDS)
    finally:
        INHERITED.clear()


INHERITED: list[Training] = []


def _inherited_values() -> list[Tensor]:
    return INHERITED[0].values()
