"""Operations that change each element of stored tensors by itself, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import torch

from zinf_fx.interrupts import sealed
from zinf_fx.optim.chunks import Piece, chunk_elements, cut, in_turn, opened_ahead, part_of
from zinf_fx.optim.elements import open_window
from zinf_fx.optim.opened import OpenWindows
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import drain_after


class OpenPieces(OpenWindows):
    """Pieces of stored tensors with their windows open: wait for them, change them, `store`, `close`."""

    def __init__(self, pieces: Iterable[Piece[StoredTensor]], place: Device) -> None:
        """`place`: what computes."""
        super().__init__()
        try:
            for piece in pieces:
                self._keep(open_window(piece.owner.storage, place, piece.start, piece.count))
        except BaseException:
            self.close()
            raise

    def wait(self) -> list[torch.Tensor]:
        """The pieces, flat, once they are there."""
        return [window.wait() for window in self._windows]

    def store(self) -> None:
        """Start writing back what was changed."""
        for window in self._windows:
            window.store()


@sealed
def update_in_chunks(
    tensors: Sequence[StoredTensor], place: Device, update: Callable[[list[torch.Tensor]], None]
) -> None:
    """Call `update`, which changes each element by itself, with the flat pieces of each chunk of `tensors`, while the
    next one is read and the one before written (ZeRO-Infinity, section 5.2.2). All is in the store at the end. `place`:
    what computes.

    Raises: StoreError; some elements are updated then, and others not.
    """
    tiers = list({id(tiers): tiers for tiers in (tensor.storage.usable_tiers() for tensor in tensors)}.values())
    moved = (t.dtype.itemsize for t in tensors if not t.storage.bytes.in_host_memory)
    bytes_per_element = max(moved, default=0)
    elements = chunk_elements(min(tensor.storage.config.chunk for tensor in tensors), bytes_per_element, tiers)

    nbytes = elements * bytes_per_element
    # At the end of the room, whose beginning may have what is read for the step.
    behind = max(min(each.chunk_room for each in tiers) - CHUNKS * nbytes, 0)

    def open_pieces(numbered: tuple[int, tuple[Piece[StoredTensor], ...]]) -> OpenPieces:
        number, pieces = numbered
        with in_turn(tiers, part_of(number, nbytes, behind)):
            return OpenPieces(pieces, place)

    try:
        shares = [(tensor, tensor.storage.share.current) for tensor in tensors]
        with closing(opened_ahead(enumerate(cut(shares, elements)), open_pieces)) as opened:
            for chunk in opened:
                with closing(chunk):
                    update(chunk.wait())
                    chunk.store()
                for each in tiers:
                    each.limit_writes(nbytes)
        for each in tiers:
            each.drain()
    except BaseException as error:
        drain_after(error, tiers)
        raise
