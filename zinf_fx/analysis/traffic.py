"""Bytes that one device moves in a step, by link, for each preset.

Every device moves its own partition over its own link (ZeRO-Infinity, section 6.1: bandwidth-centric partitioning), so
what goes to and from host memory and NVMe shrinks with the number of devices; what goes between devices doesn't.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.communication import all_gather, all_reduce, gathers_of_parameters, reduce_scatter
from zinf_fx.analysis.partitioning import PARTITIONED, STATES, per_device
from zinf_fx.config import PRESETS, Tier


@dataclass(frozen=True)
class BytesMoved:
    """Bytes per device and step.

    Attributes:
        link: between devices (gg-transfer).
        upload, download: between host memory and device (cg-transfer).
        read, written: between NVMe and host memory during forward and backward (nc-transfer).
        updated: optimizer states read and written in the memory that they are updated in.
        update_read, update_written: between NVMe and host memory during the optimizer's step.
    """

    link: sympy.Expr
    upload: sympy.Expr
    download: sympy.Expr
    read: sympy.Expr
    written: sympy.Expr
    updated: sympy.Expr
    update_read: sympy.Expr
    update_written: sympy.Expr

    @property
    def disk_read(self) -> sympy.Expr:
        """From NVMe, in the whole step."""
        return self.read + self.update_read

    @property
    def disk_written(self) -> sympy.Expr:
        """To NVMe, in the whole step."""
        return self.written + self.update_written


def bytes_moved(preset: str, *, recompute: bool, checkpoints: Tier = "device") -> BytesMoved:
    """What a step moves.

    Args:
        preset: its placement and partitions.
        recompute: backward computes activations again, for which parameters are loaded once more (section 4.1).
        checkpoints: where activation checkpoints wait for backward: on the device or in host memory (section 5.1.2).
    """
    placement, partitioned = PRESETS[preset], PARTITIONED[preset]
    parameters, gradients, optimizer = (per_device(partitioned, [state]) for state in STATES)
    loads = 3 if recompute else 2
    gathers = gathers_of_parameters(partitioned, recompute)
    reduction = reduce_scatter if gathers else all_reduce
    zero = sympy.Integer(0)
    offloaded = s.checkpoint_bytes if checkpoints == "host" else zero
    # Parameters on the device come from where they are updated: this device's part, once.
    updated_elsewhere = placement.parameters == "device" != placement.optimizer
    refreshed = _trained({"parameters"}) if updated_elsewhere else zero
    on_nvme = {state: getattr(placement, state) == "nvme" for state in STATES}
    return BytesMoved(
        link=gathers * all_gather(s.parameter_bytes * s.parameters) + reduction(s.gradient_bytes * s.parameters),
        upload=(loads * parameters if placement.parameters != "device" else refreshed) + offloaded,
        download=(gradients if placement.gradients != "device" else zero) + offloaded,
        read=loads * parameters if on_nvme["parameters"] else zero,
        written=gradients if on_nvme["gradients"] else zero,
        updated=2 * optimizer,
        update_read=(optimizer if on_nvme["optimizer"] else zero)
        + (gradients if on_nvme["gradients"] else zero)
        + (_updated(s.reread_bytes, partitioned) if on_nvme["parameters"] else zero),
        update_written=(optimizer if on_nvme["optimizer"] else zero)
        + (_trained(partitioned) if on_nvme["parameters"] else zero),
    )


def _trained(partitioned: Collection[str]) -> sympy.Expr:
    """Bytes of the trained parameters that one device updates: their gradients are as large, and frozen ones have
    none."""
    return _updated(s.gradient_bytes, partitioned)


def _updated(bytes_each: sympy.Expr, partitioned: Collection[str]) -> sympy.Expr:
    """So many bytes of each of the parameters that one device updates."""
    return bytes_each * s.parameters / (s.ranks if "parameters" in partitioned else 1)
