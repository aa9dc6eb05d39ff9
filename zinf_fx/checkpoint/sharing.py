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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from zinf_fx.checkpoint.copying import Holding, Read, SavedRun, read_pieces
from zinf_fx.checkpoint.entries import Matching
from zinf_fx.checkpoint.files import Files
from zinf_fx.checkpoint.manifest import Manifest, SavedFile, SavedPiece, SavedTensor, rank_of
from zinf_fx.errors import CheckpointError, StoreError
from zinf_fx.native.engine import File, PageSums
from zinf_fx.plan.intervals import common
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.data_file import DataFile
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.disk.stripes import UNIT, FilePart, Place
from zinf_fx.runtime.memory.host import aligned_empty, mapped_empty
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import PAGE, blocks, in_words, pieces_of

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
            allocation = run.holding.allocation
            if allocation is None or allocation.in_store is None:
                self.others.append(run)
            else:
                by_tiers.setdefault(allocation.tiers, []).append(run)
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
            in_store = run.holding.copy_on_write
            rewritten[in_store] = rewritten.get(in_store, False) or run.holding.storage.key not in unwritten
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
        holding, in_store, itemsize = run.holding, run.holding.copy_on_write, run.holding.dtype.itemsize
        for elements in holding.chunks(run.elements):
            whole = holding.in_pages(elements)
            places = [] if whole is None else list(in_store.places(self._key, whole.start, len(whole)))
            if whole is None or not places or any(crc is None for _, crc in places):
                self.others.append(SavedRun(run.name, holding, elements))
                continue
            for place, crc in places:
                assert crc is not None
                start = elements.start + (place.start - whole.start) // itemsize
                nbytes = min(place.nbytes, whole.stop - place.start)
                number = self._numbers.setdefault(place.volume, self._files + len(self._numbers))
                piece = SavedPiece(start, nbytes // itemsize, number, place.offset, crc, place.nbytes - nbytes)
                self.pieces.append((run.name, piece))
                self.nbytes += nbytes
                self.content.setdefault(place.volume, []).append(range(place.offset, place.offset + place.nbytes))


_PIECE = 2 << 20
"""Bytes that are read at a time: transfers of training wait behind them."""

_SMALL = 128 << 10
"""Bytes up to which memory comes from the allocator: it would keep larger ones for the thread that copies."""


class NotFrozenError(Exception):
    """Something can't be kept as it is; it says why."""


class Frozen:
    """Runs that are kept as they are until `release`: those in stores by [Note: generations] in
    `runtime.disk.copy_on_write`, those in memory in copies.

    Attributes:
        runs: with holdings that read what is kept.
        bytes_read: so far, from stores.
    """

    def __init__(self, runs: Iterable[SavedRun], unwritten: Collection[int], in_memory: int) -> None:
        """`unwritten`: keys of the storages that nobody will rewrite; `in_memory`: bytes that are copied there, at
        most. Nothing is on its way to the stores.

        Raises: NotFrozenError; nothing is kept then.
        """
        self.runs: list[SavedRun] = []
        self.bytes_read = 0
        self._left = in_memory
        self._generations: dict[Tiers, Generation] = {}
        rewritten: dict[Tiers, dict[CopyOnWrite, bool]] = {}
        copies: dict[Holding, Holding] = {}
        for run in runs:
            holding = run.holding
            if holding.is_ordinary:
                if holding not in copies:
                    copies[holding] = self._copied(holding)
                self.runs.append(replace(run, holding=copies[holding]))
                continue
            allocation = holding.allocation
            if allocation is None or not isinstance(allocation.in_store, CopyOnWrite):
                raise NotFrozenError(f"'{run.name}' is in memory")
            generation = self._generations.setdefault(allocation.tiers, Generation(allocation.tiers.store))
            several = rewritten.setdefault(allocation.tiers, {})
            is_rewritten = holding.storage.key not in unwritten
            several[allocation.in_store] = several.get(allocation.in_store, False) or is_rewritten
            first = holding.in_home(run.elements).start - run.elements.start * holding.dtype.itemsize
            kept = FrozenHolding(
                holding.tensor, holding.shape, holding.box, self, allocation.in_store, generation.key, first
            )
            self.runs.append(replace(run, holding=kept))
        try:
            for tiers, several in rewritten.items():
                self._generations[tiers].freeze(several, [])
        except StoreError as error:
            self.release()
            raise NotFrozenError(f"there is no room to write the next step to while it is copied: {error}") from error

    def release(self) -> None:
        """Nothing is kept any more."""
        for generation in self._generations.values():
            generation.release()
        self._generations.clear()

    @property
    def tiers(self) -> Sequence[Tiers]:
        """Those whose stores have some of it."""
        return list(self._generations)

    def _copied(self, holding: Holding) -> Holding:
        self._left -= holding.tensor.nbytes
        if self._left < 0:
            raise NotFrozenError(f"more than {in_words(-self._left)} of it is in memory")
        return replace(holding, tensor=holding.tensor.detach().clone())


@dataclass(frozen=True, eq=False)
class FrozenHolding(Holding):
    """A holding of one run, whose bytes are kept in a store for `keeper`.

    Attributes:
        first: bytes before the box's first element there, if all elements lay side by side with those of the run.
    """

    frozen: Frozen
    in_store: CopyOnWrite
    keeper: object
    first: int

    def chunks(self, elements: range, nbytes: int = _PIECE) -> list[range]:
        return pieces_of(elements, self.dtype.itemsize, min(nbytes, _PIECE))

    def checksum(self, elements: range) -> int | None:
        start, nbytes = self._place(elements)
        return None if start % PAGE or nbytes % PAGE else self.in_store.checksum(start, nbytes, keeper=self.keeper)

    def read(self, elements: range) -> Read:
        start, nbytes = self._place(elements)
        page = start // PAGE * PAGE
        length = blocks(start + nbytes) - page
        pages = mapped_empty(length) if length > _SMALL else aligned_empty(length)
        ticket = self.in_store.read(pages.data_ptr(), page, length, owner=pages, keeper=self.keeper)
        self.frozen.bytes_read += length
        return Read(pages[start - page : start - page + nbytes].view(self.dtype), ticket)

    def _place(self, elements: range) -> tuple[int, int]:
        """The offset of consecutive elements of the run in the store, and how many bytes they are."""
        return self.first + elements.start * self.dtype.itemsize, len(elements) * self.dtype.itemsize


_Target = tuple[SavedTensor, Holding]


class _Placed(NamedTuple):
    """A piece, and where its bytes and their padding are in the allocation."""

    place: range
    saved: SavedTensor
    piece: SavedPiece


@dataclass(frozen=True, eq=False)
class _Whole:
    """All that an allocation has, of one tensor or of several, as it lies in data files: in `parts`, which are
    consecutive in the allocation, and each in one file, by its number in the manifest. `placed`: the pieces, in order.
    """

    allocation: Allocation
    targets: Sequence[_Target]
    placed: Sequence[_Placed]
    parts: Sequence[FilePart]

    @property
    def nbytes(self) -> int:
        """Of the pages."""
        return self.in_store.capacity

    @property
    def in_store(self) -> CopyOnWrite:
        """Where the allocation's bytes are."""
        assert isinstance(self.allocation.in_store, CopyOnWrite)
        return self.allocation.in_store

    @property
    def unit(self) -> int | None:
        """How many bytes lie together in a file, if an extent can lie so."""
        if len(self.parts) == 1:
            return self.nbytes
        return None if any(part.start % UNIT for part in self.parts) else UNIT

    def places(self, numbers: dict[int, int]) -> tuple[Place, ...]:
        """Of the units. `numbers`: of the files in the store, by those in the manifest."""
        unit = self.unit
        assert unit is not None
        return tuple(
            Place(numbers[part.volume], part.offset + inside)
            for part in self.parts
            for inside in range(0, part.nbytes, unit)
        )


class Adoption:
    """What of a checkpoint becomes this rank's without being copied.

    Attributes:
        others: the targets that are to be read and written.
    """

    def __init__(self, directory: Path, manifest: Manifest, matching: Matching) -> None:
        """Each rank takes over what is in data files of its own: others may be to have the same tensors."""
        self._directory, self._manifest = directory.absolute(), manifest
        self._mine = {
            number
            for number, file in enumerate(manifest.files)
            if file.of_store and matching.ranks == matching.ranks_then and rank_of(file.path) == matching.rank
        }
        self.others: list[_Target] = []
        self._by_tiers: dict[Tiers, list[_Whole]] = {}
        for tiers in {one for _, holding in matching.targets if (one := holding.tiers) is not None}:
            tiers.drain()
            tiers.release_generations()
        by_allocation: dict[Allocation | None, list[_Target]] = {}
        for target in matching.targets:
            by_allocation.setdefault(target[1].allocation, []).append(target)
        taken: set[str] = set()  # what was tied, and is not any more, is taken over once
        for allocation, targets in by_allocation.items():
            names = [saved.name for saved, _ in targets]
            is_new = taken.isdisjoint(names) and len(set(names)) == len(names)
            whole = self._whole(allocation, targets) if allocation is not None and is_new else None
            if allocation is None or whole is None:
                self.others += targets
            else:
                taken.update(names)
                self._by_tiers.setdefault(allocation.tiers, []).append(whole)

    def complete(self, opened: Sequence[File], unwritten: Set[int], report: Callable[[int], object]) -> None:
        """Read and take over what can be. `opened`: the manifest's files; `unwritten`: keys of the storages that nobody
        will rewrite; `report` is told of bytes that are right.

        Raises: CheckpointError for other bytes than were saved, StoreError; nothing is taken over then.
        """
        with ExitStack() as rooms:
            ready = []
            for tiers, several in self._by_tiers.items():
                rooms.callback(tiers.store.part_with_unused)
                try:
                    numbers = self._numbers(tiers.store, several)
                except StoreError as error:
                    log.info("the checkpoint in %s is copied to the store: %s", self._directory, error)
                    self.others += [target for one in several for target in one.targets]
                else:
                    ready.append((tiers, several, numbers, self._sums(tiers.store, several, opened, report)))
            for tiers, several, numbers, sums in ready:
                self._take_over(tiers, several, numbers, sums, unwritten)

    def _whole(self, allocation: Allocation, targets: Sequence[_Target]) -> _Whole | None:
        """What an allocation has, if it can be taken over as it lies. `targets`: all that live there."""
        if not isinstance(allocation.in_store, CopyOnWrite) or allocation.in_store.is_kept:
            return None
        placed: list[_Placed] = []
        for target in targets:
            if (found := self._placed(*target)) is None:
                return None
            placed += found
        placed.sort(key=lambda one: one.place.start)
        ends = [0, *(one.place.stop for one in placed)]
        if ends[-1] != allocation.in_store.capacity or any(
            one.place.start != end or one.place.stop % PAGE for one, end in zip(placed, ends, strict=False)
        ):
            return None
        found = _Whole(allocation, targets, placed, _joined(placed))
        return None if found.unit is None else found

    def _placed(self, saved: SavedTensor, holding: Holding) -> list[_Placed] | None:
        """The pieces of a target, if they are all that is wanted of it, and in data files of this rank."""
        boxes = [box for box in saved.boxes if box.box == holding.box]
        if len(boxes) != 1:
            return None
        found = []
        for piece in boxes[0].pieces:
            if wanted := [part for held in holding.held if (part := common(held, piece.elements))]:
                place = holding.in_pages(piece.elements)
                if place is None or piece.file not in self._mine or piece.offset % PAGE:
                    return None
                if wanted != [piece.elements]:  # it is of a shard that was divided otherwise
                    return None
                found.append(_Placed(range(place.start, place.stop + piece.padding), saved, piece))
        return found

    def _numbers(self, store: Store, several: Iterable[_Whole]) -> dict[int, int]:
        """Adopt the data files of the manifest that these are in. Returns their numbers in the store. Raises:
        StoreError."""
        files = sorted({part.volume for one in several for part in one.parts})
        paths = {number: self._manifest.files[number].path for number in files}
        return {
            number: store.adopt(self._directory / path, self._manifest.content_of(path))
            for number, path in paths.items()
        }

    def _sums(
        self, store: Store, several: Sequence[_Whole], opened: Sequence[File], report: Callable[[int], object]
    ) -> list[PageSums]:
        """Read all, and compare the checksums. Returns those of the pages."""
        found = [store.new_sums(one.nbytes) for one in several]

        def pieces() -> Iterator[tuple[SavedTensor, SavedPiece, tuple[PageSums, int]]]:
            for one, sums in zip(several, found, strict=True):
                first = 0
                for placed in one.placed:
                    yield placed.saved, placed.piece, (sums, first)
                    first += len(placed.place) // PAGE

        for reading, (sums, first) in read_pieces(opened, pieces()):
            reading.wait()
            sums.learn(first, *reading.pages)
            report(reading.nbytes)
        return found

    def _take_over(
        self,
        tiers: Tiers,
        several: Sequence[_Whole],
        numbers: dict[int, int],
        sums: Sequence[PageSums],
        unwritten: Set[int],
    ) -> None:
        generation = Generation(tiers.store)
        try:
            for one, its_sums in zip(several, sums, strict=True):
                storages = [holding.storage for _, holding in one.targets]
                one.allocation.await_reads(
                    range(one.allocation.count)
                )  # ahead of their turn, from what may be given back now
                unit = one.unit
                assert unit is not None
                extent = tiers.store.adopted(one.nbytes, unit, one.places(numbers), its_sums)
                reserve = not all(storage.key in unwritten for storage in storages)
                generation.adopt(one.in_store, extent, reserve=reserve)
                for storage in storages:
                    storage.bytes.written()
        finally:  # Ctrl-C: files that nothing was taken over from are closed
            for file, number in numbers.items():
                if tiers.store.files[number].in_use:
                    generation.has_link(number, self._directory / self._manifest.files[file].path)
            tiers.generations.append(generation)
        nbytes = sum(one.nbytes for one in several)
        log.info("%s of the checkpoint in %s stay where they are", in_words(nbytes), self._directory)


def _joined(placed: Iterable[_Placed]) -> list[FilePart]:
    """Pieces that are consecutive in an allocation, in as few parts as possible that are consecutive in a file, too."""
    found: list[FilePart] = []
    for place, _, piece in placed:
        last = found[-1] if found else None
        if last and last.volume == piece.file and last.offset + last.nbytes == piece.offset:
            found[-1] = FilePart(last.volume, last.offset, last.start, last.nbytes + len(place))
        else:
            found.append(FilePart(piece.file, piece.offset, place.start, len(place)))
    return found
