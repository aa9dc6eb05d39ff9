"""Ranks see, before a graph's first collective, that all of them are about to start the same ones in the same order.

[Note: order]
Each rank compiles for the sizes of its own batches, whenever it meets new ones, so one rank may run a graph that it has
compiled just now while another runs one of the first step. What has to be equal is the sequence of collectives: it
follows from the plan, from what is still in memory of earlier graphs, and from which gradients are reduced now. Before
a graph that starts any, ranks compare a number that stands for these, in one small collective.

Where plans agree, and what is in memory doesn't (a graph that was compiled just now has no successor yet whose tiles it
could fetch), all ranks drop what is in memory, and begin anew. What other ranks updated is gathered once a graph that
uses it has begun, and not in advance: ranks may expect different graphs. Replicas that eager code wrote to take over
those of the first rank with the first run of a graph, on any rank. Where plans disagree, no collective is started: all
ranks raise an error that says what each of them was about to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NoReturn

from zinf_fx.errors import RanksError
from zinf_fx.plan.collectives import collectives_in, common_to_ranks
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind, Tile
from zinf_fx.runtime.execute.flying import TileState
from zinf_fx.runtime.execute.staging import Staging
from zinf_fx.runtime.gradients.leaving import LeavingGradients
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.pack import Stored
from zinf_fx.runtime.tensor.storage import TensorStorage

_SHOWN = 160  # characters of a line that an error shows


class CollectiveOrder:
    """The collectives over the ranks that one planned graph starts, as far as these are known before it runs."""

    def __init__(self, plan: Plan, kind: GraphKind) -> None:
        self._plan, self._schedule = plan, plan.graph(kind)
        self._is_first = True  # run of the graph
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
        first, *others = [self._schedule.tiles[tile].label for tile in self._tiles]
        several = f" and {len(others)} more" if others else ""
        return f"the {self._schedule.kind} graph with {first}{several}"

    @cached_property
    def _digest(self) -> int:
        return _number(self._schedule.kind, common_to_ranks(self._plan))

    def is_common(
        self,
        storages: Sequence[Stored | None],
        staging: Staging,
        gradients: LeavingGradients | None,
        has_successor: bool,
    ) -> bool:
        """Whether what is in memory, and what is known of the graph's successor, is the same on all ranks, so that the
        run starts the same collectives on each. Where it isn't, nothing stays; nor is anything to be started for the
        successor, or to be there in advance.

        Raises: RanksError, on all ranks, where other graphs are about to run, or gradients are reduced on some only.
        """
        many = [ranks for ranks in dict.fromkeys(storages[tile].ranks for tile in self._tiles) if ranks.size > 1]
        apart = {
            name: member
            for tile in (self._replicated if many else ())
            for name, member in _members(self._schedule.tiles[tile], storages[tile])
            if not member.share.agreed
        }
        takes_over = self._is_first and bool(apart)
        now = list(self._due_now(storages, gradients)) if many else []
        if not ((many and self._gathered) or now or takes_over):
            return True
        stale = [tile for tile in self._refreshed if any(member.share.stale for member in storages[tile].members)]
        # Of those here, nothing is started again.
        here = [staging.present(storages[tile], self._schedule.tiles[tile]) for tile in self._gathered]
        gathered = [tile is not None and tile.state is TileState.GATHERED for tile in here]
        gathered += [staging.present(storages[tile], self._schedule.tiles[tile]) is not None for tile in stale]
        expects = has_successor and self._schedule.kind == "forward"
        numbers = [_number(self._digest, now), _number(gathered, takes_over, expects)]
        common = True
        for ranks in many:
            same_order, same_state = ranks.alike(numbers, f"the collectives of {self._name}")
            if not same_order:
                _refuse(ranks, self._name, [self._schedule.kind, *common_to_ranks(self._plan), *now])
            common = common and same_state
            if takes_over or not same_state:
                lists = ranks.of_all(list(apart), "what eager code wrote to")
                for name in (name for name in lists[0] if all(name in names for names in lists)):
                    apart[name].agree()
        self._is_first = False
        if not common:
            staging.drop_staying()
        return common

    def _due_now(self, storages: Sequence[Stored | None], gradients: LeavingGradients | None) -> Iterator[str]:
        """What a run starts that doesn't follow from the plan alone: it gathers what other ranks have updated, and
        reduces gradients, unless they are accumulated first."""
        for tile in self._refreshed:
            planned = self._schedule.tiles[tile]
            if stale := [name for name, member in _members(planned, storages[tile]) if member.share.stale]:
                yield f"the refresh of {', '.join(stale)}"
        for tile in self._reduced:
            names = [name for name, _ in _members(self._schedule.tiles[tile], storages[tile])]
            if reduced := [name for name, is_now in zip(names, gradients.reduced_now(tile), strict=True) if is_now]:
                yield f"the reduction of the gradient of {', '.join(reduced)}"


def _refuse(ranks: Ranks, graph: str, lines: Sequence[str]) -> NoReturn:
    """Raise what all ranks raise, each with what it was about to run, and to do, in `lines`."""
    graphs, by_rank = zip(*ranks.of_all((graph, lines), "what ranks are about to run"), strict=True)
    places = range(max(map(len, by_rank)))
    texts = ([some[place] if place < len(some) else "nothing more" for some in by_rank] for place in places)
    differing = next(text for text in texts if len(set(text)) > 1)
    shown = "; ".join(f"rank {rank}: {_around_difference(text, differing)}" for rank, text in enumerate(differing))
    running = "; ".join(f"rank {rank}: {graph}" for rank, graph in enumerate(graphs))
    raise RanksError(
        f"ranks disagree about the plan of a graph that they are about to run together ({running}). The first "
        f"difference is in: {shown}. No collective was started. All ranks must hold the same model, options and "
        "package versions, and call the same parts of the model in the same order: a part that one rank skips, a batch "
        "that one has more than the others, and no_sync() on some of them make a difference, sizes of batches don't"
    )


def _members(planned: Tile, storage: Stored) -> Iterator[tuple[str, TensorStorage]]:
    """The parameters of a tile, with their names."""
    names = [member.name for member in planned.members] or [planned.name]
    return zip(names, storage.members, strict=True)


def _is_replicated(tile: Tile) -> bool:
    return not tile.activation and tile.ranks * tile.replicas > 1 and (tile.replicas > 1 or not tile.partitioned)


def _number(*values: object) -> int:
    """A number of 62 bits that stands for values, alike in all processes."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big") >> 2


def _around_difference(text: str, others: Sequence[str]) -> str:
    """A text, or of a long one what is around the first place where it differs from others."""
    if len(text) <= _SHOWN:
        return text
    columns = enumerate(zip(*others, strict=False))
    differing = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, others)))
    start = max(min(differing, len(text)) - _SHOWN // 2, 0)
    end = start + _SHOWN
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
