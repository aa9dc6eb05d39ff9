"""Loading without copying: what a checkpoint by generations has in a store's data file stays there, and becomes what
the store of this job has.

It is read all the same, since a checkpoint is loaded only if its checksums are right. [Note: adopted files] in
`runtime.disk.data_file` says what becomes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from zinf_fx.checkpoint.training.files import rank_of
from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.checkpoint.training.manifest import Manifest, Piece, SavedTensor
from zinf_fx.checkpoint.training.parts.part import Matching
from zinf_fx.checkpoint.training.reading import Memory, Reading
from zinf_fx.checkpoint.training.under_way import UnderWay
from zinf_fx.errors import StoreError
from zinf_fx.interrupts import let_through
from zinf_fx.native.engine import File, PageSums
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.disk.stripes import UNIT, FilePart, Place
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import PAGE, in_words

log = logging.getLogger("zinf_fx")

_Target = tuple[SavedTensor, Holding]


@dataclass(frozen=True, eq=False)
class _Whole:
    """A target that is all that its home has, and lies in data files as it would in the store: in `parts`, which are
    consecutive in the home, and each in one file, by its number in the manifest. `pieces` are in the order of the home.
    """

    target: _Target
    pieces: Sequence[Piece]
    parts: Sequence[FilePart]

    @property
    def in_store(self) -> CopyOnWrite:
        """The bytes that its home has in the store so far."""
        return self.target[1].home.in_store

    @property
    def nbytes(self) -> int:
        """Of the pages."""
        return self.in_store.capacity

    @property
    def unit(self) -> int | None:
        """How many bytes lie together in a file, if an extent can lie so."""
        if len(self.parts) == 1:
            return self.nbytes
        return None if any(part.start % UNIT for part in self.parts) else UNIT

    def places(self, numbers: dict[int, int]) -> tuple[Place, ...]:
        """Of the units. `numbers`: of the files in the store, by those in the manifest."""
        return tuple(
            Place(numbers[part.volume], part.offset + inside)
            for part in self.parts
            for inside in range(0, part.nbytes, self.unit)
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
        for tiers in {holding.tiers for _, holding in matching.targets} - {None}:
            tiers.drain()
            tiers.release_generations()
        taken: set[str] = set()
        for target in matching.targets:
            saved, holding = target
            whole = None if saved.name in taken else self._whole(saved, holding)  # two were tied, and are not any more
            if whole is None:
                self.others.append(target)
            else:
                taken.add(saved.name)
                self._by_tiers.setdefault(holding.tiers, []).append(whole)

    def complete(self, opened: Sequence[File], unwritten: Collection[int], report: Callable[[int], object]) -> None:
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
                    self.others += [one.target for one in several]
                else:
                    ready.append((tiers, several, numbers, self._sums(tiers.store, several, opened, report)))
            for tiers, several, numbers, sums in ready:
                self._take_over(tiers, several, numbers, sums, unwritten)

    def _whole(self, saved: SavedTensor, holding: Holding) -> _Whole | None:
        """The target, if it can be taken over as it lies."""
        home = holding.home
        boxes = [box for box in saved.boxes if box.box == holding.box]
        if len(boxes) != 1 or home is None or not isinstance(home.in_store, CopyOnWrite) or home.in_store.is_kept:
            return None
        placed: list[tuple[range, Piece]] = []
        for piece in boxes[0].pieces:
            if wanted := [part for held in holding.held if (part := _common(held, piece.elements))]:
                place = holding.in_pages(piece.elements)
                if place is None or piece.file not in self._mine or piece.offset % PAGE:
                    return None
                if wanted != [piece.elements]:  # it is of a shard that was divided otherwise
                    return None
                placed.append((range(place.start, place.stop + piece.padding), piece))
        placed.sort(key=lambda one: one[0].start)
        ends = [0, *(place.stop for place, _ in placed)]
        if ends[-1] != home.in_store.capacity or any(
            place.start != end or place.stop % PAGE for (place, _), end in zip(placed, ends, strict=False)
        ):
            return None
        pieces = [piece for _, piece in placed]
        found = _Whole((saved, holding), pieces, _joined(placed))
        return None if found.unit is None else found

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
        self, store: Store, several: Iterable[_Whole], opened: Sequence[File], report: Callable[[int], object]
    ) -> list[PageSums]:
        """Read all, and compare the checksums. Returns those of the pages."""
        memory, queue = Memory(), UnderWay[tuple[PageSums, int, Reading]]()

        def learn_first() -> None:
            sums, first, reading = queue.first
            reading.wait()
            sums.learn(first, *reading.pages)
            queue.end_first()
            report(reading.nbytes)

        found = []
        for one in several:
            sums, first = store.new_sums(one.nbytes), 0
            for piece in one.pieces:
                let_through()
                nbytes = _in_pages(piece, one.target[0])
                while not queue.has_room(nbytes):
                    learn_first()
                queue.add((sums, first, Reading(opened[piece.file], one.target[0], piece, memory)), nbytes)
                first += nbytes // PAGE
            found.append(sums)
        while queue:
            learn_first()
        return found

    def _take_over(
        self,
        tiers: Tiers,
        several: Sequence[_Whole],
        numbers: dict[int, int],
        sums: Sequence[PageSums],
        unwritten: Collection[int],
    ) -> None:
        generation = Generation(tiers.store)
        try:
            for one, its_sums in zip(several, sums, strict=True):
                storage, home = one.target[1].tensor.storage, one.target[1].home
                home.await_reads(range(home.count))  # ahead of their turn, from what may be given back now
                extent = tiers.store.adopted(one.nbytes, one.unit, one.places(numbers), its_sums)
                generation.adopt(one.in_store, extent, reserve=storage.key not in unwritten)
                storage.bytes.written()
        finally:  # Ctrl-C: files that nothing was taken over from are closed
            for file, number in numbers.items():
                if tiers.store.files[number].in_use:
                    generation.has_link(number, self._directory / self._manifest.files[file].path)
            tiers.generations.append(generation)
        nbytes = sum(one.nbytes for one in several)
        log.info("%s of the checkpoint in %s stay where they are", in_words(nbytes), self._directory)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _in_pages(piece: Piece, saved: SavedTensor) -> int:
    """Bytes of a piece and its padding."""
    return piece.count * saved.dtype.itemsize + piece.padding


def _joined(placed: Iterable[tuple[range, Piece]]) -> list[FilePart]:
    """Pieces that are consecutive in a home, in as few parts as possible that are consecutive in a file, too."""
    found: list[FilePart] = []
    for place, piece in placed:
        last = found[-1] if found else None
        if last and last.volume == piece.file and last.offset + last.nbytes == piece.offset:
            found[-1] = FilePart(last.volume, last.offset, last.start, last.nbytes + len(place))
        else:
            found.append(FilePart(piece.file, piece.offset, place.start, len(place)))
    return found
