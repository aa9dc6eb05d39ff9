"""Ranks see, before a graph's first collective, that all of them are about to start the same ones in the same order.

[Note: order]
Each rank compiles for the sizes of its own batches, whenever it meets new ones, so one rank may run a graph that it has
compiled just now while another runs one of the first step. What has to be equal is the sequence of collectives: it
follows from the plan, from what is still in memory of earlier graphs, and from which gradients are reduced now. Before
a graph, ranks compare a number that stands for these, in one small collective. Whether they do must itself be the same
on all of them, so the plan says it: forward and backward graphs do, where either starts collectives, also in a run that
starts none. A plan without any, as of a frozen part that every rank has all of, concerns no other rank. What other
ranks updated may be gathered by a graph of such a plan, too: all ranks know that after the same step.

Where plans agree, and what is in memory doesn't (a graph that was compiled just now has no successor yet whose tiles it
could fetch), all ranks drop what is in memory, and begin anew. What other ranks updated is gathered once a graph that
uses it has begun, and not in advance: ranks may expect different graphs. Replicas that eager code wrote to, on any
rank, take over those of the first rank with the first run, on any rank, of a graph before which ranks compare. Where
plans disagree, no collective is started: all ranks raise an error that says what each of them was about to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NoReturn

from zinf_fx.errors import RanksError
from zinf_fx.plan.collectives import collectives_in, common_to_ranks
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile
from zinf_fx.runtime.execute.tile_cache import TileCache
from zinf_fx.runtime.execute.tiles import TileState
from zinf_fx.runtime.gradients.backward import BackwardGradients
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile

_SHOWN = 160  # characters of a line that an error shows
_UNSHOWN = "what has the same description"


class CollectiveOrder:
    """The collectives over the ranks that one planned graph starts, as far as these are known before it runs."""

    def __init__(self, plan: Plan, kind: GraphKind) -> None:
        self._plan, self._schedule = plan, plan.graph(kind)
        self._is_first = True  # run of the graph
        # A fetch by itself does not tell: of a frozen parameter it gathers nothing.
        self._compares = any(event.kind != "fetch" for graph in plan.graphs for event in collectives_in(graph))
        events = collectives_in(self._schedule)
        # Each once, in order: what a run does with the tile the first time decides for the others.
        self._gathered, self._refreshed, self._reduced = (
            list(dict.fromkeys(event.tile for event in events if event.kind == kind))
            for kind in ("allgather", "fetch", "reduce_scatter")
        )
        used = dict.fromkeys(event.tile for event in self._schedule.events)
        self._replicated = [tile for tile in used if _is_replicated(self._schedule.tiles[tile])]
        self._tiles = list(dict.fromkeys([*(event.tile for event in events), *self._replicated]))

    @property
    def _name(self) -> str:
        first, *further = [self._schedule.tiles[tile].label for tile in self._tiles]
        and_more = f" and {len(further)} more" if further else ""
        return f"the {self._schedule.kind} graph with {first}{and_more}"

    @cached_property
    def _digest(self) -> int:
        return _number(self._schedule.kind, common_to_ranks(self._plan))

    def is_common(
        self,
        storages: Sequence[StoredTile],
        cache: TileCache,
        gradients: BackwardGradients | None,
        has_successor: bool,
    ) -> bool:
        """Whether what is in memory, and what is known of the graph's successor, is the same on all ranks, so that the
        run starts the same collectives on each. Where it isn't, nothing stays; nor is anything to be started for the
        successor, or to be there in advance.

        Raises: RanksError, on all ranks, where other graphs are about to run, or gradients are reduced on some only.
        """
        is_first, self._is_first = self._is_first, False
        many = [ranks for ranks in dict.fromkeys(storages[tile].ranks for tile in self._tiles) if ranks.size > 1]
        # Of each tile that this run refreshes, or of whose gradient it reduces some, which of its parameters.
        stale = {tile: [member.shard.stale for member in storages[tile].members] for tile in self._refreshed}
        stale = {tile: of_members for tile, of_members in stale.items() if any(of_members)}
        if not many or not (self._compares or stale):
            return True
        reduced = {} if gradients is None else {tile: gradients.reduced_now(tile) for tile in self._reduced}
        takes_over = is_first and any(not member.shard.agreed for _, member in self._replicas(storages))
        # Of those here, nothing is started again.
        here = [cache.present(storages[tile], self._schedule.tiles[tile]) for tile in self._gathered]
        gathered = [tile is not None and tile.state is TileState.GATHERED for tile in here]
        gathered += [cache.present(storages[tile], self._schedule.tiles[tile]) is not None for tile in stale]
        expects = has_successor and self._schedule.kind == "forward"
        refreshes = [(self._names_numbers[tile], of_members) for tile, of_members in stale.items()]
        numbers = [_number(self._digest, refreshes, list(reduced.values())), _number(gathered, takes_over, expects)]
        common = True
        for ranks in many:
            same_order, same_state = ranks.alike(numbers, f"the collectives of {self._name}")
            if not same_order:
                due = self._due_now(stale, reduced)
                _refuse(ranks, self._name, [self._schedule.kind, *common_to_ranks(self._plan), *due])
            common = common and same_state
            if takes_over or not same_state:
                self._take_over(ranks, storages)
        if not common:
            cache.drop_staying()
        return common

    @cached_property
    def _names_numbers(self) -> dict[int, int]:
        """By tile that may be refreshed, a number that stands for its parameters: other ranks may have other tiles
        besides, which are never stale."""
        return {tile: _number(_names(self._schedule.tiles[tile])) for tile in self._refreshed}

    def _replicas(self, storages: Sequence[StoredTile]) -> Iterator[tuple[str, TensorStorage]]:
        """The parameters that several ranks have the same elements of, with their names."""
        for tile in self._replicated:
            yield from zip(_names(self._schedule.tiles[tile]), storages[tile].members, strict=True)

    def _take_over(self, ranks: Ranks, storages: Sequence[StoredTile]) -> None:
        """Give every rank the first one's elements of the replicas that all ranks use in this graph and that eager code
        wrote to on any of them."""
        replicas = {name: member for name, member in self._replicas(storages) if member.shard.ranks is ranks}
        written = [name for name, member in replicas.items() if not member.shard.agreed]
        by_rank = ranks.of_all((list(replicas), written), "what eager code wrote to")
        for name in dict.fromkeys(name for _, names in by_rank for name in names):
            if all(name in names for names, _ in by_rank):
                replicas[name].shard.agreed = False
                replicas[name].agree()

    def _due_now(self, stale: Mapping[int, Sequence[bool]], reduced: Mapping[int, Sequence[bool]]) -> Iterator[str]:
        """What a run starts that doesn't follow from the plan alone, in words: it gathers what other ranks have
        updated, and reduces gradients, unless they are accumulated first."""
        for what, tiles in (("refresh", stale), ("reduction of the gradient", reduced)):
            for tile, of_members in tiles.items():
                names = _names(self._schedule.tiles[tile])
                if due := [name for name, is_due in zip(names, of_members, strict=True) if is_due]:
                    yield f"the {what} of {', '.join(due)}"


def _refuse(ranks: Ranks, graph: str, lines: Sequence[str]) -> NoReturn:
    """Raise what all ranks raise, each with what it was about to run, and to do, in `lines`."""
    graphs, by_rank = zip(*ranks.of_all((graph, lines), "what ranks are about to run"), strict=True)
    places = range(max(map(len, by_rank)))
    texts = ([of_rank[place] if place < len(of_rank) else "nothing more" for of_rank in by_rank] for place in places)
    differing = next((text for text in texts if len(set(text)) > 1), [_UNSHOWN] * len(graphs))
    shown = "; ".join(f"rank {rank}: {_around_difference(text, differing)}" for rank, text in enumerate(differing))
    running = "; ".join(f"rank {rank}: {graph}" for rank, graph in enumerate(graphs))
    raise RanksError(
        f"ranks disagree about the plan of a graph that they are about to run together ({running}). The first "
        f"difference is in: {shown}. No collective was started. All ranks must hold the same model, options and "
        "package versions, and call the same parts of the model in the same order: a part that one rank skips, a batch "
        "that one has more than the others, and no_sync() on some of them make a difference, sizes of batches don't"
    )


def _names(tile: Tile) -> list[str]:
    return [member.name for member in tile.members] or [tile.name]


def _is_replicated(tile: Tile) -> bool:
    return not tile.activation and tile.ranks * tile.replicas > 1 and (tile.replicas > 1 or not tile.partitioned)


def _number(*values: object) -> int:
    """A number of 62 bits that stands for values, alike in all processes."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big") >> 2


def _around_difference(text: str, texts: Sequence[str]) -> str:
    """Return the text, or of a long one what is around the first place where `texts` differ."""
    if len(text) <= _SHOWN:
        return text
    columns = enumerate(zip(*texts, strict=False))
    differing = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, texts)))
    start = max(min(differing, len(text)) - _SHOWN // 2, 0)
    end = start + _SHOWN
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
