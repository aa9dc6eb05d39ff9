"""What the memories of one job count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What moved, in bytes, and what was waited for, in seconds, since the job began; and how many buffers lay where
    their plans said, and how many did not."""

    gathered_bytes: int = 0
    stall_seconds: float = 0.0
    write_stall_seconds: float = 0.0
    placed: int = 0
    displaced: int = 0
