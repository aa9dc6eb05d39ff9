"""The storages that the tokens among a graph's inputs stand for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_

import torch

from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.tensor.pack import Pack, Stored
from zinf_fx.runtime.tensor.storage import TensorStorage


class Inputs:
    """Finds the storages of a graph's tiles from the tokens of each call; once, for as long as these are the same.

    It doesn't keep the storages of parameters alive: compiled code may outlive its model.

    Attributes:
        parameters: the tiles of parameters.
    """

    def __init__(
        self, tiles: Sequence[Tile], positions: Sequence[int | None], packed: Mapping[int, Sequence[int]]
    ) -> None:
        """`positions`: by tile, where its token is among the inputs; None: it has none there. `packed`: by the tile of
        a pack, where the tokens of its parameters are."""
        self._tiles, self._packed = tiles, packed
        given = {tile: position for tile, position in enumerate(positions) if position is not None}
        self._activations = {tile: position for tile, position in given.items() if tiles[tile].activation}
        self._alone = {tile: position for tile, position in given.items() if not tiles[tile].activation}
        self.parameters = sorted([*self._alone, *packed])
        self._positions = [*self._alone.values(), *(position for several in packed.values() for position in several)]
        self._tokens: list[torch.Tensor] | None = None  # of the last call
        self._last: list[weakref.ref[Stored]] = []  # of parameters

    def storages(self, arguments: Sequence[object]) -> tuple[list[Stored | None], bool]:
        """Those of the tiles, None for one that has none; and whether those of parameters are the last call's."""
        tokens = [arguments[position] for position in self._positions]
        if self._tokens is not None and all(map(is_, tokens, self._tokens)):
            parameters, same = [storage() for storage in self._last], True
        else:
            parameters = self._resolved(arguments)
            same = self._tokens is not None and [storage() for storage in self._last] == parameters
            self._tokens, self._last = tokens, [weakref.ref(storage) for storage in parameters]
        found: list[Stored | None] = [None] * len(self._tiles)
        for tile, storage in zip(self.parameters, parameters, strict=True):
            found[tile] = storage
        for tile, position in self._activations.items():
            found[tile] = TensorStorage.of_token(arguments[position])
        return found, same

    def last(self) -> dict[int, Stored]:
        """By tile, the storages of the last call's parameters that are alive."""
        if self._tokens is None:
            return {}
        found = {tile: storage() for tile, storage in zip(self.parameters, self._last, strict=True)}
        return {tile: storage for tile, storage in found.items() if storage is not None}

    def _resolved(self, arguments: Sequence[object]) -> list[Stored]:
        found: dict[int, Stored] = {
            tile: TensorStorage.of_token(arguments[position]) for tile, position in self._alone.items()
        }
        for tile, positions in self._packed.items():
            members = [TensorStorage.of_token(arguments[position]) for position in positions]
            found[tile] = Pack.of(members, self._tiles[tile])
        return [found[tile] for tile in self.parameters]
