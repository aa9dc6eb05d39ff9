"""The memory of this process that is resident, in bytes, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most resident bytes since this program started, or since 5 was written to ``/proc/self/clear_refs``
    (``VmHWM``: unlike rusage's figure, it leaves out the parent's memory)."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.removesuffix("kB")) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
