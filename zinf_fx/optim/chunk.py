"""A chunk of an optimizer's step: pieces of parameters that share options and states, with their windows open."""

from __future__ import annotations

from contextlib import ExitStack

from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.packed import OpenPack, PackedStates
from zinf_fx.optim.part import OpenPart, OpenPiece
from zinf_fx.optim.recipe import Recipe
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.whole import OpenWhole


class OpenChunk:
    """The windows of a chunk: those of weights and states are opened at construction.

    Attributes:
        number: how many chunks of the step were opened before.
    """

    def __init__(
        self, recipe: Recipe, pieces: tuple[Piece[ParameterStates | PackedStates], ...], number: int = 0
    ) -> None:
        self.recipe, self.number = recipe, number
        self._with_gradient = 0  # of the parts, from the first on
        self.parts: list[OpenPart | OpenPack] = []
        self._close = ExitStack()
        try:
            for piece in pieces:
                if isinstance(piece.owner, PackedStates):
                    part = OpenPack(piece.owner)
                else:
                    part = (OpenWhole if recipe.whole else OpenPiece)(piece, recipe.names, recipe.present)
                self.parts.append(part)
                self._close.callback(part.close)
        except BaseException:
            self.close()
            raise

    @property
    def lacks_gradients(self) -> bool:
        """Whether any part has no gradient open yet."""
        return self._with_gradient < len(self.parts)

    def open_gradients(self) -> None:
        """Open the gradients, which are final, of the parts that have none open yet. Raises: StoreError."""
        while self.lacks_gradients:
            self.parts[self._with_gradient].open_gradient()
            self._with_gradient += 1

    @property
    def is_current(self) -> bool:
        """Whether its windows would not be opened otherwise now."""
        return all(part.is_current for part in self.parts)

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
        return sum(part.states_nbytes for part in self.parts)

    def close(self) -> None:
        """Close the windows that were not stored."""
        self._close.close()
