"""What a training consisted of at one moment, of which copies are made while it goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.checkpoint.training.layout import SavedRun
from zinf_fx.errors import StoreError
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.generation import Generation
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.runtime.memory.leases import Ticket
from zinf_fx.runtime.memory.mapped import mapped_empty
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import PAGE, blocks, in_words, pieces_of

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
            home = holding.home
            if home is None or not isinstance(home.in_store, CopyOnWrite):
                raise NotFrozenError(f"'{run.name}' is in memory")
            generation = self._generations.setdefault(home.tiers, Generation(home.tiers.store))
            several = rewritten.setdefault(home.tiers, {})
            is_rewritten = holding.tensor.storage.key not in unwritten
            several[home.in_store] = several.get(home.in_store, False) or is_rewritten
            first = holding.in_home(run.elements).start - run.elements.start * holding.dtype.itemsize
            kept = FrozenHolding(holding.tensor, holding.shape, holding.box, self, home.in_store, generation.key, first)
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

    def open_for_reading(self, elements: range) -> FrozenElements:
        return FrozenElements(self, *self._place(elements))

    def _place(self, elements: range) -> tuple[int, int]:
        """The offset of consecutive elements of the run in the store, and how many bytes they are."""
        return self.first + elements.start * self.dtype.itemsize, len(elements) * self.dtype.itemsize


class FrozenElements:
    """The part of a `Window` that is used here, over elements that are kept."""

    def __init__(self, holding: FrozenHolding, start: int, nbytes: int) -> None:
        """Their read starts now."""
        self._holding, self._start, self._nbytes = holding, start, nbytes
        page = start // PAGE * PAGE
        self._length = blocks(start + nbytes) - page
        self._memory: torch.Tensor | None = (
            mapped_empty(self._length) if self._length > _SMALL else aligned_empty(self._length)
        )
        self._ticket: Ticket = holding.in_store.read(
            self._memory.data_ptr(), page, self._length, owner=self._memory, keeper=holding.keeper
        )

    def wait(self) -> torch.Tensor:
        """The elements, 1-D. Raises: StoreError."""
        self._ticket.wait()
        self._holding.frozen.bytes_read += self._length
        within = self._start % PAGE
        return self._memory[within : within + self._nbytes].view(self._holding.dtype)

    def close(self) -> None:
        """Nobody uses the memory any more. Returns when a read that is under way has ended, well or not."""
        with contextlib.suppress(StoreError):
            self._ticket.wait()
        self._memory = None
