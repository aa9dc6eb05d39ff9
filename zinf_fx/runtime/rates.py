"""Measures what plans weigh their choices with, in a fraction of a second, once per process and directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median

import torch

from zinf_fx.config import Tier
from zinf_fx.plan.rates import Rates
from zinf_fx.runtime.measure import QUICK_BYTES, Trial, load_profile

_MATRIX = 768
_COPIED = 32 << 20
_REPETITIONS = 5


def measured(device: torch.device, dtype: torch.dtype, tier: Tier, stores: tuple[Path, ...]) -> Rates:
    """The rates of a device that computes in `dtype`, and of the way from it to `tier`.

    The disk's are those that `zinf-fx bench-io` stored, or else from a short measurement. Raises: StoreError.
    """
    flops, memory, link = _computing(device, dtype)
    on_cpu = device.type == "cpu"
    if tier != "nvme":
        return Rates(flops, memory, link, link, copies=on_cpu)
    disks = [_disk(directory) for directory in stores]
    read, write = (sum(rates) for rates in zip(*disks, strict=True))
    return Rates(flops, memory, min(read, link), min(write, link), copies=on_cpu)


@cache
def _computing(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Operations per second, bytes per second in the device's memory, and between it and host memory."""
    matrix = torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device)
    values = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(values)
    flops = 2 * _MATRIX**3 / _seconds(device, lambda: matrix @ matrix)
    memory = 2 * _COPIED / _seconds(device, lambda: target.copy_(values))
    if device.type == "cpu":
        return flops, memory, memory / 2
    host = torch.empty(_COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
    return flops, memory, _COPIED / _seconds(device, lambda: host.copy_(values, non_blocking=True))


@cache
def _disk(directory: Path) -> tuple[float, float]:
    if (profile := load_profile(directory)) is not None:
        return profile.read, profile.write
    with Trial(directory, nbytes=QUICK_BYTES) as trial:
        return trial.run("read").bytes_per_second, trial.run("write").bytes_per_second


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    with torch.no_grad():
        for _ in range(_REPETITIONS):
            _synchronize(device)
            started = time.perf_counter()
            work()
            _synchronize(device)
            times.append(time.perf_counter() - started)
    return median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
