"""How fast a machine computes and moves bytes: what a plan weighs its choices with."""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.placement import Tier
from zinf_fx.plan.hardware import DTYPES, Disks, Hardware, Link, Memory


@dataclass(frozen=True)
class Rates:
    """What one rank does per second.

    Attributes:
        flops: floating point operations per second of matrix products.
        memory: bytes per second that elementwise operations read or write in the device's memory.
        read, write: bytes per second between the device and the tier that activations go to, there and back.
        disk_read, disk_write: bytes per second from the disk to host memory, and back.
        unified: as of `Hardware`: moving takes the time of who computes, as copies between buffers do on a CPU.
    """

    flops: float
    memory: float
    read: float
    write: float
    disk_read: float
    disk_write: float
    unified: bool

    @classmethod
    def of(cls, hardware: Hardware, dtype: str, tier: Tier) -> Rates:
        """The rates of a described machine's rank, with a model's dtype and the tier that activations go to."""
        read, write = hardware.upload.bandwidth, hardware.download.bandwidth
        disk_read, disk_write = (rate / hardware.ranks_per_node for rate in (hardware.nvme.read, hardware.nvme.write))
        if tier == "nvme":
            read, write = min(read, disk_read), min(write, disk_write)
        return cls(hardware.achieved(dtype), hardware.device.read, read, write, disk_read, disk_write, hardware.unified)


_MEMORY, _LINK = Memory(0, 1e10, 1e10), Link(1e10, 1e-6)
_PEAK, _DISKS = dict.fromkeys(DTYPES, 5e10), Disks(0, 2e9, 1e9, None)

NOMINAL_MACHINE = Hardware("", 1, 1, 1.0, _PEAK, _MEMORY, _MEMORY, _DISKS, _LINK, _LINK, _LINK, _LINK, unified=True)
"""A small machine that computes on its CPU, with one NVMe drive: for plans that are made without the machine at
hand."""

NOMINAL = Rates.of(NOMINAL_MACHINE, DTYPES[0], "nvme")
