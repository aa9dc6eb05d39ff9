"""Which bytes a checkpoint and a store share, which are copied, and when.

[Note: sharing]
`Snapshot` decides this for each piece that is saved, and `ZeroCopyLoad` for each that is loaded:

- **Shared.** A step rewrites parameters and states anyway. So a saved checkpoint gets a hard link to each data file of
  the store, and the manifest says where in it the pieces are, with the checksums that were made when they were written.
  What is written from then on goes to other extents: see [Note: generations] in `runtime.disk.copy_on_write`. Nothing
  moves, and for twice the disk the step before is there. It ends with the link: whatever removed that, the next save
  finds it gone, and its extents are the store's again. A load does the reverse: the store links the checkpoint's data
  files, compares their checksums, and uses what is in them where it is.
- **Copied in the background.** What can't be shared, such as with a directory on another file system, is kept in the
  store as if it were, without a link, and copied while training goes on. Tensors in memory are small then, and cloned.
- **Copied at once**, while training waits: all else. That is what is in memory, pieces that don't begin with a page,
  and those whose checksum is not known. Exports and conversions have files of another form, and share nothing.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from zinf_fx.checkpoint.copying import Read, ShardRange, TensorShard, read_pieces
from zinf_fx.checkpoint.entries import LARGEST, Matching
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


class SnapshotError(Exception):
    """Something can't be kept as it is while training goes on; the message says why."""


class _Places(NamedTuple):
    """Where consecutive elements are in a store: their bytes in its allocation, and the parts of files with these."""

    nbytes: range
    parts: list[tuple[FilePart, int]]  # each with its checksum


class Snapshot:
    """What a rank saves to one checkpoint, kept as it is until `settle` and, in the background, until `release`.

    Attributes:
        shared: pieces that stay in the store, each with the name of its tensor; `shared_nbytes`: their size.
        files: the links to the store's files, by which these pieces count.
        copied: what is to be copied; with `in_background`, while training goes on.
        why_copied: why what is in a store is copied; None if it isn't.
        bytes_read: bytes that were read from stores in the background so far.
    """

    def __init__(self, directory: Path, name_link: Callable[[int], str], files: Files) -> None:
        """`name_link` returns the name of a link in the directory, by its number."""
        self._directory, self._name_link, self._files = directory.absolute(), name_link, files
        self._obstacles: dict[Tiers, str | None] = {}
        self._linked: dict[Tiers, Generation] = {}
        self._unlinked: dict[Tiers, Generation] = {}
        self.shared: list[tuple[str, SavedPiece]] = []
        self.shared_nbytes = 0
        self.files: list[SavedFile] = []
        self.copied: list[ShardRange] = []
        self.why_copied: str | None = None
        self.in_background = False
        self.bytes_read = 0

    def take(
        self, ranges: Sequence[ShardRange], unwritten: Collection[int], replaced: Collection[Path], *, may_wait: bool
    ) -> None:
        """Decide on all ranges, and keep them. `unwritten`: keys of the storages that nobody will rewrite; `replaced`:
        directories of checkpoints that will be gone when this one is there; `may_wait`: copies may go on in the
        background.

        Raises: CheckpointError when there is no room for the next step's values; OSError, StoreError.
        """
        by_tiers: dict[Tiers, list[ShardRange]] = {}
        for shard_range in ranges:
            allocation = shard_range.shard.allocation
            if allocation is not None and allocation.in_store is not None:
                by_tiers.setdefault(allocation.tiers, []).append(shard_range)
        for tiers, in_store in by_tiers.items():
            tiers.drain()
            tiers.release_generations()
            self._obstacles[tiers] = self._obstacle(tiers)
            if self._obstacles[tiers] is None:
                self._keep(tiers, in_store, unwritten, replaced)
        in_background = self._share(ranges, may_wait)
        self.why_copied = next((why for why in self._obstacles.values() if why is not None), None)
        if in_background:
            try:
                self._keep_copied(unwritten)
            except SnapshotError as error:
                self.release()
                log.info("the checkpoint in %s is copied while training waits: %s", self._directory, error)

    def settle(self) -> None:
        """End the save, well or not: what has no links is released, and what was replaced."""
        for tiers in self._obstacles:
            tiers.release_generations()
        for generation in self._linked.values():
            try:
                generation.settle()
            except StoreError as error:
                log.warning("a checkpoint that was to be removed is still there, and the next step may fail: %s", error)

    def release(self) -> None:
        """End the copies in the background: nothing is kept for them any more."""
        for generation in self._unlinked.values():
            generation.release()
        self._unlinked.clear()

    @property
    def stores(self) -> list[Store]:
        """The stores from which is copied in the background."""
        return [tiers.store for tiers in self._unlinked]

    def _obstacle(self, tiers: Tiers) -> str | None:
        """Return why nothing of a store can stay in it for a checkpoint."""
        if not tiers.store.checksum:
            return "the store keeps no checksums"
        device = self._directory.stat().st_dev
        if any(volume.device != device for volume in tiers.store.volumes):
            return "the store is on another file system"
        return next((_without_name(file) for file in tiers.store.files if file.in_use and not file.has_name), None)

    def _keep(
        self, tiers: Tiers, ranges: Sequence[ShardRange], unwritten: Collection[int], replaced: Collection[Path]
    ) -> None:
        generation = Generation(tiers.store)
        earlier = [generation for generation in tiers.generations if generation.is_in(replaced)]
        try:
            generation.freeze(_rewritten(ranges, unwritten), earlier)
        except StoreError as error:
            raise CheckpointError(
                f"saving a checkpoint to {self._directory} was refused, because there is no room to write the next "
                f"step to while this one is kept: {error}"
            ) from error
        tiers.generations.append(generation)
        self._linked[tiers] = generation

    def _share(self, ranges: Sequence[ShardRange], may_wait: bool) -> bool:
        """Share what can be, and leave the rest to be copied. Returns whether that is copied in the background: where
        no store shares anything. A store that can't be linked after all shares nothing; all is decided anew then."""
        linked: set[Tiers] = set()
        while True:
            in_background = may_wait and bool(self._obstacles) and None not in self._obstacles.values()
            shared: dict[Tiers, list[tuple[ShardRange, _Places]]] = {}
            self.copied = []
            for shard_range in ranges:
                allocation = shard_range.shard.allocation
                is_kept = allocation is not None and allocation.tiers in self._linked
                chunks = shard_range.in_chunks() if is_kept else [shard_range]
                for piece in chunks:
                    places = self._shareable(piece)
                    if allocation is None or places is None:
                        self.copied.append(piece)
                    else:
                        shared.setdefault(allocation.tiers, []).append((piece, places))
            failures = {tiers: self._link(tiers, pieces) for tiers, pieces in shared.items() if tiers not in linked}
            linked.update(shared)
            if all(why is None for why in failures.values()):
                return in_background
            self._obstacles |= failures

    def _shareable(self, piece: ShardRange) -> _Places | None:
        """Return where a piece is in a store that is kept, if it begins with a page, and its checksums are known."""
        allocation, nbytes = piece.shard.allocation, piece.shard.page_range(piece.elements)
        generation = None if allocation is None else self._linked.get(allocation.tiers)
        if generation is None or nbytes is None:
            return None
        places = list(piece.shard.copy_on_write.places(generation.key, nbytes.start, len(nbytes)))
        parts = [(part, crc) for part, crc in places if crc is not None]
        return _Places(nbytes, parts) if parts and len(parts) == len(places) else None

    def _link(self, tiers: Tiers, pieces: Sequence[tuple[ShardRange, _Places]]) -> str | None:
        """Give the data files that have these pieces a name in the checkpoint. Returns why that is not possible."""
        generation, content, numbers = self._linked[tiers], {}, {}
        for _, places in pieces:
            for part, _ in places.parts:
                content.setdefault(part.volume, []).append(range(part.offset, part.offset + part.nbytes))
                numbers.setdefault(part.volume, len(self.files) + len(numbers))
        files = []
        for volume, number in numbers.items():
            linked, path = tiers.store.files[volume], self._directory / self._name_link(number)
            try:
                generation.link(volume, path, content[volume], self._files.link)
            except OSError as error:
                if error.errno not in _NO_LINKS and linked.has_name:
                    raise
                for done in files:
                    self._files.remove(self._directory / done.path)
                del self._linked[tiers]
                tiers.release_generations()
                return f"its files can't be linked ({error.strerror})" if linked.has_name else _without_name(linked)
            self._files.sync_data(linked.descriptor)
            files.append(SavedFile(path.name, linked.size, of_store=True))
        self.files += files
        for piece, places in pieces:
            itemsize = piece.shard.dtype.itemsize
            for part, crc in places.parts:
                start = piece.elements.start + (part.start - places.nbytes.start) // itemsize
                nbytes = min(part.nbytes, places.nbytes.stop - part.start)
                padding = part.nbytes - nbytes
                saved = SavedPiece(start, nbytes // itemsize, numbers[part.volume], part.offset, crc, padding)
                self.shared.append((piece.name, saved))
                self.shared_nbytes += nbytes
        return None

    def _keep_copied(self, unwritten: Collection[int]) -> None:
        """Keep what is to be copied as it is: in stores by generations without links, in memory by clones.

        Raises: SnapshotError.
        """
        clones: dict[TensorShard, TensorShard] = {}
        kept, ranges_of, left = [], {}, LARGEST
        for piece in self.copied:
            shard = piece.shard
            if shard.is_in_memory:
                if shard not in clones:
                    left -= shard.tensor.nbytes
                    if left < 0:
                        raise SnapshotError(f"more than {in_words(-left)} of it is in memory")
                    clones[shard] = replace(shard, tensor=shard.tensor.detach().clone())
                kept.append(replace(piece, shard=clones[shard]))
                continue
            allocation = shard.allocation
            if allocation is None or not isinstance(allocation.in_store, CopyOnWrite):
                raise SnapshotError(f"'{piece.name}' is in memory")
            ranges_of.setdefault(allocation.tiers, []).append(piece)
            generation = self._unlinked.setdefault(allocation.tiers, Generation(allocation.tiers.store))
            kept.append(replace(piece, shard=KeptShard.of_range(piece, self, generation.key)))
        try:
            for tiers, ranges in ranges_of.items():
                self._unlinked[tiers].freeze(_rewritten(ranges, unwritten), [])
        except StoreError as error:
            raise SnapshotError(f"there is no room to write the next step to while it is copied: {error}") from error
        self.copied, self.in_background = kept, True


def _rewritten(ranges: Iterable[ShardRange], unwritten: Collection[int]) -> dict[CopyOnWrite, bool]:
    """Return the bytes that these are in, and whether any of them will be rewritten."""
    rewritten: dict[CopyOnWrite, bool] = {}
    for shard_range in ranges:
        in_store = shard_range.shard.copy_on_write
        rewritten[in_store] = rewritten.get(in_store, False) or shard_range.shard.stored.key not in unwritten
    return rewritten


def _without_name(file: DataFile) -> str:
    """Return why a file is copied that somebody has removed. The job has it open, and loses nothing."""
    log.warning(
        "the store's file %s was removed while its job runs, perhaps by a cleaner of temporary files: training goes "
        "on, and checkpoints are copied. Keep cleaners away from %s, or begin the next job in another store",
        file.path,
        file.path.parent.parent,
    )
    return f"the store's file {file.path} was removed by somebody else"


_READ_AT_ONCE = 2 << 20
"""Bytes that are read at a time in the background: transfers of training wait behind them."""

_SMALL = 128 << 10
"""Bytes up to which memory comes from the allocator: it would keep larger ones for the thread that copies."""


@dataclass(frozen=True, eq=False)
class KeptShard(TensorShard):
    """A shard whose bytes are read as a snapshot keeps them.

    Attributes:
        first: the offset in the store of the box's first element, if all elements lay beside those of the range.
    """

    snapshot: Snapshot
    in_store: CopyOnWrite
    keeper: object
    first: int

    @classmethod
    def of_range(cls, kept: ShardRange, snapshot: Snapshot, keeper: object) -> KeptShard:
        """Return the shard of one range, which is kept for `keeper`."""
        shard, elements = kept.shard, kept.elements
        first = shard.byte_range(elements).start - elements.start * shard.dtype.itemsize
        return cls(shard.tensor, shard.shape, shard.box, snapshot, shard.copy_on_write, keeper, first)

    def chunks(self, elements: range, nbytes: int = _READ_AT_ONCE) -> list[range]:
        return pieces_of(elements, self.dtype.itemsize, min(nbytes, _READ_AT_ONCE))

    def checksum(self, elements: range) -> int | None:
        start, nbytes = self._place(elements)
        return None if start % PAGE or nbytes % PAGE else self.in_store.checksum(start, nbytes, keeper=self.keeper)

    def read(self, elements: range) -> Read:
        start, nbytes = self._place(elements)
        page = start // PAGE * PAGE
        length = blocks(start + nbytes) - page
        pages = mapped_empty(length) if length > _SMALL else aligned_empty(length)
        ticket = self.in_store.read(pages.data_ptr(), page, length, owner=pages, keeper=self.keeper)
        self.snapshot.bytes_read += length
        return Read(pages[start - page : start - page + nbytes].view(self.dtype), ticket)

    def _place(self, elements: range) -> tuple[int, int]:
        return self.first + elements.start * self.dtype.itemsize, len(elements) * self.dtype.itemsize


_Target = tuple[SavedTensor, TensorShard]


class _Placed(NamedTuple):
    """A piece, and where its bytes and their padding are in the allocation."""

    place: range
    saved: SavedTensor
    piece: SavedPiece


@dataclass(frozen=True, eq=False)
class _InFiles:
    """All bytes of an allocation, as data files of a checkpoint have them.

    Attributes:
        targets: the tensors in the allocation; `placed`: their pieces, in order.
        parts: consecutive parts of the allocation, each in one file, by its number in the manifest.
    """

    allocation: Allocation
    targets: Sequence[_Target]
    placed: Sequence[_Placed]
    parts: Sequence[FilePart]

    @property
    def nbytes(self) -> int:
        """The size of the allocation, in whole pages."""
        return self.in_store.capacity

    @property
    def in_store(self) -> CopyOnWrite:
        """The space of the allocation in its store."""
        assert isinstance(self.allocation.in_store, CopyOnWrite)
        return self.allocation.in_store

    @property
    def unit(self) -> int | None:
        """How many bytes lie together in a file; None where an extent can't lie so."""
        if len(self.parts) == 1:
            return self.nbytes
        return None if any(part.start % UNIT for part in self.parts) else UNIT

    def places(self, numbers: dict[int, int]) -> tuple[Place, ...]:
        """The place of each unit. `numbers`: the files' numbers in the store, by those in the manifest."""
        assert self.unit is not None
        return tuple(
            Place(numbers[part.volume], part.offset + inside)
            for part in self.parts
            for inside in range(0, part.nbytes, self.unit)
        )


class ZeroCopyLoad:
    """The part of a load that shares a checkpoint's bytes with this rank's stores.

    Attributes:
        others: the targets that are to be copied.
    """

    def __init__(self, directory: Path, manifest: Manifest, matching: Matching) -> None:
        """Each rank shares what is in data files of its own: others may be to have the same tensors."""
        self._directory, self._manifest = directory.absolute(), manifest
        self._mine = {
            number
            for number, file in enumerate(manifest.files)
            if file.of_store and matching.ranks == matching.ranks_then and rank_of(file.path) == matching.rank
        }
        self.others: list[_Target] = []
        self._shared: dict[Tiers, list[_InFiles]] = {}
        self._names: set[str] = set()  # what was tied, and is not any more, is shared once
        for tiers in {tiers for _, shard in matching.targets if (tiers := shard.tiers) is not None}:
            tiers.drain()
            tiers.release_generations()
        by_allocation: dict[Allocation | None, list[_Target]] = {}
        for target in matching.targets:
            by_allocation.setdefault(target[1].allocation, []).append(target)
        for allocation, targets in by_allocation.items():
            in_files = self._shareable(allocation, targets)
            if in_files is None:
                self.others += targets
            else:
                self._shared.setdefault(in_files.allocation.tiers, []).append(in_files)

    def complete(self, opened: Sequence[File], unwritten: Set[int], report: Callable[[int], object]) -> None:
        """Read what is shared, and let the stores have it. `opened`: the manifest's files; `unwritten`: keys of the
        storages that nobody will rewrite; `report` is told of bytes that are right.

        Raises: CheckpointError for other bytes than were saved, StoreError; nothing is shared then.
        """
        with ExitStack() as rooms:
            ready = []
            for tiers, shared in self._shared.items():
                rooms.callback(tiers.store.part_with_unused)
                try:
                    numbers = self._link(tiers.store, shared)
                except StoreError as error:
                    log.info("the checkpoint in %s is copied to the store: %s", self._directory, error)
                    self.others += [target for in_files in shared for target in in_files.targets]
                else:
                    ready.append((tiers, shared, numbers, self._sums(tiers.store, shared, opened, report)))
            for tiers, shared, numbers, sums in ready:
                self._share(tiers, shared, numbers, sums, unwritten)

    def _shareable(self, allocation: Allocation | None, targets: Sequence[_Target]) -> _InFiles | None:
        """Return how data files of this rank have all of an allocation, page by page, if nothing else has its bytes."""
        names = {saved.name for saved, _ in targets}
        if allocation is None or not self._names.isdisjoint(names) or len(names) < len(targets):
            return None
        if not isinstance(allocation.in_store, CopyOnWrite) or allocation.in_store.is_kept:
            return None
        placed: list[_Placed] = []
        for target in targets:
            if (pieces := self._placed(*target)) is None:
                return None
            placed += pieces
        placed.sort(key=lambda piece: piece.place.start)
        ends = [0, *(piece.place.stop for piece in placed)]
        if ends[-1] != allocation.in_store.capacity or any(
            piece.place.start != end or piece.place.stop % PAGE for piece, end in zip(placed, ends, strict=False)
        ):
            return None
        in_files = _InFiles(allocation, targets, placed, _joined(placed))
        if in_files.unit is None:
            return None
        self._names.update(names)
        return in_files

    def _placed(self, saved: SavedTensor, shard: TensorShard) -> list[_Placed] | None:
        """Return the pieces of a target, if they are all that is wanted of it, and in data files of this rank."""
        shards = [metadata for metadata in saved.boxes if metadata.box == shard.box]
        if len(shards) != 1:
            return None
        placed = []
        for piece in shards[0].pieces:
            if wanted := [part for held in shard.wanted if (part := common(held, piece.elements))]:
                place = shard.page_range(piece.elements)
                if place is None or piece.file not in self._mine or piece.offset % PAGE:
                    return None
                if wanted != [piece.elements]:  # it is of a shard that was divided otherwise
                    return None
                placed.append(_Placed(range(place.start, place.stop + piece.padding), saved, piece))
        return placed

    def _link(self, store: Store, shared: Iterable[_InFiles]) -> dict[int, int]:
        """Link the data files into the store. Returns their numbers there, by those in the manifest. Raises:
        StoreError."""
        numbers = sorted({part.volume for in_files in shared for part in in_files.parts})
        paths = {number: self._manifest.files[number].path for number in numbers}
        return {
            number: store.adopt(self._directory / path, self._manifest.content_of(path))
            for number, path in paths.items()
        }

    def _sums(
        self, store: Store, shared: Sequence[_InFiles], opened: Sequence[File], report: Callable[[int], object]
    ) -> list[PageSums]:
        """Read all, and compare the checksums. Returns those of the pages."""
        all_sums = [store.new_sums(in_files.nbytes) for in_files in shared]

        def pieces() -> Iterator[tuple[SavedTensor, SavedPiece, tuple[PageSums, int]]]:
            for in_files, sums in zip(shared, all_sums, strict=True):
                first = 0
                for placed in in_files.placed:
                    yield placed.saved, placed.piece, (sums, first)
                    first += len(placed.place) // PAGE

        for reading, (sums, first) in read_pieces(opened, pieces()):
            reading.wait()
            sums.learn(first, *reading.pages)
            report(reading.nbytes)
        return all_sums

    def _share(
        self,
        tiers: Tiers,
        shared: Sequence[_InFiles],
        numbers: dict[int, int],
        all_sums: Sequence[PageSums],
        unwritten: Set[int],
    ) -> None:
        generation = Generation(tiers.store)
        try:
            for in_files, sums in zip(shared, all_sums, strict=True):
                allocation, storages = in_files.allocation, [shard.stored for _, shard in in_files.targets]
                allocation.await_reads(range(allocation.count))  # ahead of their turn, from what may be given back now
                assert in_files.unit is not None
                extent = tiers.store.adopted(in_files.nbytes, in_files.unit, in_files.places(numbers), sums)
                reserve = not all(storage.key in unwritten for storage in storages)
                generation.adopt(in_files.in_store, extent, reserve=reserve)
                for storage in storages:
                    storage.bytes.written()
        finally:  # Ctrl-C: files that nothing was taken over from are closed
            for file, number in numbers.items():
                if tiers.store.files[number].in_use:
                    generation.has_link(number, self._directory / self._manifest.files[file].path)
            tiers.generations.append(generation)
        nbytes = sum(in_files.nbytes for in_files in shared)
        log.info("%s of the checkpoint in %s stay where they are", in_words(nbytes), self._directory)


def _joined(placed: Iterable[_Placed]) -> list[FilePart]:
    """Return as few parts as possible that are consecutive both in an allocation and in a file."""
    parts: list[FilePart] = []
    for place, _, piece in placed:
        last = parts[-1] if parts else None
        if last and last.volume == piece.file and last.offset + last.nbytes == piece.offset:
            parts[-1] = FilePart(last.volume, last.offset, last.start, last.nbytes + len(place))
        else:
            parts.append(FilePart(piece.file, piece.offset, place.start, len(place)))
    return parts
