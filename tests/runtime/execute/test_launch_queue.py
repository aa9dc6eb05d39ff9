"""What a GPU is given, and when, by the program that trains: on a device whose kernels and copies take modelled times.

Kernels take so long here that Python's time is nothing beside them.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gate import named, slow
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.frontend.explain import plan_model
from zinf_fx.optim.threads import BackgroundThread
from zinf_fx.plan.hardware import Hardware, Link, Memory, load
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.memory import device
from zinf_fx.runtime.tensor.tiers import Tiers

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from launch_queue import Launch, LaunchQueue

RATE = 1e6  # bytes per second of the device's memory and of its links: a kernel takes 30 ms or more
LAYERS, WIDTH, BATCH = 8, 128, 64
NBYTES = WIDTH * WIDTH * 4  # of a layer
PLACEMENTS = named(("device", "infinity-cpu", "zero-offload", "nvme", "infinity-nvme"), ("device", "infinity-nvme"))


def hardware(disk: float, download: float) -> Hardware:
    """Describe a machine with a disk, and a link from the device, that move so many bytes per second. Host memory moves
    ten times as many as the device's."""
    described, memory = load("a100"), Memory(1 << 40, RATE, RATE)
    host = Memory(1 << 40, 10 * RATE, 10 * RATE)
    nvme = replace(described.nvme, read=disk, write=disk)
    links = {"upload": Link(RATE, 1e-6), "download": Link(download, 1e-6)}
    return replace(described, device=memory, host=host, nvme=nvme, launch=0.0, **links)


class Training:
    """A stack of layers that trains on a stand-in. Nothing is computed."""

    def __init__(self, store: Path, placement: str, disk: float, download: float, **budgets: str) -> None:
        self.queue = LaunchQueue(hardware(disk, download))
        self.options = {"placement": placement, "store": store, "checksum": False, "host_memory": "1GiB"}
        self.options |= {"pack": None, "residency": False, "chunk": NBYTES} | budgets
        self._tiers = Tiers.of(Config(**self.options))
        self.queue.serve(self._tiers.store)

    def prepare(self) -> None:
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.inputs = torch.empty(BATCH, WIDTH)
        (self.plan,) = plan_model(self.model, (self.inputs,), **self.options).plans
        zinf_fx.offload(self.model, **self.options)
        self._call = torch.compile(self.model, backend="zinf")

    def step(self) -> list[Launch]:
        """Return the kernels of a step."""
        first = len(self.queue.launches)
        self.run()
        for parameter in self.model.parameters():
            parameter.grad = None
        return self.queue.launches[first:]

    def forward(self) -> torch.Tensor:
        return self._call(self.inputs).sum()

    def run(self) -> None:
        self.forward().backward()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[[str, float], Training]]:
    """Makes one that has run two steps, with rates of the disk and of the link from the device."""
    torch._dynamo.reset()
    with ExitStack() as block:

        def train(placement: str, disk: float = 1e12, download: float = RATE, **budgets: str) -> Training:
            training = Training(tmp_path, placement, disk, download, **budgets)
            block.enter_context(training.queue.standing_in())
            training.prepare()
            for _ in range(2):
                training.step()
            return training

        yield train
        torch._dynamo.reset()
        EXECUTOR.reset()
        gc.collect()


# Autograd's own, and what puts gradients where they live.
# What eager autograd and the optimizer launch; up to torch 2.11, the former copies the gradient of a sum.
_NOT_OF_GRAPHS = ("aten.sum.default", "aten.ones_like.default", "aten.copy_.default", "aten.clone.default")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_kernel_of_the_plan_is_launched_once_in_order(trained: Callable[..., Training], placement: str) -> None:
    training = trained(placement)
    launches = training.step()
    assert [launch.name for launch in launches] == [launch.name for launch in training.step()]
    planned = sum(operator.kernels for graph in training.plan.graphs for operator in graph.operators)
    assert len([launch for launch in launches if launch.name not in _NOT_OF_GRAPHS]) == planned == 3 * LAYERS - 1
    for before, after in pairwise(launches):
        assert before.end <= after.start and after.launched <= after.start


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_copies_and_kernels_that_share_memory_take_turns(trained: Callable[..., Training], placement: str) -> None:
    """In the order in which the program comes to them: a tile is read after its upload, and its place is written again
    after that; a gradient leaves after it is computed."""
    training = trained(placement)
    first = len(training.queue.launches), len(training.queue.copies)
    training.step()
    kernels, copies = training.queue.launches[first[0] :], training.queue.copies[first[1] :]
    # Backward needs all but the first layer, and forward leaves it the last one.
    uploads = 2 * LAYERS - 2 if placement in ("infinity-cpu", "nvme", "infinity-nvme") else 0
    downloads = LAYERS if placement != "device" else 0
    assert Counter(copy.name for copy in copies) == Counter(upload=uploads, download=downloads)
    for copy in copies:
        for kernel in kernels:
            if share_memory(copy, kernel):
                assert copy.end <= kernel.start if copy.launched < kernel.launched else kernel.end <= copy.start


def share_memory(launch: Launch, other: Launch) -> bool:
    return any(a < d and c < b for a, b in launch.places for c, d in other.places)


@pytest.mark.parametrize("placement", [slow("nvme"), "infinity-nvme"])
def test_a_slow_disk_stalls_what_needs_it_and_nothing_else(trained: Callable[..., Training], placement: str) -> None:
    training = trained(placement, disk=NBYTES / 3.0)
    first = len(training.queue.copies)
    launches = training.step()
    uploads = [copy for copy in training.queue.copies[first:] if copy.name == "upload"]
    idle = [kernel for kernel in launches if kernel.start - kernel.free > 1]
    assert len(idle) == len(uploads) == 2 * LAYERS - 2
    for kernel, upload in zip(idle, uploads, strict=True):
        assert share_memory(kernel, upload) and kernel.ready == upload.end and kernel.late == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_program_waits_for_nothing_but_room_for_gradients(trained: Callable[..., Training], placement: str) -> None:
    """It is done with a step long before the device; on NVMe, what the plan has of host memory bounds how far it is."""
    training = trained(placement)
    before = dict(training.queue.clock.waited)
    training.run()
    waited = {what: seconds - before.get(what, 0.0) for what, seconds in training.queue.clock.waited.items()}
    waits = {what for what, seconds in waited.items() if seconds > 1e-3}
    assert waits == ({"the device"} if placement == "nvme" else set())
    late = [kernel.late for kernel in training.queue.launches[-3 * LAYERS :]]
    assert sum(late) < 0.01


@pytest.mark.parametrize(
    ("limit", "budgets"), [(0, {}), (device.MAX_BYTES_OFFLOADING, {}), slow(0, {"device_memory": "1GiB"})]
)
def test_gradients_that_leave_hold_up_compute_only_where_they_are_many(
    trained: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, limit: int, budgets: dict[str, str]
) -> None:
    """As many bytes as the limit, as the plan leaves of the device's budget, or twice those of one of them. The link
    takes longer here than all computing."""
    monkeypatch.setattr(device, "MAX_BYTES_OFFLOADING", limit)
    training = trained("infinity-cpu", download=RATE / 30, **budgets)
    first = len(training.queue.copies)
    launches = training.step()
    downloads = [copy for copy in training.queue.copies[first:] if copy.name == "download"]
    after = [kernel for kernel in launches if kernel.launched > downloads[0].launched]
    leaving = [
        sum(copy.launched < kernel.launched and copy.end > kernel.start for copy in downloads) for kernel in after
    ]
    is_bounded = limit == 0 and not budgets
    assert max(leaving) == (2 if is_bounded else LAYERS - 3)
    assert any(kernel.ready - kernel.free > 1 for kernel in after) == is_bounded


@pytest.mark.parametrize(("in_backward", "late"), [(False, 0), slow(True, 0), slow(False, 0.02)])
def test_the_program_waits_for_the_optimizer_where_it_needs_its_values(
    trained: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, in_backward: bool, late: float
) -> None:
    """The CPU's update has a thread of its own: what backward launches does not wait for it. `late`: seconds, which
    aren't modelled, that the program takes to wake up when what it waits for is there."""
    wait = BackgroundThread.wait
    monkeypatch.setattr(BackgroundThread, "wait", lambda *given: (wait(*given), time.sleep(late))[0])
    training = trained("infinity-cpu")
    with _disable_current_modes():
        parameters = training.model.parameters()
        optimizer = zinf_fx.optim.AdamW(parameters, step_in_backward=in_backward, fused=True)
    waits, waited = training.queue.clock.waits, []
    for _ in range(3):  # the first one learns that a step follows backward
        waits.clear()
        loss = training.forward()
        waited = [{what for what, _, _ in waits}]
        waits.clear()
        loss.backward()
        waited.append({what for what, _, _ in waits})
        with _disable_current_modes():
            optimizer.step()
            optimizer.zero_grad()
    assert waited[0] <= {"the optimizer"} and (waited[0] or in_backward) and not waited[1]
    with _disable_current_modes():
        optimizer.finish()
    states = 5 * LAYERS * NBYTES  # of Adam: the weight, its gradient and two moments, of which all but one are written
    assert training.queue.on_host.seconds >= (states - LAYERS * NBYTES) / (10 * RATE)
