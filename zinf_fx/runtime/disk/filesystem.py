"""The file system below a directory: what it is, how much room it has, and whether a store should be there."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from zinf_fx.runtime.disk.scratch import refusals

IN_MEMORY = {"tmpfs", "ramfs"}
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "beegfs", "glusterfs", "afs", "gpfs"}
NETWORK |= {"fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "virtiofs"}

MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class FileSystem:
    """What is mounted where a directory lies.

    Attributes:
        kind: "ext4", "xfs", "tmpfs", ...
        source: the device or share, as mounted.
        key: tells this file system from others of this machine, also after a reboot.
        free, total: bytes; `free` is what this user may take.
    """

    kind: str
    source: str
    key: str
    free: int
    total: int

    @property
    def in_memory(self) -> bool:
        """Whether its bytes take memory instead of a disk."""
        return self.kind in IN_MEMORY

    @property
    def over_network(self) -> bool:
        """Whether another machine has its bytes."""
        return self.kind in NETWORK


def file_system_of(directory: Path | str) -> FileSystem:
    """The file system that holds `directory`. Raises: StoreError when there is no such directory."""
    path = Path(directory)
    with refusals("inspect", path, "can't be inspected"):
        device = os.stat(path).st_dev
        room = os.statvfs(path)
    kind, source = _mount(f"{os.major(device)}:{os.minor(device)}", path.resolve())
    return FileSystem(
        kind=kind,
        source=source,
        key=f"{kind}:{source}:{room.f_fsid & (1 << 64) - 1:x}",
        free=room.f_bavail * room.f_frsize,
        total=room.f_blocks * room.f_frsize,
    )


@cache
def note_memory(directory: Path) -> None:
    """Warn, once, of a store's directory whose bytes take memory. Raises: StoreError when there is none."""
    file_system = file_system_of(directory)
    if file_system.in_memory:
        warnings.warn(
            f"the store {directory} is on {file_system.kind}, whose bytes take host memory: what leaves for it frees "
            'none, and nothing is gained over placement="host". Name a directory on a disk with `store`, or ZINF_STORE'
            "; `zinf-fx doctor` looks at one",
            stacklevel=2,
        )


def one_per_device(directories: Iterable[Path | str]) -> list[Path]:
    """Return the first directory on each device: those on one device share its room and its rate. Raises: StoreError
    when a directory is missing."""
    by_device: dict[int, Path] = {}
    for path in map(Path, directories):
        with refusals("inspect", path, "can't be inspected"):
            by_device.setdefault(os.stat(path).st_dev, path)
    return list(by_device.values())


def _mount(device: str, path: Path) -> tuple[str, str]:
    """Kind and source: of the deepest mount above `path`, of this device number if any has it (btrfs gives
    its subvolumes other numbers than its mounts). "unknown" where /proc doesn't tell."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        lines = []
    above = [(False, 0, "unknown", "unknown")]
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = Path(_unescape(left.split()[4]))
        if path.is_relative_to(mount_point):
            kind, source = right.split()[:2]
            above.append((left.split()[2] == device, len(mount_point.parts), kind, _unescape(source)))
    return max(above, key=lambda mount: mount[:2])[2:]


def _unescape(field: str) -> str:
    """mountinfo writes a space as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def taken_by(info: os.stat_result) -> int:
    """Bytes of the disk that a file takes, holes left out."""
    return 512 * info.st_blocks
