"""How pieces of tensors lie in data files: each begins at a multiple of 4096 bytes, in the safetensors format, so that
other programs can read them too. What fills the pages is a tensor of its own there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zinf_fx.checkpoint.safetensors_file import beginning, name_of
from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.sizes import PAGE, blocks

LARGEST_FILE = 4 << 30
"""Bytes of a data file, about: what is behind that goes to another one."""


LARGEST_PIECE = 8 << 20
"""Bytes of a piece that is copied, at most: several are under way at a time."""


@dataclass(frozen=True)
class SavedRun:
    """Consecutive elements of a rank's part of a tensor, which it is to save."""

    name: str
    holding: Holding
    elements: range

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return len(self.elements) * self.holding.dtype.itemsize


@dataclass(frozen=True)
class PlaceInFile:
    """Where some elements of a run are to be: the number of the file, and the offset in it."""

    run: SavedRun
    elements: range
    file: int
    offset: int

    @cached_property
    def nbytes(self) -> int:
        """Of the elements."""
        return len(self.elements) * self.run.holding.dtype.itemsize


_Piece = tuple[SavedRun, range, int]
"""Some elements of a run, and the bytes before them in their file, but for its header."""


@dataclass(frozen=True)
class Layout:
    """Which elements are where in which file, and how the files begin and how long they are."""

    places: tuple[PlaceInFile, ...]
    headers: tuple[bytes, ...]
    sizes: tuple[int, ...]


def laid_out(runs: Iterable[SavedRun], largest: int = LARGEST_FILE) -> Layout:
    """A layout of runs, in their order, in files of about `largest` bytes at most."""
    files: list[list[list[_Piece]]] = []  # of each, pieces in a row of the same run
    filled = largest
    for run in runs:
        row, itemsize = None, run.holding.dtype.itemsize
        for elements in run.holding.chunks(run.elements, LARGEST_PIECE):
            nbytes = blocks(len(elements) * itemsize)
            if filled + nbytes > largest:
                files.append([])
                filled, row = 0, None
            if row is None:
                row = []
                files[-1].append(row)
            row.append((run, elements, filled))
            filled += nbytes
    headers = [_header(entries) for entries in files]
    places = [
        PlaceInFile(run, elements, number, len(headers[number]) + offset)
        for number, rows in enumerate(files)
        for row in rows
        for run, elements, offset in row
    ]
    ends = {one.file: blocks(one.offset + one.nbytes) for one in places}
    return Layout(tuple(places), tuple(headers), tuple(ends[number] for number in range(len(files))))


def _header(entries: Sequence[Sequence[_Piece]]) -> bytes:
    """How a safetensors file begins, in whole pages. `entries`: its tensors, each as pieces in a row."""
    described: dict[str, dict] = {}
    for row in entries:
        (run, first, begin), (_, last, offset) = row[0], row[-1]
        holding, elements = run.holding, range(first.start, last.stop)
        end = offset + len(last) * holding.dtype.itemsize
        shape = list(holding.box.shape) if len(elements) == holding.box.numel else [len(elements)]
        dtype = name_of(holding.dtype)
        if dtype is None:
            dtype, shape = "U8", [end - begin]
        name = run.name + _suffix(holding, elements)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        if (padded := blocks(end)) > end:
            described[f"padding at {end}"] = {"dtype": "U8", "shape": [padded - end], "data_offsets": [end, padded]}
    return beginning(described, PAGE)


def _suffix(holding: Holding, elements: range) -> str:
    """What tells a part of a tensor from others."""
    corner = "" if holding.box == Box.whole(holding.shape) else f" from {list(holding.box.offsets)}"
    part = "" if len(elements) == holding.box.numel else f", elements {elements.start} to {elements.stop}"
    return corner + part
