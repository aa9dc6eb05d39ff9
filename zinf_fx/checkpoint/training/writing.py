"""Pieces flow from where tensors live to data files: some are read while others are summed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zinf_fx.checkpoint.files import Files
from zinf_fx.checkpoint.training.holdings import OrdinaryElements
from zinf_fx.checkpoint.training.layout import PlaceInFile
from zinf_fx.checkpoint.training.under_way import IN_FLIGHT, UnderWay
from zinf_fx.errors import StoreError
from zinf_fx.interrupts import let_through
from zinf_fx.native.engine import File, FileTicket, crc32c_at
from zinf_fx.runtime.memory.buffers import aligned_empty
from zinf_fx.runtime.tensor.windows import Window
from zinf_fx.sizes import PAGE, blocks


class _Piece(NamedTuple):
    """A piece under way: the window over its elements, and what writes them."""

    place: PlaceInFile
    window: Window | OrdinaryElements
    ticket: FileTicket | None = None


class Writer:
    """Writes pieces to data files."""

    def __init__(
        self, files: Files, opened: Sequence[File], report: Callable[[int], object], in_flight: int = IN_FLIGHT
    ) -> None:
        """`report` is told of bytes that were written; `in_flight`: bytes that are being written at a time. Twice as
        many are being read: a read has arrived when the checksums of its pages were compared, too."""
        self._files, self._opened, self._report = files, opened, report
        self._reading: UnderWay[_Piece] = UnderWay(2 * in_flight)
        self._writing: UnderWay[_Piece] = UnderWay(in_flight)
        self._sums: list[int] = []

    def write(self, headers: Sequence[bytes], places: Sequence[PlaceInFile]) -> list[int]:
        """Write the headers of the files and all pieces. Returns the checksum of each piece.

        Raises: StoreError; some is written then.
        """
        self._sums = []
        try:
            begun = -1
            for place in places:
                let_through()
                if place.file != begun:
                    begun = place.file
                    self._begin(self._opened[begun], headers[begun])
                while not self._reading.has_room(place.nbytes):
                    self._write_first()
                self._reading.add(_Piece(place, self._open(place)), place.nbytes)
            while self._reading:
                self._write_first()
            while self._writing:
                self._end_first()
        except BaseException:
            self._give_up()
            raise
        return self._sums

    def _begin(self, file: File, header: bytes) -> None:
        memory = aligned_empty(len(header))
        memory[:] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._files.start_write(file, memory.data_ptr(), 0, len(header), memory).wait()

    def _open(self, place: PlaceInFile) -> Window | OrdinaryElements:
        """A window, for which there may be room only when those that are open are gone."""
        while True:
            try:
                return place.run.holding.open_for_reading(place.elements)
            except StoreError:
                if self._writing:
                    self._end_first()
                elif self._reading:
                    self._write_first()
                else:
                    raise

    def _write_first(self) -> None:
        place, window, _ = self._reading.first
        memory = window.wait()
        known = place.run.holding.checksum(place.elements)
        self._sums.append(crc32c_at(memory.data_ptr(), place.nbytes) if known is None else known)
        if memory.data_ptr() % PAGE or place.nbytes % PAGE:
            memory = _in_pages(memory, place.nbytes)
        while not self._writing.has_room(place.nbytes):
            self._end_first()
        file, nbytes = self._opened[place.file], blocks(place.nbytes)
        ticket = self._files.start_write(file, memory.data_ptr(), place.offset, nbytes, memory)
        self._writing.add(_Piece(place, window, ticket), place.nbytes)
        self._reading.end_first()

    def _end_first(self) -> None:
        place, window, ticket = self._writing.first
        ticket.wait()
        self._writing.end_first()
        window.close()
        self._report(place.nbytes)

    def _give_up(self) -> None:
        """Give back the windows, once nothing is written from them."""
        for piece in (*self._writing, *self._reading):
            if piece.ticket is not None:
                _ended(piece.ticket)
            piece.window.close()
        self._writing.clear()
        self._reading.clear()


def _ended(ticket: FileTicket) -> None:
    """Wait for a transfer that may fail: another failure is on its way to the caller."""
    try:
        ticket.wait()
    except StoreError:
        return


def _in_pages(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A copy in whole pages, with zeros behind the bytes."""
    pages = aligned_empty(nbytes)
    pages[:nbytes] = memory.contiguous().view(torch.uint8)
    pages[nbytes:] = 0
    return pages
