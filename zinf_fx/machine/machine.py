"""Measure this machine as a hardware description: what its devices, memories and disks do, in some seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from threading import Event
from typing import get_args

import torch

from zinf_fx import cuda
from zinf_fx.adam import UpdateForm, has_master
from zinf_fx.native.engine import BLOCK, DEPTH
from zinf_fx.optim.arithmetic import borrow
from zinf_fx.optim.formats import CODES, LOWER, MASTER, MASTER_UP, SCALES, UPS, companion_of
from zinf_fx.optim.kernels import Operands
from zinf_fx.optim.threads import update_threads
from zinf_fx.optim.update import update_elements
from zinf_fx.plan.hardware import DTYPES, Disks, Hardware, Link, Memory
from zinf_fx.runtime.disk.filesystem import file_system_of, one_per_device
from zinf_fx.runtime.disk.measure import QUICK_BYTES, Trial, load_profile
from zinf_fx.runtime.memory.process import memory_limit
from zinf_fx.sizes import PAGE

CPU = torch.device("cpu")
# Larger than caches, and small beside any memory.
_COPIED = 256 << 20
_SMALL = PAGE
_LAUNCHES = 1000
_DISK_BYTES = 512 << 20
# Matrix products compute beside the disk: of some tokens by the weights of some layers of this width.
_ROWS, _WIDTH, _WEIGHTS = 128, 1024, 4
_STARTS, _BURSTS = 50, 8
_UPDATED = 1 << 25  # how many parameters are updated: with their states, some times what caches hold
_MOMENTS = ("exp_avg", "exp_avg_sq")
# A measurement is repeated for so long, and at least so often; the mean counts.
_SECONDS, _TIMES = 0.3, 3


def measure_machine(*stores: Path | str) -> Hardware:
    """Return a description of this machine: one node with its CUDA devices, or with its CPU as the one device.

    The peak is that of large matrix products, which training doesn't quite reach. A disk's endurance isn't known, and
    neither is a link to other machines: the link in the node stands for it. On a CPU, device and host are one memory,
    of which each is given half.

    Args:
        stores: directories on the disks to measure, whose rates add up. A disk's rates are from the profile that
            `zinf-fx bench-io` stored, if there is one. The first disk tells how compute and a disk slow each other.

    Raises: StoreError.
    """
    gpus = cuda.devices()
    ranks = len(gpus) or 1
    nvme = _disks(stores, unified=not gpus)
    device = gpus[0] if gpus else CPU
    host = _memory(CPU, memory_limit().nbytes // (1 if gpus else 2))
    upload, download = (link(CPU, device), link(device, CPU)) if gpus else (_in_memory(host),) * 2
    in_node = link(device, gpus[1]) if ranks > 1 else upload
    return Hardware(
        name=cuda.name(device) if gpus else "this machine's CPU",
        nodes=1,
        ranks_per_node=ranks,
        achievable=1.0,
        peak={dtype: peak_of(device, getattr(torch, dtype)) for dtype in DTYPES},
        device=_memory(device, cuda.total_memory(device)) if gpus else host,
        host=host,
        nvme=nvme,
        upload=upload,
        download=download,
        in_node=in_node,
        between_nodes=in_node,
        updates=update_rates(update_threads(None, torch.get_num_threads(), beside_gpu=bool(gpus))),
        launch=launch_seconds(device) if gpus else 0.0,
        unified=not gpus,
    )


def ranks_per_node(device: torch.device) -> int:
    """Return how many ranks share this machine's memory and disks: as torchrun says, or else one per device like this
    one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (len(cuda.devices()) if device.type == "cuda" else 1)


def peak_of(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP per second of a square matrix product. On a CPU it is small: some dtypes are a thousand times
    slower."""
    n = 8192 if device.type == "cuda" else 512
    left, right = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * n**3 / _mean(lambda: torch.mm(left, right, out=result), device)


def launch_seconds(device: torch.device) -> float:
    """Measure the seconds that the program takes to launch a kernel. The kernels compute next to nothing: the device is
    done with one before the next comes."""
    value = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            value.add_(1.0)

    return _mean(launch, device) / _LAUNCHES


def update_rates(threads: int) -> dict[UpdateForm, float]:
    """Measure how many parameters in bf16 per second AdamW updates in host memory with so many threads, as it does the
    optimizer's chunks, by the form of their states."""
    return {form: update_rate(form, threads) for form in get_args(UpdateForm)}


def update_rate(form: UpdateForm, threads: int) -> float:
    """Measure how many parameters per second are updated whose states have one form."""
    operands = adam_operands(_UPDATED, torch.bfloat16, form)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], fused=True)
    inner = borrow(optimizer, torch.optim.AdamW, optimizer.param_groups[0], [])
    # For the gradient, the master and two moments, where there is no native kernel.
    scratch = torch.empty(4, _UPDATED, dtype=torch.float32, device="cpu")
    return _UPDATED / _mean(lambda: update_elements(inner, [operands], scratch, threads=threads), CPU)


def adam_operands(count: int, dtype: torch.dtype, form: UpdateForm) -> Operands:
    """Make so many elements of a parameter in host memory, with a gradient, and what AdamW has of it after a step.

    Args:
        dtype: the dtype of the parameter and the gradient.
        form: the form of the moments and of the master, if the parameter has one.
    """
    zeros = partial(torch.zeros, device="cpu")
    moments = form.removeprefix("split, ")
    master: dict[str, torch.Tensor] = {}
    if moments != form:
        master = {MASTER: zeros(count, dtype=LOWER), MASTER_UP: zeros(UPS.shape((count,)), dtype=UPS.dtype)}
    elif has_master(dtype.itemsize):
        master = {MASTER: zeros(count, dtype=torch.float32)}
    moment_dtype = CODES if moments == "8bit" else getattr(torch, moments)
    states = {name: zeros(count, dtype=moment_dtype) for name in _MOMENTS}
    if moment_dtype == CODES:
        states |= {companion_of(name): zeros(SCALES.shape((count,)), dtype=SCALES.dtype) for name in _MOMENTS}
    gradient = torch.ones(count, dtype=dtype, device="cpu")  # memory that nothing was written to is one page
    step = {"step": zeros((), dtype=torch.float32)}
    return Operands(zeros(count, dtype=dtype), gradient, master, states, _MOMENTS, step)


def _memory(device: torch.device, capacity: int) -> Memory:
    rate = memory_rate(device)
    return Memory(capacity, rate, rate)


def memory_rate(device: torch.device) -> float:
    """Measure the bytes per second of a device's memory. A copy within it reads and writes each byte: the sum is what
    reads or writes alone reach."""
    source, target = (torch.ones(_COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * _COPIED / _mean(lambda: target.copy_(source), device)


def link(source: torch.device, target: torch.device) -> Link:
    """Measure the link from one memory to another, of which at least one is a CUDA device's. Host memory is pinned."""
    seconds = []
    for nbytes in (_COPIED, _SMALL):
        origin, goal = (
            torch.ones(nbytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
            for device in (source, target)
        )
        work = partial(goal.copy_, origin, non_blocking=True)
        seconds.append(_mean(work, source if target.type == "cpu" else target))
    return Link(_COPIED / seconds[0], seconds[1])


def _in_memory(memory: Memory) -> Link:
    """Measure the link within one memory, where what is uploaded stays where it is."""
    source, target = (torch.ones(_SMALL, dtype=torch.uint8, device="cpu") for _ in range(2))
    return Link(memory.read, _mean(lambda: target.copy_(source), CPU))


def _disks(stores: Sequence[Path | str], unified: bool) -> Disks:
    free = [file_system_of(store).free for store in one_per_device(stores)]
    read, write = disk_rates(stores, min(_DISK_BYTES, min(free) // 2))
    disks = Disks(sum(free), read, write, None)
    if min(free) < 2 * QUICK_BYTES:  # a full disk, whose rates are stored, has no room for these measurements
        return disks
    of_blocks = beside_computing(stores[0]) if unified else {"alone": share_alone(stores[0])}
    return replace(disks, depth=DEPTH, block=BLOCK, **of_blocks)


def disk_rates(stores: Iterable[Path | str], nbytes: int) -> tuple[float, float]:
    """Return the bytes per second that all devices with these directories read and write together: the rates that
    `zinf-fx bench-io` stored for a device, or those of `nbytes` moved there now.

    Raises: StoreError.
    """
    rates = [_rates_of(store, nbytes) for store in one_per_device(stores)]
    return sum(read for read, _ in rates), sum(write for _, write in rates)


def _rates_of(store: Path, nbytes: int) -> tuple[float, float]:
    if (profile := load_profile(store)) is not None:
        return profile.read, profile.write
    with Trial(store, nbytes=nbytes, checksum=True) as trial:
        read, write = (
            _TIMES * trial.nbytes / sum(trial.run(kind).seconds for _ in range(_TIMES)) for kind in ("read", "write")
        )
    return read, write


def beside_computing(store: Path | str) -> dict[str, float]:
    """Measure what compute on a CPU and the engine cost each other: `read_load`, `write_load`, `start`, `beside` and
    `alone` of a description's disk. Measurements of each by itself and of both alternate.

    Raises: StoreError.
    """
    weights = [torch.ones(_WIDTH, 4 * _WIDTH, dtype=torch.float32, device=CPU) for _ in range(_WEIGHTS)]
    rows = torch.ones(_ROWS, _WIDTH, dtype=torch.float32, device=CPU)
    parts = cycle(weights[0].split(_WIDTH // 4, dim=1))

    def compute() -> None:
        for weight in weights:
            torch.mm(rows, weight)

    def compute_some() -> None:
        torch.mm(rows, weights[0])

    def compute_little() -> None:
        torch.mm(rows[: _ROWS // 4], next(parts))

    with Trial(store, nbytes=QUICK_BYTES, checksum=True) as trial, ThreadPoolExecutor(1) as executor:
        read_load, reads = _cost_each_other(compute, partial(trial.run, "read"), executor)
        write_load, writes = _cost_each_other(compute, partial(trial.run, "write"), executor)
        alone = _share_alone(trial, compute_some, compute_little)
        start = trial.start_seconds(compute, _STARTS)
    beside = (reads + writes) / 2
    return {"read_load": read_load, "write_load": write_load, "start": start, "beside": beside, "alone": alone}


def _cost_each_other(
    compute: Callable[[], object], move: Callable[[], object], executor: Executor
) -> tuple[float, float]:
    """Measure the share of its speed that compute loses beside transfers, and the share that these keep beside it."""
    computing, computing_beside, moving, moving_beside = [], [], [], []
    for _ in range(_TIMES):
        computing.append(_mean(compute, CPU))
        moving.append(_mean(move, CPU))
        with _again_and_again(move, executor):
            computing_beside.append(_mean(compute, CPU))
        with _again_and_again(compute, executor):
            moving_beside.append(_mean(move, CPU))
    lost = 1 - median(computing) / median(computing_beside)
    return max(0.0, lost), min(median(moving) / median(moving_beside), 1.0)


def share_alone(store: Path | str) -> float:
    """Measure the speed of reading one block at a time, as a share of that of many blocks together. Raises:
    StoreError."""
    with Trial(store, nbytes=QUICK_BYTES, checksum=True) as trial:
        return _share_alone(trial)


def _share_alone(
    trial: Trial, before: Callable[[], object] | None = None, meanwhile: Callable[[], object] | None = None
) -> float:
    """Measure `share_alone`, while the thread that starts the reads calls `before` and `meanwhile`."""
    alone, many = [], []
    for _ in range(_TIMES):
        alone.append(trial.block_seconds(1, _STARTS, before, meanwhile))
        many.append(trial.block_seconds(2 * DEPTH, _BURSTS, before, meanwhile))
    return min(median(many) / median(alone), 1.0)


@contextmanager
def _again_and_again(work: Callable[[], object], executor: Executor) -> Iterator[None]:
    """Repeat work in the executor's thread until the block ends."""
    stop = Event()

    def working() -> None:
        while not stop.is_set():
            work()

    worked = executor.submit(working)
    try:
        yield
    finally:
        stop.set()
        worked.result()


def _mean(work: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds that work takes: what interrupts it here now and then does so in a training, too."""
    work()
    cuda.synchronize(device)
    started, times = time.perf_counter(), 0
    while times < _TIMES or time.perf_counter() - started < _SECONDS:
        work()
        cuda.synchronize(device)
        times += 1
    return (time.perf_counter() - started) / times
