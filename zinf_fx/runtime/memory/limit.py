"""The memory that this process may take: what its control groups allow, or what the machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """So many bytes, and what sets them.

    Attributes:
        by_group: that is a control group, as containers and job schedulers make them: who takes more is killed.
    """

    nbytes: int
    source: str
    by_group: bool = True


def memory_limit(groups: Path = GROUPS, mount: Path = MOUNT) -> MemoryLimit:
    """The least of the machine's memory and the limits of this process's control groups, of version 1 and 2.

    `groups`: what Linux says of a process's groups, a line `number:controllers:path` for each hierarchy.
    """
    machine = MemoryLimit(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory", by_group=False
    )
    found = [machine]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found += _limits(mount / "memory", path, "memory.limit_in_bytes")
        elif not controllers:
            found += _limits(mount, path, "memory.max")
    return min(found, key=lambda limit: limit.nbytes)


def _limits(root: Path, path: str, name: str) -> list[MemoryLimit]:
    """Those of a group and the groups around it. In a container `path` may be that on the host: then the root's."""
    group = root / path.lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    texts = [(file, file.read_text().strip()) for file in files if file.exists()]
    return [MemoryLimit(int(text), str(file)) for file, text in texts if text != "max"]
