"""Horizontally fused element-wise operations, over lists of tensors that may be stored: chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from zinf_fx.interrupts import sealed
from zinf_fx.optim.chunks import Piece, chunk_elements, cut, in_turn, opened_ahead
from zinf_fx.optim.elements import Slice, moved, open_elements, open_window
from zinf_fx.runtime.memory.device import Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import drain_after
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window

# The list of step counters: one number for each parameter, and not in its shape.
_COUNTERS = "state_steps"


@dataclass(frozen=True, eq=False)
class Row:
    """What belongs together in the lists of a horizontally fused operation, by the lists' names.

    "self" has the shape that the others have too; "state_steps" has one number.
    """

    operands: dict[str, torch.Tensor]

    @property
    def updated(self) -> tuple[range, ...]:
        """The elements that this rank updates: those of which all operands have the present version here."""
        return min((tensor.storage.share.current for tensor in self.stored), key=lambda parts: sum(map(len, parts)))

    @property
    def in_shares(self) -> bool:
        """Whether each rank updates its own share only."""
        return any(tensor.storage.share.in_shares for tensor in self.stored)

    @property
    def stored(self) -> list[StoredTensor]:
        """The operands that live in the store."""
        return [operand for operand in self.operands.values() if isinstance(operand, StoredTensor)]

    @property
    def bytes_per_element(self) -> int:
        """Bytes of buffers that the update of an element takes; what lives in host memory takes none."""
        return sum(tensor.dtype.itemsize for tensor in self.stored if not tensor.storage.bytes.in_host_memory)


class OpenRows:
    """Pieces of rows with their windows open: wait for them, run the operation on `lists`, `store`, `close`."""

    def __init__(
        self, pieces: Iterable[Piece[Row]], place: Device, written: Collection[str], unread: Collection[str]
    ) -> None:
        """`place`: what runs the operation. `written`, `unread`: names of the lists that it changes, and whose present
        values it ignores."""
        self._written = written
        self._parts: list[dict[str, Window | DeviceWindow | Slice]] = []
        self._stack = ExitStack()
        try:
            for piece in pieces:
                part: dict[str, Window | DeviceWindow | Slice] = {}
                self._parts.append(part)
                for name, operand in piece.parameter.operands.items():
                    if name == _COUNTERS:
                        part[name] = Slice(moved(operand, place))
                    elif isinstance(operand, StoredTensor) and name in unread:
                        part[name] = open_window(operand.storage, place, piece.start, piece.count, load=False)
                    else:
                        part[name] = open_elements(operand, place, piece.start, piece.count)
                    self._stack.callback(part[name].close)
        except BaseException:
            self.close()
            raise

    def lists(self) -> dict[str, list[torch.Tensor]]:
        """The operation's lists, of flat pieces, once they are there."""
        return {name: [part[name].wait() for part in self._parts] for name in self._parts[0]}

    def store(self) -> None:
        """Start writing back what the operation changed."""
        for part in self._parts:
            for name, window in part.items():
                if name in self._written and not isinstance(window, Slice):
                    window.store()

    def close(self) -> None:
        """Give back what was not stored."""
        self._stack.close()


@sealed
def update_in_chunks(
    rows: Sequence[Row],
    place: Device,
    update: Callable[[dict[str, list[torch.Tensor]]], None],
    written: Collection[str],
    unread: Collection[str] = (),
) -> None:
    """Call `update` with the lists of each chunk of `rows`, of flat pieces, while the next one is read and the one
    before written (ZeRO-Infinity, section 5.2.2). Each row has a stored tensor in it. All is in the store at the end.

    `place`: what computes. `written`, `unread`: names of the lists that `update` changes, and whose present values it
    ignores.

    Raises: StoreError; some elements are updated then, and others not.
    """
    stored = [tensor for row in rows for tensor in row.stored]
    tiers = list({id(tiers): tiers for tiers in (tensor.storage.usable_tiers() for tensor in stored)}.values())
    bytes_per_element = max(row.bytes_per_element for row in rows)
    elements = chunk_elements(min(tensor.storage.config.chunk for tensor in stored), bytes_per_element, tiers)

    def open_rows(numbered: tuple[int, tuple[Piece[Row], ...]]) -> OpenRows:
        number, pieces = numbered
        with in_turn(tiers, number, elements * bytes_per_element):
            return OpenRows(pieces, place, written, unread)

    try:
        shares = [(row, row.updated) for row in rows]
        opened = opened_ahead(enumerate(cut(shares, elements)), open_rows)
        with closing(opened):
            for chunk in opened:
                with closing(chunk):
                    update(chunk.lists())
                    chunk.store()
                for each in tiers:
                    each.limit_writes(elements * bytes_per_element)
        for row in rows:
            in_shares = row.in_shares
            for name, operand in row.operands.items():
                if name in written and isinstance(operand, StoredTensor) and not operand.storage.share.partitioned:
                    operand.storage.share.stale = in_shares
        for each in tiers:
            each.drain()
    except BaseException as error:
        drain_after(error, tiers)
        raise
