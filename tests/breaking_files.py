"""Operations on files that end the process, fail, or are forgotten by a disk that loses power."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from zinf_fx.checkpoint.files import Files

OPERATIONS = [name for name, value in vars(Files).items() if callable(value)]


class _Seen(Files, ABC):
    """Calls `before` with the name of each operation, and what it gets, before it is done."""

    @abstractmethod
    def before(self, operation: str, arguments: tuple) -> None:
        """The operation is about to be done."""

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name not in OPERATIONS:
            return attribute

        def seen(*arguments: Any) -> Any:
            self.before(name, arguments)
            return attribute(*arguments)

        return seen


class Failing(_Seen):
    """Raises an error in the place of the operation with a number, counted from 1; `names` those that are counted."""

    def __init__(self, number: int, error: BaseException, names: tuple[str, ...] = tuple(OPERATIONS)) -> None:
        self.left, self.error, self.names = number, error, names
        self.failed = False

    def before(self, operation: str, arguments: tuple) -> None:
        self.left -= operation in self.names
        if not self.left and not self.failed:
            self.failed = True
            raise self.error


class Killed(_Seen):
    """Kills the process before the operation with a number, counted from 1."""

    def __init__(self, number: int) -> None:
        self.left = number

    def before(self, operation: str, arguments: tuple) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


class Timed(_Seen):
    """Notes when each operation was begun, by the clock that all processes of the machine have, and with what names."""

    def __init__(self) -> None:
        self.begun: list[tuple[float, str, list[str]]] = []

    def before(self, operation: str, arguments: tuple) -> None:
        names = [argument.name for argument in arguments if isinstance(argument, Path)]
        if operation in ("sync", "sync_data"):
            names = [Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).name]
        self.begun.append((time.monotonic(), operation, names))


Image = dict[str, bytes | None]
"""What is in a directory, by the paths there: the content of a file; of a directory, None."""


class LosingPower(_Seen):
    """A disk that has for certain what was synced, and perhaps, in any order, what was done since.

    After each operation, `images` has what a directory could have if power failed then. `ignores`: an operation that
    does nothing on this disk.
    """

    def __init__(self, root: Path, ignores: str = "") -> None:
        self._root, self._ignores = root, ignores
        self._durable_names = {str(path.relative_to(root)): self._inode(path) for path in self._paths()}
        self._durable_content = self._present()
        self._pending: list[tuple[Path | None, Path | None, int]] = []  # the path that comes, that goes, of which inode
        self.images: list[Image] = []

    def before(self, operation: str, arguments: tuple) -> None:
        self.remember()
        if operation == self._ignores:
            return
        if operation in ("sync", "sync_data"):
            path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            if path.is_dir():
                durable = [entry for entry in self._pending if (entry[0] or entry[1]).parent == path]
                self._durable_names = self._names(durable)
                self._pending = [entry for entry in self._pending if entry not in durable]
            else:
                self._durable_content[self._inode(path)] = path.read_bytes()
        elif operation == "rename":
            old, new = arguments
            self._pending.append((new, old, self._inode(old)))
        elif operation == "remove" and arguments[0].exists():
            self._pending.append((None, arguments[0], self._inode(arguments[0])))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._pending.append((path, None, self._inode(path)))
        return fd

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._pending.append((new, None, self._inode(new)))

    def make_directory(self, path: Path) -> None:
        is_new = not path.exists()
        super().make_directory(path)
        if is_new:
            self._pending.append((path, None, self._inode(path)))
            self._durable_content[self._inode(path)] = None

    def remember(self) -> None:
        """Note what there could be now."""
        self.images += (image for image in self.after() if image not in self.images)

    def after(self) -> list[Image]:
        """Return what there could be if power failed now."""
        images: list[Image] = []
        present = self._present()
        contents = [{}, present, *({inode: content} for inode, content in present.items())]
        for kept, written in product(self._subsets(), contents):
            names = self._names(kept)
            content = {**self._durable_content, **written}
            image = {name: content.get(inode, b"") for name, inode in names.items() if self._is_within(name, names)}
            if image not in images:
                images.append(image)
        return images

    def _subsets(self) -> Iterator[list[tuple[Path | None, Path | None, int]]]:
        """None of the operations on names that are not synced, all, all but one, and one alone."""
        every = self._pending
        yield []
        yield every
        for number, entry in enumerate(every):
            yield [entry]
            yield every[:number] + every[number + 1 :]

    def _names(self, done: list[tuple[Path | None, Path | None, int]]) -> dict[str, int]:
        names = dict(self._durable_names)
        for comes, goes, inode in done:
            if goes is not None:
                names.pop(str(goes.relative_to(self._root)), None)
            if comes is not None:
                names[str(comes.relative_to(self._root))] = inode
        return names

    @staticmethod
    def _is_within(name: str, names: dict[str, int]) -> bool:
        """Return whether the directories that a path leads through are there."""
        return all(str(above) in names for above in Path(name).parents[:-1])

    def _paths(self) -> list[Path]:
        return list(self._root.rglob("*"))

    def _present(self) -> dict[int, bytes | None]:
        return {self._inode(path): None if path.is_dir() else path.read_bytes() for path in self._paths()}

    @staticmethod
    def _inode(path: Path) -> int:
        return path.stat().st_ino


def put(image: Image, target: Path) -> Path:
    """Make a directory what it is in an image."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for name, content in sorted(image.items()):
        if content is None:
            (target / name).mkdir()
        else:
            (target / name).write_bytes(content)
    return target


class WithoutLinks(Files):
    """Files of a directory that is taken for one on another file system than what is linked there."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
