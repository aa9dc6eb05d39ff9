"""Operations on files that end the process, fail, or are forgotten by a disk that loses power."""

from __future__ import annotations

import os
import signal
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
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def seen(*arguments: Any) -> Any:
            self.before(name, arguments)
            return found(*arguments)

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


class LosingPower(_Seen):
    """A disk that has for certain what was synced, and perhaps, in any order, what was done since.

    After each operation, `images` has what a directory could have if power failed then: the content of each name.
    `ignores`: an operation that does nothing on this disk.
    """

    def __init__(self, directory: Path, ignores: str = "") -> None:
        self._directory, self._ignores = directory, ignores
        files = {path.name: path for path in directory.iterdir()} if directory.exists() else {}
        self._durable_names = {name: self._inode(path) for name, path in files.items()}
        self._durable_content = {self._inode(path): path.read_bytes() for path in files.values()}
        self._pending: list[tuple[str, str | None, int]] = []  # the name that comes, that goes, and of which file
        self.images: list[dict[str, bytes]] = []

    def before(self, operation: str, arguments: tuple) -> None:
        self.remember()
        if operation == self._ignores:
            return
        if operation in ("sync", "sync_data"):
            path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
            if path == self._directory:
                self._durable_names = self._names(self._pending)
                self._pending = []
            else:
                self._durable_content[self._inode(path)] = path.read_bytes()
        elif operation == "rename":
            old, new = arguments
            self._pending.append((new.name, old.name, self._inode(old)))
        elif operation == "remove" and arguments[0].exists():
            self._pending.append(("", arguments[0].name, self._inode(arguments[0])))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._pending.append((path.name, None, self._inode(path)))
        return fd

    def remember(self) -> None:
        """Note what a directory could have now."""
        present = {self._inode(path): path.read_bytes() for path in self._directory.iterdir()}
        contents = [{}, present, *({inode: content} for inode, content in present.items())]
        for kept, written in product(self._subsets(), contents):
            names = self._names(kept)
            content = {**self._durable_content, **written}
            image = {name: content.get(inode, b"") for name, inode in names.items()}
            if image not in self.images:
                self.images.append(image)

    def _subsets(self) -> Iterator[list[tuple[str, str | None, int]]]:
        """None of the operations on names that are not synced, all, all but one, and one alone."""
        every = self._pending
        yield []
        yield every
        for number, one in enumerate(every):
            yield [one]
            yield every[:number] + every[number + 1 :]

    def _names(self, done: list[tuple[str, str | None, int]]) -> dict[str, int]:
        names = dict(self._durable_names)
        for comes, goes, inode in done:
            if goes is not None:
                names.pop(goes, None)
            if comes:
                names[comes] = inode
        return names

    @staticmethod
    def _inode(path: Path) -> int:
        return path.stat().st_ino
