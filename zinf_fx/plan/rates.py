"""How fast a machine computes and moves bytes: what a plan weighs its choices with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Of one rank.

    Attributes:
        flops: floating point operations per second of matrix products.
        memory: bytes per second that elementwise operations read or write in the device's memory.
        read, write: bytes per second between the device and the tier that activations go to, there and back.
        copies: whether moving takes the time of who computes, as copies between buffers do on a CPU.
    """

    flops: float
    memory: float
    read: float
    write: float
    copies: bool


NOMINAL = Rates(flops=5e10, memory=1e10, read=2e9, write=1e9, copies=True)
"""Of a small CPU machine with one NVMe drive: for plans that are made without the machine at hand."""
