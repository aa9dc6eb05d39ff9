"""The memory that the chunks of one step pass through."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch

from zinf_fx.optim.chunk import OpenChunk
from zinf_fx.optim.chunks import Piece, chunk_elements, in_turn, part_of
from zinf_fx.optim.recipe import Recipe
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.update_batch import Bytes, UpdateBatch
from zinf_fx.optim.workers import lanes_for
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.tiers import Tiers


class ChunkMemory:
    """How large chunks are, where each is opened, and which writes must end before.

    Attributes:
        tiers: those that the parameters live in.
        elements: of a chunk; 0 until `plan`.
        count: of the chunks that there may be at a time; CHUNKS until `plan`.
        opened: how many chunks were.
        behind: whether a chunk was updated since writes were waited for.
    """

    def __init__(self, stored: dict[torch.Tensor, ParameterStates]) -> None:
        self.tiers: list[Tiers] = []
        self.elements = self._chunk_written = self._chunk_bytes = self.opened = 0
        self.behind, self.count = False, CHUNKS
        self._stored = stored
        self._lanes = 1, 0
        self._scratch: dict[Device, torch.Tensor] = {}
        self._close = ExitStack()

    def plan(self, batch: UpdateBatch) -> None:
        """Decide how large the chunks of `batch`, and of all that may come, are: as configured, unless other room is
        planned."""
        more = len(self._stored) > len(batch.parameters)
        each = Bytes.of(self._stored.values()) if more else batch.bytes_per_element
        self.elements = chunk_elements(batch.chunk_bytes, each.all, self.tiers)
        self.count = min(tiers.chunk_count for tiers in self.tiers)
        self._lanes = lanes_for(self.elements)
        self._chunk_written = self.elements * each.written
        self._chunk_bytes = self.elements * each.opened

    def open(self, recipe: Recipe, pieces: Sequence[Piece[ParameterStates]]) -> OpenChunk:
        """Open the next chunk, but for its gradients."""
        converts = not recipe.whole and any(piece.owner.scratch_rows for piece in pieces)
        if converts and recipe.place not in self._scratch:
            self._scratch[recipe.place] = self._lease_scratch(recipe.place)
        with in_turn(self.tiers, self._next_part):
            chunk = OpenChunk(recipe, pieces, self.opened)
        self.opened += 1
        return chunk

    def open_gradients(self, chunk: OpenChunk) -> None:
        """Open the gradients of a chunk, as far as an interrupt left that to be done."""
        if chunk.lacks_gradients:  # else there is no room to be waited for
            with in_turn(self.tiers, self._part(chunk.number)):
                chunk.open_gradients()

    def again(self) -> ChunkMemory:
        """That of the next step, which has chunks of the same sizes."""
        other = ChunkMemory(self._stored)
        other.tiers, other.elements, other.count = list(self.tiers), self.elements, self.count
        other._chunk_written, other._chunk_bytes = self._chunk_written, self._chunk_bytes
        other._lanes = self._lanes
        return other

    @property
    def _next_part(self) -> range:
        """Of the room that is planned for chunks, what is the next one's."""
        return self._part(self.opened)

    def _part(self, number: int) -> range:
        scratch = self._scratch[CPU].nbytes if CPU in self._scratch else 0
        return part_of(number, self._chunk_bytes, behind=scratch, count=self.count)

    def _lease_scratch(self, place: Device) -> torch.Tensor:
        """Memory for what chunks have in other dtypes than that of the update."""
        states = self._stored.values()
        lanes, piece = self.lanes_at(place)
        count = max(lanes * piece, min(AT_A_TIME, self.elements))
        shape = (max(each.scratch_rows for each in states), count, max(each.dtype.itemsize for each in states))
        if place is not CPU:
            return torch.empty(shape, dtype=torch.uint8, device=place.torch_device)
        nbytes = math.prod(shape)
        with self.tiers[0].stepping(range(nbytes)):  # not in the middle of a chunk's part of the room
            buffer = self.tiers[0].lease(nbytes)
        self._close.callback(buffer.release)
        return buffer.tensor(shape, torch.uint8)

    def lanes_at(self, place: Device) -> tuple[int, int]:
        """How many pieces of a chunk are updated there at the same time, and how many elements each has at most: as it
        was when the sizes of chunks were decided."""
        return self._lanes if place is CPU else (1, self.elements)

    def scratch_at(self, place: Device) -> torch.Tensor | None:
        """Memory for what chunks there have in other dtypes, if anything."""
        return self._scratch.get(place)

    @property
    def writes_enough(self) -> bool:
        """Whether the disk has writes to do for a while, so that the next chunk can wait until it is needed: what it
        changes is read from memory until that is written."""
        one = self._chunk_written
        return self.count > CHUNKS and not all(tiers.chunk_writes.at_most(one) for tiers in self.tiers)

    @property
    def has_room(self) -> bool:
        """Whether the next chunk can be opened without waiting for writes."""
        few = not self._is_limited or all(tiers.writes.at_most(self._chunk_written) for tiers in self.tiers)
        return few and all(tiers.is_vacant(self._next_part) for tiers in self.tiers)

    def wait_for_room(self) -> None:
        """Wait until the writes before the last update's are done; of more chunks than CHUNKS, each waits for its part
        alone, where it is opened."""
        if self._is_limited:
            for tiers in self.tiers:
                tiers.limit_writes(self._chunk_written)
            self.behind = False

    @property
    def _is_limited(self) -> bool:
        """Whether a chunk waits for the writes of those before the last. More chunks than the least have room that is
        planned for nothing else, and each waits for what is written from its part."""
        return self.behind and self.count == CHUNKS

    def drain(self) -> None:
        """Wait for all writes. Raises: StoreError."""
        for tiers in self.tiers:
            tiers.drain()

    def close(self, chunks: Collection[OpenChunk]) -> None:
        """Close the chunks that are open, and give back what they had besides."""
        with self._close:
            self._scratch.clear()
            for chunk in chunks:
                self._close.callback(chunk.close)
