"""The memory that this process may take: what its control groups and its own limits allow, or what the machine has."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.sizes import in_words

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
# Of all that a process maps, used or not: how a shell sets the limit, and what counts towards it.
_OF_MAPPINGS = {resource.RLIMIT_AS: ("ulimit -v", "VmSize"), resource.RLIMIT_DATA: ("ulimit -d", "VmData")}


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
    """The least of the machine's memory, the limits of this process's control groups, of version 1 and 2, and half of
    what is left of its own limits: an arena isn't all that it maps.

    `groups`: what Linux says of a process's groups, a line `number:controllers:path` for each hierarchy.
    """
    machine = MemoryLimit(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory", by_group=False
    )
    found = [machine, *_of_mappings()]
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found += _limits(mount / "memory", path, "memory.limit_in_bytes")
        elif not controllers:
            found += _limits(mount, path, "memory.max")
    return min(found, key=lambda limit: limit.nbytes)


def _of_mappings() -> list[MemoryLimit]:
    found = []
    for kind, (name, counted) in _OF_MAPPINGS.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(counted))
            left = max(0, limit - (int(line.split()[1]) << 10))
            found.append(MemoryLimit(left // 2, f"{name}, of which {in_words(left)} are left", by_group=False))
    return found


def _limits(root: Path, path: str, name: str) -> list[MemoryLimit]:
    """Those of a group and the groups around it. In a container `path` may be that on the host: then the root's."""
    group = root / path.lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    texts = [(file, file.read_text().strip()) for file in files if file.exists()]
    return [MemoryLimit(int(text), str(file)) for file, text in texts if text != "max"]
