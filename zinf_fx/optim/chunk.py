"""A chunk of an optimizer's step: pieces of parameters that share options and states, with their windows open."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from zinf_fx.optim.arithmetic import Group
from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.part import OpenPart, OpenPiece
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.whole import OpenWhole
from zinf_fx.runtime.memory.device import Device


@dataclass(frozen=True, eq=False)
class Recipe:
    """What parameters have in common that may share a chunk: a group, the states present, place and dtype.

    Attributes:
        group: its options when the step took them.
        place: what updates them.
        names: the states that are streamed.
        present: those of them, and of the master, that hold values; the torch class makes the others.
        whole: each is updated whole, in a chunk of its own.
    """

    group: Group
    place: Device
    dtype: torch.dtype
    names: tuple[str, ...]
    present: frozenset[str]
    whole: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states, in memory of its own."""
        return not self.present.issuperset(self.names) or (self.whole and not self.names)


class OpenChunk:
    """The windows of a chunk, opened at construction."""

    def __init__(self, recipe: Recipe, pieces: tuple[Piece[ParameterStates], ...]) -> None:
        self.recipe = recipe
        self.parts: list[OpenPart] = []
        self._close = ExitStack()
        try:
            for piece in pieces:
                part = (OpenWhole if recipe.whole else OpenPiece)(piece, recipe.names, recipe.present)
                self.parts.append(part)
                self._close.callback(part.close)
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether all of its reads are done."""
        return all(part.ready for part in self.parts)

    def arrive(self) -> None:
        """Wait for its reads, and change nothing."""
        for part in self.parts:
            part.arrive()

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that its update changes, masters among them."""
        return sum(
            part.piece.count * sum(t.dtype.itemsize for t in part.piece.owner.tensors.values()) for part in self.parts
        )

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()
