"""What plans weigh their choices with, measured once per process and directory, in about a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from zinf_fx.config import Tier
from zinf_fx.machine.machine import CPU, disk_rates, link, memory_rate, peak_of
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.runtime.disk.measure import QUICK_BYTES


def measured(device: torch.device, dtype: torch.dtype, tier: Tier, stores: tuple[Path, ...]) -> Rates:
    """The rates of a device that computes in `dtype`, of the way from it to `tier`, and of the disk that `stores` are
    on: those that `zinf-fx bench-io` stored, or else from a short measurement; nominal ones without `stores`.

    Raises: StoreError.
    """
    flops, memory, to_host = _computing(device, dtype)
    disk = [sum(rates) for rates in zip(*map(_disk, stores), strict=True)] or [NOMINAL.disk_read, NOMINAL.disk_write]
    way = [min(rate, to_host) for rate in disk] if tier == "nvme" else [to_host, to_host]
    return Rates(flops, memory, *way, *disk, unified=device.type == "cpu")


@cache
def _computing(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Operations per second, bytes per second in the device's memory, and between it and host memory."""
    memory = memory_rate(device)
    to_host = memory / 2 if device.type == "cpu" else link(device, CPU).bandwidth
    return peak_of(device, dtype), memory, to_host


@cache
def _disk(directory: Path) -> tuple[float, float]:
    return disk_rates(directory, QUICK_BYTES)
