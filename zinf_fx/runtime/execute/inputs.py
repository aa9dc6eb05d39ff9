"""The storages that the tokens among a graph's inputs stand for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import is_
from typing import NamedTuple

import torch

from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.tensor.pack import Pack, Stored
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.tiers import Tiers


class Found(NamedTuple):
    """What the tokens of a call stand for.

    Attributes:
        storages: of the tiles; None for one that has none.
        tiers: in which these live.
        same: whether those of parameters are the last call's.
    """

    storages: list[Stored | None]
    tiers: list[Tiers]
    same: bool


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
        self._last: dict[int, weakref.ref[Stored]] = {}  # of parameters, by tile
        self._tiers: list[weakref.ref[Tiers]] = []  # in which these live

    def find(self, arguments: Sequence[object]) -> Found:
        """The storages that the tokens of a call stand for."""
        tokens = [arguments[position] for position in self._positions]
        if self._tokens is not None and all(map(is_, tokens, self._tokens)):
            parameters, same = [storage() for storage in self._last.values()], True
        else:
            parameters = self._resolved(arguments)
            same = self._tokens is not None and [storage() for storage in self._last.values()] == parameters
            references = map(weakref.ref, parameters)
            self._tokens, self._last = tokens, dict(zip(self.parameters, references, strict=True))
            self._tiers = list(map(weakref.ref, dict.fromkeys(storage.tiers for storage in parameters)))
        found: list[Stored | None] = [None] * len(self._tiles)
        for tile, storage in zip(self.parameters, parameters, strict=True):
            found[tile] = storage
        for tile, position in self._activations.items():
            found[tile] = TensorStorage.of_token(arguments[position])
        tiers = dict.fromkeys(reference() for reference in self._tiers)
        tiers |= dict.fromkeys(found[tile].tiers for tile in self._activations)
        return Found(found, list(tiers), same)

    def last(self, tile: int) -> Stored | None:
        """The storage of a parameter of the last call, if there was one, and it is alive."""
        return self._last[tile]() if tile in self._last else None

    def _resolved(self, arguments: Sequence[object]) -> list[Stored]:
        found: dict[int, Stored] = {
            tile: TensorStorage.of_token(arguments[position]) for tile, position in self._alone.items()
        }
        for tile, positions in self._packed.items():
            members = [TensorStorage.of_token(arguments[position]) for position in positions]
            found[tile] = Pack.of(members, self._tiles[tile])
        return [found[tile] for tile in self.parameters]
