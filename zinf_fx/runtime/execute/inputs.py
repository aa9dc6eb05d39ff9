"""The storages that the tokens among a graph's inputs stand for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile
from zinf_fx.runtime.tensor.tiers import Tiers


class Found(NamedTuple):
    """What the tokens of a call stand for.

    Attributes:
        storages: of the tiles; None for one that has none.
        tiers: in which these live.
        same: whether those of parameters are the last call's.
    """

    storages: Storages
    tiers: list[Tiers]
    same: bool


class Storages(Sequence["StoredTile"]):
    """The stored tiles of a graph's tiles, each of which is looked up when somebody asks for it. A tile that has none,
    or whose model is gone, is None, which types don't say: nobody asks for it."""

    def __init__(
        self, parameters: Sequence[Callable[[], StoredTile | None]], activations: Mapping[int, StoredTile]
    ) -> None:
        """`parameters`: by tile, where it is found if it is of parameters. `activations`: the others."""
        self._parameters, self._activations = parameters, activations

    def __getitem__(self, tile: int) -> StoredTile:  # pyright: ignore[reportIncompatibleMethodOverride]  (no slices)
        return self._parameters[tile]() or self._activations.get(tile)  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        return len(self._parameters)


class Inputs:
    """Finds the storages of a graph's tiles from the tokens of each call; once, for as long as these are the same.

    It doesn't keep the storages of parameters alive: compiled code may outlive its model.

    Attributes:
        parameters: the tiles of parameters.
        values: what graphs use of them that is where they compute, by tile, if the program has put it here; until the
            first of the storages is gone.
    """

    def __init__(
        self, tiles: Sequence[Tile], positions: Sequence[int | None], packed: Mapping[int, Sequence[int]]
    ) -> None:
        """`positions`: by tile, where its token is among the inputs; None: it has none there. `packed`: by the tile of
        a pack, where the tokens of its parameters are."""
        self._tiles = tiles
        given = {tile: position for tile, position in enumerate(positions) if position is not None}
        self._activations = {tile: position for tile, position in given.items() if tiles[tile].activation}
        alone = {tile: [position] for tile, position in given.items() if not tiles[tile].activation}
        self._members: dict[int, Sequence[int]] = dict(sorted({**alone, **packed}.items()))
        self.parameters = list(self._members)
        self._positions = [position for positions in self._members.values() for position in positions]
        self.values: Mapping[int, list[torch.Tensor]] = {}
        self._tokens: list[torch.Tensor] | None = None  # of the last call
        self._last: list[Callable[[], StoredTile | None]] = [_nothing] * len(tiles)  # by tile, of parameters
        self._tiers: list[weakref.ref[Tiers]] = []  # in which these live
        mine = weakref.ref(self)

        def forget(gone: object) -> None:
            """A storage of the last call is gone: its token stands for nothing, and nobody is to hold its bytes."""
            if (inputs := mine()) is not None:
                inputs._tokens, inputs.values = None, {}

        self._forget = forget

    def find(self, arguments: Sequence[Any]) -> Found:
        """The storages that the tokens of a call stand for."""
        tokens = [arguments[position] for position in self._positions]
        same = self._tokens is not None and all(map(is_, tokens, self._tokens))
        if not same:
            parameters = self._resolved(arguments)
            same = self._tokens is not None and [self._last[tile]() for tile in self.parameters] == parameters
            references = {
                t: weakref.ref(storage, self._forget) for t, storage in zip(self.parameters, parameters, strict=True)
            }
            self._tokens, self._last = tokens, [references.get(tile, _nothing) for tile in range(len(self._last))]
            self._tiers = list(map(weakref.ref, dict.fromkeys(storage.tiers for storage in parameters)))
        activations = {tile: self._stored(arguments, tile, [p]) for tile, p in self._activations.items()}
        tiers = dict.fromkeys(alive for reference in self._tiers if (alive := reference()) is not None)
        tiers |= dict.fromkeys(storage.tiers for storage in activations.values())
        return Found(Storages(self._last, activations), list(tiers), same)

    def last(self, tile: int) -> StoredTile | None:
        """The storage of a parameter of the last call, if there was one, and it is alive."""
        return self._last[tile]()

    def _resolved(self, arguments: Sequence[Any]) -> list[StoredTile]:
        return [self._stored(arguments, tile, positions) for tile, positions in self._members.items()]

    def _stored(self, arguments: Sequence[Any], tile: int, positions: Sequence[int]) -> StoredTile:
        return StoredTile.of([TensorStorage.of_token(arguments[p]) for p in positions], self._tiles[tile])


class SettledValues:
    """Parameters that are where the graph computes, each once nothing in the background is about to change it."""

    def __init__(self, values: Mapping[int, list[torch.Tensor]], storages: Sequence[StoredTile]) -> None:
        """Both by tile."""
        self._values, self._storages = values, storages

    def __getitem__(self, tile: int) -> list[torch.Tensor]:
        storage = self._storages[tile]
        if storage.tiers.background is not None:
            storage.settled()
        return self._values[tile]


def _nothing() -> None:
    """What a tile without a storage has."""
