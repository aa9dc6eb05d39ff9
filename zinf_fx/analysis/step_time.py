"""Seconds of a step on one device, with nothing overlapped and with all that can be.

ZeRO-Infinity's section 4 looks at one state at a time. Here the times of all states add up, as its equation 2 has them
for one: without overlap, a step takes as long as compute and every transfer, one after the other. With perfect overlap
(section 6.2) forward and backward take as long as the slowest of compute and the links; the optimizer's step follows,
because it can't be overlapped with them (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.traffic import BytesMoved


@dataclass(frozen=True)
class StepTime:
    """Seconds of each part of a step: what computes or moves at a time. Each part serves in order."""

    compute: sympy.Expr
    link: sympy.Expr
    upload: sympy.Expr
    download: sympy.Expr
    disk: sympy.Expr
    optimizer: sympy.Expr

    @property
    def serial(self) -> sympy.Expr:
        """One after the other."""
        return sum(vars(self).values())

    @property
    def overlapped(self) -> sympy.Expr:
        """The slowest part of forward and backward, then the optimizer's step."""
        return sympy.Max(self.compute, self.link, self.upload, self.download, self.disk) + self.optimizer


def step_time(moved: BytesMoved) -> StepTime:
    """The time for what is moved. A disk's reads and writes take turns; the links to host memory go both ways."""
    return StepTime(
        compute=s.work / s.peak,
        link=moved.link / s.link_bandwidth,
        upload=moved.upload / s.upload_bandwidth,
        download=moved.download / s.download_bandwidth,
        disk=moved.read / s.read_bandwidth + moved.written / s.write_bandwidth,
        # States pass through host memory while the disk moves the next ones (ZeRO-Infinity, section 5.2.2).
        optimizer=sympy.Max(
            moved.updated / s.update_bandwidth,
            moved.update_read / s.read_bandwidth + moved.update_written / s.write_bandwidth,
        ),
    )
