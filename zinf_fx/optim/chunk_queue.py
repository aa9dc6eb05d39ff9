"""The chunks of one step, from a parameter that came until its chunk is to be updated."""

from __future__ import annotations

from collections import deque

from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunk_memory import ChunkMemory
from zinf_fx.optim.chunks import Piece, all_of, cut
from zinf_fx.optim.packed import PackedStates, packed
from zinf_fx.optim.progress import Progress
from zinf_fx.optim.recipe import Recipe
from zinf_fx.optim.states import ParameterStates
from zinf_fx.plan.memory.accounting import CHUNKS_AHEAD

Owner = ParameterStates | PackedStates
"""What a piece is of."""


class ChunkQueue:
    """Parameters that came are cut into chunks, and these opened some ahead of the update.

    Chunks are in the order in which their tensors were made, which is about the order in which forward will ask for
    them; of parameters that come one by one, whatever fills a chunk goes first.
    """

    def __init__(self, memory: ChunkMemory, progress: Progress) -> None:
        self._memory, self._progress = memory, progress
        self._loose: dict[Recipe, list[ParameterStates]] = {}  # not cut into chunks yet
        self._unopened: deque[tuple[Recipe, tuple[Piece[Owner], ...]]] = deque()
        self._opened: deque[OpenChunk] = deque()

    def __bool__(self) -> bool:
        """Whether any chunk is to be updated still."""
        return bool(self._opened or self._unopened or self._loose)

    def add(self, recipe: Recipe, states: ParameterStates) -> None:
        """A parameter came."""
        self._loose.setdefault(recipe, []).append(states)

    @property
    def fills_a_chunk(self) -> bool:
        """Whether the parameters that came have the elements of a chunk, or nothing says how many that are."""
        loose = (states for several in self._loose.values() for states in several)
        elements = sum(len(part) for states in loose for part in states.updated)
        return elements >= self._memory.elements

    def cut(self) -> None:
        """Cut what came into chunks."""
        if not self._loose:
            return
        if not self._memory.elements:
            every = (states.parameter.storage for loose in self._loose.values() for states in loose)
            self._memory.plan(min(storage.config.chunk for storage in every))
        chunks: list[tuple[Recipe, tuple[Piece[Owner], ...]]] = []
        every = ((recipe, states) for recipe, loose in self._loose.items() for states in loose)
        owners: dict[Recipe, list[Owner]] = {}
        for updates in packed(sorted(every, key=lambda update: update[1].parameter.storage.key), self._memory.elements):
            recipe, states = updates[0]
            owners.setdefault(recipe, []).append(states if len(updates) == 1 else PackedStates(updates))
        for recipe, loose in owners.items():
            if recipe.whole:
                chunks += [(recipe, (all_of(states, states.parameter.numel()),)) for states in loose]
                continue
            shares = [(states, states.updated) for states in loose]
            cuts = cut(shares, self._memory.elements, whole=lambda owner: isinstance(owner, PackedStates))
            chunks += [(recipe, pieces) for pieces in cuts]
        chunks.sort(key=lambda chunk: chunk[1][0].owner.parameter.storage.key)
        with self._progress.changing():
            self._loose.clear()
            self._unopened += chunks

    @property
    def ready(self) -> bool:
        """Whether a chunk can be updated without waiting for reads, or for writes to make room."""
        if not self._memory.has_room:
            return False
        self._open_ahead()
        return bool(self._opened) and self._opened[0].ready

    def first(self) -> OpenChunk:
        """The chunk that is next, opened."""
        if not self._opened and not self._unopened:
            self.cut()
        self._open_ahead()
        return self._opened[0]

    def take_first(self) -> None:
        """It is not in the queue any more."""
        self._opened.popleft()

    def _open_ahead(self) -> None:
        """Open chunks until CHUNKS_AHEAD follow the next one, when the writes before the last update's are done."""
        self._memory.wait_for_room()
        while self._unopened and len(self._opened) <= CHUNKS_AHEAD:
            recipe, pieces = self._unopened[0]
            if recipe.whole and self._opened and pieces[0].count > self._memory.elements:
                break  # what is larger than a chunk comes alone
            with self._memory.turn(recipe, pieces):
                self._opened.append(OpenChunk(recipe, pieces))
            self._unopened.popleft()

    def close(self) -> None:
        """Forget what is left, and give the memory back."""
        self._loose.clear()
        self._unopened.clear()
        opened, self._opened = self._opened, deque()
        self._memory.close(opened)
