"""A chunk of an optimizer's step: pieces of parameters that share options and states, with their windows open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from zinf_fx.optim.arithmetic import Group
from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.whole import OpenWhole
from zinf_fx.optim.windows import OpenPiece
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tiers import Tiers


@dataclass(frozen=True, eq=False)
class Run:
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

    def __init__(
        self, run: Run, pieces: tuple[Piece[StoredTensor], ...], stored: dict[torch.Tensor, ParameterStates]
    ) -> None:
        self.run = run
        self.parts: list[OpenPiece | OpenWhole] = []
        self._close = ExitStack()
        try:
            for piece in pieces:
                part = (OpenWhole if run.whole else OpenPiece)(piece, stored[piece.parameter], run.names, run.present)
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

    def states_nbytes(self, stored: dict[torch.Tensor, ParameterStates]) -> int:
        """Bytes of the states that its update changes, masters among them."""
        return sum(
            part.piece.count * sum(t.dtype.itemsize for t in stored[part.piece.parameter].tensors.values())
            for part in self.parts
        )

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()


def lease_scratch(
    place: Device, states: Sequence[ParameterStates], elements: int, tiers: Tiers, close: ExitStack
) -> torch.Tensor:
    """Memory for what chunks of `elements` elements have in other dtypes than that of the update; `close` gives it
    back."""
    at_a_time = min(AT_A_TIME, elements) if place is CPU else elements
    shape = (max(each.scratch_rows for each in states), at_a_time, max(each.dtype.itemsize for each in states))
    if place is not CPU:
        return torch.empty(shape, dtype=torch.uint8, device=place.torch_device)
    nbytes = math.prod(shape)
    with tiers.stepping(range(nbytes)):  # not in the middle of a chunk's part of the room
        buffer = tiers.lease(nbytes)
    close.callback(buffer.release)
    return buffer.tensor(shape, torch.uint8)
