"""The data files of a store: those that it makes, and those of another store that a checkpoint has."""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable
from pathlib import Path

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import Engine, File
from zinf_fx.regular_files import open_regular
from zinf_fx.runtime.disk.links import Links, give_back, is_alone
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
from zinf_fx.runtime.disk.probe import reopen
from zinf_fx.runtime.disk.scratch import Scratch, refusals
from zinf_fx.sizes import PAGE


class DataFile(abc.ABC):
    """A data file at `path`, in a scratch directory.

    Attributes:
        file: for transfers, once it is open.
        size: of the file in bytes.
        in_use: bytes of it that are extents.
        links: other names of the file, whose bytes stay when the store is gone.
    """

    in_use: int

    def __init__(self, scratch: Scratch, name: str) -> None:
        self.path = scratch.path / name
        self._file: File | None = None
        self.size = 0
        self.links = Links(self.path)
        self._scratch = scratch
        self._descriptors: list[int] = []

    def _open(self, plain: int, engine: Engine) -> None:
        """Let an engine work on the file, of which `plain` is a descriptor without direct I/O. Takes that over."""
        self._descriptors.append(plain)
        direct = reopen(plain, engine.provider)
        self._descriptors.append(direct)
        self._file = engine.attach(direct, self.path, alignment=PAGE)

    @property
    def file(self) -> File:
        assert self._file is not None
        return self._file

    @property
    def descriptor(self) -> int:
        """A descriptor of the file, without direct I/O."""
        return self._descriptors[0]

    def is_same(self, info: os.stat_result) -> bool:
        """Whether this is the file of which the system says that, and open."""
        return bool(self._descriptors) and os.path.samestat(os.fstat(self.descriptor), info)

    @property
    def has_name(self) -> bool:
        """Whether the file, which is open, still is in its scratch directory: somebody may have removed that."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def gone_links(self) -> set[Path]:
        """Return the `links` that the file doesn't have any more."""
        return self.links.gone(self.descriptor)

    @abc.abstractmethod
    def give(self, offset: int, nbytes: int) -> None:
        """No extent has these bytes any more. Safe in a finalizer."""

    def detach(self) -> None:
        """Waits for what is under way. A forked child leaves it alone."""
        if self._file is not None:
            self._file.detach()

    def remove(self) -> None:
        """Closes the file, which is detached from the engine, and gives back what no other name is there for. In a
        forked child, only closes it."""
        if self._descriptors and self._scratch.is_ours:
            self._give_back_others()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _give_back_others(self) -> None:
        self.links.give_back_others(self.descriptor)


class AdoptedFile(DataFile):
    """A data file of another store, which this one goes on with.

    [Note: adopted files]
    A job that takes up a training could read what the checkpoint has, and write it to a data file of its own. Where the
    checkpoint has it in a data file of the store before, on the same device, that file gets one more name instead, in
    this job's scratch directory, and what the checkpoint has becomes extents of this store. They are kept for the
    checkpoint, as if this job had saved it: see [Note: generations]. So nothing is written, and the disk has it once.

    A file has one store at a time. The one that made it counts on its pages when the checkpoint is gone, and so does
    one that took it up; a further name would keep them, and its next step would have no room.

    Of the rest of the file nothing is known: others may have it, such as an earlier checkpoint. So nothing is allocated
    there. What no extent has any more, when the checkpoint is gone, goes back to the file
    system.

    Args:
        name: in the scratch directory.
        link: its name in the checkpoint; `content`: the bytes that this one has there.

    Raises: StoreError where the file doesn't prove to be a store's (see [Note: proofs]), where another store has it, or
    somebody reads it in place, and where it can't have one more name, or be opened; nothing is left behind.
    """

    def __init__(self, scratch: Scratch, name: str, engine: Engine, link: Path, content: Iterable[range]) -> None:
        super().__init__(scratch, name)
        self.in_use = 0
        self._had_extents = False
        with refusals("adopt", link, "it can't be opened"):
            self._check_proven(open_regular(link, os.O_RDONLY | os.O_NOFOLLOW), link)
        scratch.link(link, name)
        try:
            plain = scratch.open(name)
            self._open(plain, engine)
            self._check_proven(os.dup(plain), link)
            if not is_alone(self.descriptor):
                raise StoreError("adopt", link, "another job has the file, and counts on its pages")
        except BaseException:
            self.remove()
            raise
        self.size = os.fstat(self.descriptor).st_size
        self.links.add(link, self.descriptor, content)

    @staticmethod
    def _check_proven(fd: int, link: Path) -> None:
        """`fd`: of the file, which is closed."""
        try:
            if not (is_proven(fd) or is_alike(fd)):
                raise StoreError("adopt", link, "it doesn't prove to be a store's data file")
        finally:
            os.close(fd)

    def take_over(self, nbytes: int) -> None:
        """So many bytes are extents from now on: they have the checksums that the checkpoint says."""
        self.in_use += nbytes
        self._had_extents = True

    def give(self, offset: int, nbytes: int) -> None:
        """Give bytes back to the file system: `CopyOnWrite` has kept them until the checkpoint was gone."""
        self.in_use -= nbytes
        if self._descriptors:
            give_back(self.descriptor, [range(offset, offset + nbytes)])

    def remove(self) -> None:
        """Remove the file, and its name in the scratch directory."""
        super().remove()
        if self._scratch.is_ours:
            self._scratch.unlink(self.path.name)

    def _give_back_others(self) -> None:
        if self._had_extents and self.links.are_all(self.descriptor):
            super()._give_back_others()
