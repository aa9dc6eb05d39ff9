"""Loading without copying: what a checkpoint by generations has in a store's data file stays there, and becomes what
the store of this job has.

It is read all the same, since a checkpoint is loaded only if its checksums are right. [Note: adopted files] in
`runtime.disk.data_file` says what becomes of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zinf_fx.checkpoint.training.files import rank_of
from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.checkpoint.training.manifest import Manifest, SavedPiece, SavedTensor
from zinf_fx.checkpoint.training.parts.part import Matching
from zinf_fx.checkpoint.training.reading import readings
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import File, PageSums
from zinf_fx.plan.intervals import common
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.disk.stripes import UNIT, FilePart, Place
from zinf_fx.runtime.tensor.home import Home
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import PAGE, in_words

log = logging.getLogger("zinf_fx")

_Target = tuple[SavedTensor, Holding]


class _Placed(NamedTuple):
    """A piece, and where its bytes and their padding are in the home."""

    place: range
    saved: SavedTensor
    piece: SavedPiece


@dataclass(frozen=True, eq=False)
class _Whole:
    """All that a home has, of one tensor or of several side by side, as it lies in data files: in `parts`, which are
    consecutive in the home, and each in one file, by its number in the manifest. `placed`: the pieces, in order.
    """

    home: Home
    targets: Sequence[_Target]
    placed: Sequence[_Placed]
    parts: Sequence[FilePart]

    @property
    def nbytes(self) -> int:
        """Of the pages."""
        return self.home.in_store.capacity

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
        by_home: dict[Home | None, list[_Target]] = {}
        for target in matching.targets:
            by_home.setdefault(target[1].home, []).append(target)
        taken: set[str] = set()  # what was tied, and is not any more, is taken over once
        for home, targets in by_home.items():
            names = [saved.name for saved, _ in targets]
            is_new = taken.isdisjoint(names) and len(set(names)) == len(names)
            whole = self._whole(home, targets) if home is not None and is_new else None
            if whole is None:
                self.others += targets
            else:
                taken.update(names)
                self._by_tiers.setdefault(home.tiers, []).append(whole)

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

    def _whole(self, home: Home, targets: Sequence[_Target]) -> _Whole | None:
        """What a home has, if it can be taken over as it lies. `targets`: all that live there."""
        if not isinstance(home.in_store, CopyOnWrite) or home.in_store.is_kept:
            return None
        placed: list[_Placed] = []
        for target in targets:
            if (found := self._placed(*target)) is None:
                return None
            placed += found
        placed.sort(key=lambda one: one.place.start)
        ends = [0, *(one.place.stop for one in placed)]
        if ends[-1] != home.in_store.capacity or any(
            one.place.start != end or one.place.stop % PAGE for one, end in zip(placed, ends, strict=False)
        ):
            return None
        found = _Whole(home, targets, placed, _joined(placed))
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

        for reading, (sums, first) in readings(opened, pieces()):
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
                storages = [holding.tensor.storage for _, holding in one.targets]
                one.home.await_reads(range(one.home.count))  # ahead of their turn, from what may be given back now
                extent = tiers.store.adopted(one.nbytes, one.unit, one.places(numbers), its_sums)
                reserve = not unwritten.issuperset(storage.key for storage in storages)
                generation.adopt(one.home.in_store, extent, reserve=reserve)
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
    """Pieces that are consecutive in a home, in as few parts as possible that are consecutive in a file, too."""
    found: list[FilePart] = []
    for place, _, piece in placed:
        last = found[-1] if found else None
        if last and last.volume == piece.file and last.offset + last.nbytes == piece.offset:
            found[-1] = FilePart(last.volume, last.offset, last.start, last.nbytes + len(place))
        else:
            found.append(FilePart(piece.file, piece.offset, place.start, len(place)))
    return found
