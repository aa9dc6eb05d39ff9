"""The control groups of this process, as containers and job schedulers make them: where their limits are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yield the groups of this process that may limit what `controller` counts, and the groups around them: the version
    of control groups, 1 or 2, and the group's folder, which need not exist.

    In a container, Linux may name the group as the host does: then the folder of the root is the container's.
    """
    groups, mount = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from ((2, folder) for folder in _around(mount, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _around(mount / controller, path))


def _around(mount: Path, path: str) -> Iterator[Path]:
    group = mount / path.lstrip("/")
    return (folder for folder in (group, *group.parents) if folder.is_relative_to(mount))
