"""Checkpoints by generations: what is in the store stays where it is, and the next step is written elsewhere.

[Note: checkpoints by generations]
A step rewrites parameters and states anyway. So the checkpoint's directory gets a hard link to each data file of the
store, and the manifest says where in it the pieces are, with checksums that were made when they were written. What is
written from then on goes to other extents: see [Note: generations] in `runtime.disk.copy_on_write`. Nothing is moved,
and for twice the disk the step before is there, as often as one likes. It ends with the link: whatever removed that,
the next save finds it gone, and its extents are the store's again.

That takes a directory on the file system of the store, and checksums in it. Else, and for what isn't in a store, for
pieces that begin within a page, and for those whose checksum is not known, the bytes are copied.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from zinf_fx.checkpoint.files import Files
from zinf_fx.checkpoint.training.layout import SavedRun
from zinf_fx.checkpoint.training.manifest import SavedFile, SavedPiece
from zinf_fx.errors import CheckpointError, StoreError
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.data_file import DataFile
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.tensor.tiers import Tiers

log = logging.getLogger("zinf_fx")

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}


class KeptInStore:
    """What of a rank's runs stays in its stores for one checkpoint.

    Attributes:
        pieces: those that stay, each with the name of its tensor.
        nbytes: of the elements of these.
        others: runs that have to be copied.
        files: the links, by which pieces are counted.
        why_copied: why what is in a store is copied all the same; None: it isn't.
    """

    def __init__(self, directory: Path, name_link: Callable[[int], str], files: Files) -> None:
        """`name_link`: the name of a link in the directory, by its number."""
        self._directory, self._name_link, self._files = directory.absolute(), name_link, files
        self._generations: list[tuple[Tiers, Generation]] = []
        self.pieces: list[tuple[str, SavedPiece]] = []
        self.nbytes = 0
        self.others: list[SavedRun] = []
        self.files: list[SavedFile] = []
        self.why_copied: str | None = None
        self._tiers: list[Tiers] = []

    def keep(self, runs: Sequence[SavedRun], unwritten: Collection[int], replaced: Collection[Path]) -> None:
        """Keep what is in stores. `unwritten`: keys of the storages that nobody will rewrite; `replaced`: directories
        of checkpoints that will be gone when this one is there.

        Raises: CheckpointError when there is no room for the next step's; OSError, StoreError.
        """
        by_tiers: dict[Tiers, list[SavedRun]] = {}
        for run in runs:
            home = run.holding.home
            if home is None or home.in_store is None:
                self.others.append(run)
            else:
                by_tiers.setdefault(home.tiers, []).append(run)
        for tiers, several in by_tiers.items():
            self._tiers.append(tiers)
            tiers.drain()
            tiers.release_generations()
            why = self._obstacle(tiers) or self._keep_in(tiers, several, unwritten, replaced)
            if why is not None:
                self.why_copied = why
                self.others += several

    def settle(self) -> None:
        """The save is over, well or not: what has no links is released, and what was replaced."""
        for tiers in self._tiers:
            tiers.release_generations()
        for _, generation in self._generations:
            try:
                generation.settle()
            except StoreError as error:
                log.warning("a checkpoint that was to be removed is still there, and the next step may fail: %s", error)

    def _obstacle(self, tiers: Tiers) -> str | None:
        """Why nothing of a store can stay in it for a checkpoint."""
        if not tiers.store.checksum:
            return "the store keeps no checksums"
        device = self._directory.stat().st_dev
        if any(volume.device != device for volume in tiers.store.volumes):
            return "the store is on another file system"
        return next((_without_name(file) for file in tiers.store.files if file.in_use and not file.has_name), None)

    def _keep_in(
        self, tiers: Tiers, runs: Sequence[SavedRun], unwritten: Collection[int], replaced: Collection[Path]
    ) -> str | None:
        """Keep runs of one store. Returns why that is not possible; nothing is kept then."""
        generation, earlier = Generation(tiers.store), [one for one in tiers.generations if one.is_in(replaced)]
        rewritten: dict[CopyOnWrite, bool] = {}
        for run in runs:
            in_store = run.holding.home.in_store
            rewritten[in_store] = rewritten.get(in_store, False) or run.holding.tensor.storage.key not in unwritten
        try:
            generation.freeze(rewritten, earlier)
        except StoreError as error:
            raise CheckpointError(
                f"saving a checkpoint to {self._directory} was refused, because there is no room to write the next "
                f"step to while this one is kept: {error}"
            ) from error
        tiers.generations.append(generation)
        self._generations.append((tiers, generation))
        return self._link(tiers, generation, runs)

    def _link(self, tiers: Tiers, generation: Generation, runs: Sequence[SavedRun]) -> str | None:
        """Give the data files their names in the checkpoint. Returns why that is not possible."""
        kept = _Kept(generation, len(self.files))
        for run in runs:
            kept.look_for(run)
        files = []
        for number, (file, content) in enumerate(kept.content.items(), len(self.files)):
            linked, path = tiers.store.files[file], self._directory / self._name_link(number)
            try:
                generation.link(file, path, content, self._files.link)
            except OSError as error:
                if error.errno not in _NO_LINKS and linked.has_name:
                    raise
                for done in files:
                    self._files.remove(self._directory / done.path)
                self._generations.remove((tiers, generation))
                tiers.release_generations()
                return f"its files can't be linked ({error.strerror})" if linked.has_name else _without_name(linked)
            self._files.sync_data(linked.descriptor)
            files.append(SavedFile(path.name, linked.size, of_store=True))
        self.pieces += kept.pieces
        self.nbytes += kept.nbytes
        self.others += kept.others
        self.files += files
        return None


def _without_name(file: DataFile) -> str:
    """Why what is in a file is copied that somebody has removed. The job has it open, and loses nothing."""
    log.warning(
        "the store's file %s was removed while its job runs, perhaps by a cleaner of temporary files: training goes "
        "on, and checkpoints are copied. Keep cleaners away from %s, or begin the next job in another store",
        file.path,
        file.path.parent.parent,
    )
    return f"the store's file {file.path} was removed by somebody else"


class _Kept:
    """What of runs can stay where it lies, and which elements can't.

    Attributes:
        content: of each data file of the store, by its number, where pieces are in it, in whole pages.
    """

    def __init__(self, generation: Generation, files: int) -> None:
        """`files`: how many links there are already."""
        self.pieces: list[tuple[str, SavedPiece]] = []
        self.nbytes = 0
        self.others: list[SavedRun] = []
        self.content: dict[int, list[range]] = {}
        self._numbers: dict[int, int] = {}  # of the links, by data files
        self._key, self._files = generation.key, files

    def look_for(self, run: SavedRun) -> None:
        holding, in_store, itemsize = run.holding, run.holding.home.in_store, run.holding.dtype.itemsize
        for elements in holding.chunks(run.elements):
            whole = holding.in_pages(elements)
            places = [] if whole is None else list(in_store.places(self._key, whole.start, len(whole)))
            if not places or any(crc is None for _, crc in places):
                self.others.append(SavedRun(run.name, holding, elements))
                continue
            for place, crc in places:
                start = elements.start + (place.start - whole.start) // itemsize
                nbytes = min(place.nbytes, whole.stop - place.start)
                number = self._numbers.setdefault(place.volume, self._files + len(self._numbers))
                piece = SavedPiece(start, nbytes // itemsize, number, place.offset, crc, place.nbytes - nbytes)
                self.pieces.append((run.name, piece))
                self.nbytes += nbytes
                self.content.setdefault(place.volume, []).append(range(place.offset, place.offset + place.nbytes))
