"""What plans weigh their choices with, measured once per process and directory, in about a second."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from zinf_fx.config import Tier
from zinf_fx.machine.machine import CPU, disk_rates, link, memory_rate, peak_of, ranks_per_node
from zinf_fx.plan.rates import NOMINAL, Rates
from zinf_fx.runtime.disk.measure import QUICK_BYTES


def measured(device: torch.device, dtype: torch.dtype, tier: Tier, stores: tuple[Path, ...], ranks: int) -> Rates:
    """The rates of a device that computes in `dtype`, of the way from it to `tier`, and of the disks that `stores` are
    on: those that `zinf-fx bench-io` stored, or else from a short measurement; nominal ones without `stores`. Of so
    many `ranks`, those of this machine share its disks.

    Raises: StoreError.
    """
    flops, memory, to_host = _computing(device, dtype)
    disk = [NOMINAL.disk_read, NOMINAL.disk_write]
    if stores:
        disk = [rate / min(ranks, ranks_per_node(device)) for rate in _disks(stores)]
    way = [min(rate, to_host) for rate in disk] if tier == "nvme" else [to_host, to_host]
    return Rates(flops, memory, *way, *disk, unified=device.type == "cpu")


@cache
def _computing(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Operations per second, bytes per second in the device's memory, and between it and host memory."""
    memory = memory_rate(device)
    to_host = memory / 2 if device.type == "cpu" else link(device, CPU).bandwidth
    return peak_of(device, dtype), memory, to_host


@cache
def _disks(stores: tuple[Path, ...]) -> tuple[float, float]:
    return disk_rates(stores, QUICK_BYTES)
