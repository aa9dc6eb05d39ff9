"""Bytes of a store that can be kept as they are at one moment: what is written from then on goes to other extents."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from zinf_fx.interrupts import held_back
from zinf_fx.native.engine import PageSums
from zinf_fx.runtime.disk.store import Extent, Store
from zinf_fx.runtime.disk.stripes import FilePart, runs
from zinf_fx.runtime.memory.freelist import FreeList
from zinf_fx.runtime.memory.transfers import Ticket, all_started, joined
from zinf_fx.sizes import PAGE, blocks


class ExtentPart(NamedTuple):
    """The bytes from `start` on, up to `stop`, and the extent that has them, in the same place."""

    start: int
    stop: int
    extent: Extent


class CopyOnWrite:
    """Space for so many bytes in a store.

    [Note: generations]
    Whoever freezes the bytes keeps them as they are then, until the release. A write to what is kept goes to another
    extent, `ahead`, of the same size, page by page, and reads follow; so what is rewritten anyway costs no byte more
    that is moved, and what is never rewritten is shared. When all is rewritten, the extents have changed their roles.

    No write may run out of space. So who freezes bytes that will be rewritten reserves the extent ahead at the same
    time: a new one or, if the new generation replaces another, that one's extent, which is free when it is released.
    Of all extents, the bytes belong to the store that are neither live, nor kept, nor ahead.
    """

    def __init__(self, store: Store, nbytes: int) -> None:
        """Reserve it. Raises: StoreError."""
        self._store = store
        self._live = [_whole(store.allocate(nbytes))]
        self.capacity = self._live[0].stop
        self._kept: dict[object, list[ExtentPart]] = {}  # by who keeps them
        self._ahead: Extent | None = None
        self._heir: Extent | None = None  # to be ahead, when those are released who still keep it
        self._lock = threading.Lock()
        self._is_gone = False

    def read(
        self, address: int, offset: int, nbytes: int, *, owner: object = None, keeper: object | None = None
    ) -> Ticket:
        """Start a `Store.read`; of the bytes that are kept for `keeper`, if one is given."""
        parts = _cut(self._parts_for(keeper), offset, offset + blocks(nbytes))
        return self._start(self._store.read, parts, address, offset, owner)

    @held_back
    def write(self, address: int, offset: int, nbytes: int, *, owner: object = None) -> Ticket:
        """Start a `Store.write`. Raises: StoreError where there is no space for what is kept."""
        with self._locked():
            before = _cut(self._live, offset, offset + blocks(nbytes))
            parts = before if not self._kept else self._free_to_write(before)
            ticket = self._start(self._store.write, parts, address, offset, owner)
            if parts is not before:
                outside = _cut(self._live, 0, offset) + parts + _cut(self._live, parts[-1].stop, self.capacity)
                self._live = _joined(outside)
        return ticket

    def freeze(self, keeper: object, replaced: Sequence[object], *, reserve: bool) -> None:
        """Keep the bytes as they are for `keeper`. With `reserve`, all of them will be rewritten. `replaced`: others
        who keep them, and will release them before that.

        Raises: StoreError when there is no space to be rewritten in; nothing is kept then.
        """
        with self._locked():
            if reserve and (self._ahead is None or self._uses(self._ahead)):
                heir = self._heir_of(replaced)
                ahead = self._store.allocate(self.capacity) if heir is None else None
                self._drop_ahead()
                self._ahead, self._heir = ahead, heir
            elif self._ahead is not None and self._uses(self._ahead):
                self._drop_ahead()
            self._kept[keeper] = list(self._live)

    def settle(self) -> None:
        """Whoever was to be replaced has released what it kept, if it ever will. Raises: StoreError when it did not,
        and there is no other space."""
        with self._locked():
            heir, self._heir = self._heir, None
            if heir is None or not _overlapping(self._live, self._all_kept()):
                return
            if any(part.extent is heir for parts in self._kept.values() for part in parts):
                self._ahead = self._store.allocate(self.capacity)
            else:
                self._ahead = heir

    @property
    def is_kept(self) -> bool:
        """Whether anybody keeps any bytes, or kept them, and they moved."""
        return bool(self._kept) or len(self._live) > 1 or self._ahead is not None

    def adopt(self, keeper: object, extent: Extent, *, reserve: bool) -> None:
        """Have the bytes of another extent of the same capacity, which are kept for `keeper`. Nobody has kept any of
        those before, which are where they will be rewritten, with `reserve`, or free."""
        with self._locked():
            assert not self.is_kept and extent.capacity == self.capacity, f"{extent} can't be adopted"
            (before,) = self._live
            self._live = [_whole(extent)]
            self._kept[keeper] = list(self._live)
            if reserve:
                self._ahead = before.extent
            else:
                self._give_back([before])

    def release(self, keeper: object) -> None:
        """What is kept for `keeper` alone is free again."""
        with self._locked():
            self._give_back(_without(self._kept.pop(keeper), self._owned()))
            if not _overlapping(self._live, self._all_kept()):
                self._drop_ahead()

    def free(self) -> None:
        """Give back what nobody keeps, now, and the rest when it is released. Safe in a finalizer."""
        self._is_gone = True
        self._act_if_gone()

    def places(self, keeper: object, offset: int, nbytes: int) -> Iterator[tuple[FilePart, int | None]]:
        """Where in files some bytes are that are kept for `keeper`, in whole pages, with the CRC-32C of each part, if
        that is known."""
        for run, sums in _runs(self._kept[keeper], offset, nbytes):
            yield run, None if sums is None else sums.joined(run.start // PAGE, run.nbytes // PAGE, run.offset)

    def checksum(self, offset: int, nbytes: int, *, keeper: object | None = None) -> int | None:
        """The CRC-32C of some of the present bytes, whole pages of which none is being written, or of those that are
        kept for `keeper`, without reading them; None where it is not known."""
        crc: int | None = 0
        for run, sums in _runs(self._parts_for(keeper), offset, nbytes):
            crc = None if sums is None else sums.joined(run.start // PAGE, run.nbytes // PAGE, run.offset, crc)
            if crc is None:
                return None
        return crc

    def _parts_for(self, keeper: object | None) -> list[ExtentPart]:
        return self._live if keeper is None else self._kept[keeper]

    def _start(
        self,
        transfer: Callable[..., Ticket],
        parts: Sequence[ExtentPart],
        address: int,
        offset: int,
        owner: object,
    ) -> Ticket:
        return joined(
            all_started(
                transfer(extent, address + start - offset, start, stop - start, owner=owner)
                for start, stop, extent in parts
            )
        )

    def _free_to_write(self, parts: list[ExtentPart]) -> list[ExtentPart]:
        """Where these are to be written: those that nobody keeps where they are, the others ahead."""
        free = _without(parts, self._all_kept())
        taken = _without(parts, free)
        if not taken:
            return parts
        if self._ahead is None:
            self._ahead = self._store.allocate(self.capacity)
        return _joined(free + [ExtentPart(start, stop, self._ahead) for start, stop, _ in taken])

    def _heir_of(self, replaced: Sequence[object]) -> Extent | None:
        """An extent all of which is kept for those who are replaced, and nothing by anybody else."""
        theirs = [part for keeper in replaced for part in self._kept.get(keeper, ())]
        still_kept = [part for keeper, parts in self._kept.items() if keeper not in replaced for part in parts]
        for extent in {id(part.extent): part.extent for part in theirs}.values():
            is_free = not any(part.extent is extent for part in (*self._live, *still_kept))
            if is_free and not _without([_whole(extent)], theirs):
                return extent
        return None

    def _uses(self, extent: Extent) -> bool:
        return any(part.extent is extent for part in self._live)

    def _all_kept(self) -> list[ExtentPart]:
        return [part for parts in self._kept.values() for part in parts]

    def _owned(self) -> list[ExtentPart]:
        """What is not free: of live bytes, of those that are kept, and of what is ahead."""
        owned = [*self._live, *self._all_kept()]
        return owned + self._ahead_of(owned)

    def _ahead_of(self, owned: Sequence[ExtentPart]) -> list[ExtentPart]:
        """Return the parts that are ahead, or are to be, without those that are `owned`."""
        ahead = [_whole(extent) for extent in (self._ahead, self._heir) if extent is not None]
        return _without(ahead, owned)

    def _drop_ahead(self) -> None:
        """Nothing more will be written ahead."""
        unused = self._ahead_of([*self._live, *self._all_kept()])
        self._ahead = self._heir = None
        self._give_back(unused)

    def _give_back(self, parts: Iterable[ExtentPart]) -> None:
        for start, stop, extent in parts:
            self._store.give_back(extent, start, stop - start)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A block in which the parts don't change otherwise."""
        with self._lock:
            yield
        if self._is_gone:
            self._act_if_gone()

    def _act_if_gone(self) -> None:
        """Give everything back; where somebody is in a `_locked` block, it is left to the end of that: the garbage
        collector may have called this in the middle of it."""
        if self._live and self._lock.acquire(blocking=False):
            try:
                kept = self._all_kept()
                owned = self._live + self._ahead_of([*self._live, *kept])
                self._live, self._ahead, self._heir = [], None, None
                self._give_back(_without(owned, kept))
            finally:
                self._lock.release()


def _whole(extent: Extent) -> ExtentPart:
    return ExtentPart(0, extent.capacity, extent)


def _cut(parts: Iterable[ExtentPart], start: int, stop: int) -> list[ExtentPart]:
    """What of these lies in a range."""
    return [
        ExtentPart(max(part.start, start), min(part.stop, stop), part.extent)
        for part in parts
        if part.start < stop and start < part.stop
    ]


def _runs(parts: Iterable[ExtentPart], offset: int, nbytes: int) -> Iterator[tuple[FilePart, PageSums | None]]:
    """Where in files some bytes are, in whole pages, and the checksums of the extent that each part is of."""
    for part in _cut(parts, offset, offset + blocks(nbytes)):
        for run in runs(part.extent.places, part.extent.unit, part.start, part.stop - part.start):
            yield run, part.extent.sums


def _overlapping(first: Iterable[ExtentPart], second: Sequence[ExtentPart]) -> bool:
    return any(
        part.extent is counterpart.extent and part.start < counterpart.stop and counterpart.start < part.stop
        for part in first
        for counterpart in second
    )


def _without(parts: Iterable[ExtentPart], removed: Sequence[ExtentPart]) -> list[ExtentPart]:
    """Return what of the parts is in none of `removed`, each extent by itself."""
    remaining = []
    for part in parts:
        left = FreeList([(part.start, part.stop)])
        for gone in removed:
            if gone.extent is part.extent:
                left.discard(gone.start, gone.stop)
        remaining += [ExtentPart(start, stop, part.extent) for start, stop in left]
    return remaining


def _joined(parts: Iterable[ExtentPart]) -> list[ExtentPart]:
    """Join what is consecutive. Returns as few parts as possible, in order."""
    joined: list[ExtentPart] = []
    for part in sorted(parts, key=lambda piece: piece.start):
        if joined and joined[-1].extent is part.extent and joined[-1].stop == part.start:
            part = ExtentPart(joined.pop().start, part.stop, part.extent)
        joined.append(part)
    return joined
