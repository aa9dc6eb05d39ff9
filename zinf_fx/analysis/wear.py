"""How fast training wears the disks: flash is sold with the bytes that may be written to it (TBW)."""

from __future__ import annotations

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.traffic import Traffic

SECONDS_PER_DAY = 86_400


def written_per_day(moved: Traffic) -> sympy.Expr:
    """Bytes that one device writes to NVMe in a day of steps."""
    return moved.disk_written / s.step_seconds * SECONDS_PER_DAY


def days_to_endurance(moved: Traffic) -> sympy.Expr:
    """Days until one device's share of the endurance is written; infinite where nothing is."""
    return s.endurance / written_per_day(moved) if moved.disk_written != 0 else sympy.oo
