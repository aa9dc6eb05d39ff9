"""The same measurements by fio, the tool that storage is commonly measured with, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.errors import StoreError
from zinf_fx.runtime.disk.measure import Operation, Rate
from zinf_fx.sizes import HUGE_PAGE

MODES = {"read": "read", "write": "write", "mixed": "rw"}
HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


@dataclass(frozen=True)
class Shape:
    """How fio moves the bytes: its ioengine, bytes per transfer, transfers under way, and whether its memory is in huge
    pages (which the system must have reserved: `sysctl vm.nr_hugepages`)."""

    engine: str
    block: int
    depth: int
    huge_pages: bool = False

    def __str__(self) -> str:
        pages = ", huge pages" if self.huge_pages else ""
        return f"fio {self.engine}, {self.block >> 10} KiB x {self.depth}{pages}"

    @property
    def possible(self) -> bool:
        """Whether enough huge pages are free, if any are needed."""
        return not self.huge_pages or free_huge_pages() >= self.huge_pages_needed

    @property
    def huge_pages_needed(self) -> int:
        """Of 2 MiB each; one more for fio's own alignment."""
        return self.block * self.depth // HUGE_PAGE + 1


def installed() -> bool:
    """Whether there is a fio to run."""
    return shutil.which("fio") is not None


def free_huge_pages() -> int:
    """Reserved huge pages of 2 MiB that nobody uses."""
    try:
        return int(HUGE_PAGES.read_text())
    except (OSError, ValueError):
        return 0


def run(path: Path, operation: Operation, shape: Shape, nbytes: int) -> Rate:
    """fio's rate on a file that exists and has been written, with O_DIRECT, in sequence.

    It overwrites the file's content unless it only reads.

    Raises:
        StoreError: fio failed; with what it said.
    """
    command = [
        "fio",
        "--name=zinf",
        f"--filename={path}",
        f"--rw={MODES[operation]}",
        f"--ioengine={shape.engine}",
        f"--bs={shape.block}",
        f"--iodepth={shape.depth}",
        f"--size={nbytes}",
        f"--io_size={nbytes}",
        f"--iomem={'mmaphuge' if shape.huge_pages else 'mmap'}",
        "--direct=1",
        "--overwrite=1",
        "--allow_file_create=0",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
        raise StoreError("measure", path, f"{shape} said: {said[0]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
    if not moved or not seconds:
        raise StoreError("measure", path, f"{shape} moved {moved} bytes in {seconds} s: measure more bytes")
    return Rate(operation, moved, seconds)
