"""Ranks see, before a graph's first collective, that all of them are about to start the same ones in the same order.

[Note: order]
Each rank compiles for the sizes of its own batches, whenever it meets new ones, so one rank may run a graph that it has
compiled just now while another runs one of the first step. What has to be equal is the sequence of collectives: it
follows from the plan, from what is still in memory of earlier graphs, and from which gradients are reduced now. Before
a graph that starts any, ranks compare a number that stands for these: one small all-reduce.

Where plans agree, and what is in memory doesn't (a graph that was compiled just now has no successor yet whose tiles it
could fetch), all ranks drop what is in memory, and begin anew. What other ranks updated is gathered once a graph that
uses it has begun, and not in advance: ranks may expect different graphs. Replicas that eager code wrote to take over
those of the first rank with the first run of a graph, on any rank. Where plans disagree, no collective is started: all
ranks raise an error that says what each of them was about to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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

_SHOWN = 160  # characters of a line that an error shows


class CollectiveOrder:
    """The collectives over the ranks that one planned graph starts, as far as these are known before it runs."""

    def __init__(self, plan: Plan, kind: GraphKind) -> None:
        self._plan, self._schedule = plan, plan.graph(kind)
        events = collectives_in(self._schedule)
        self._tiles = list(dict.fromkeys(event.tile for event in events))
        self._is_first = True  # run of the graph
        used = dict.fromkeys(event.tile for event in self._schedule.events)
        self._replicated = [tile for tile in used if _is_replicated(self._schedule.tiles[tile])]
        # Each once, in order: what a run does with the tile the first time decides for the others.
        self._gathered, self._refreshed, self._reduced = (
            list(dict.fromkeys(event.tile for event in events if event.kind == kind))
            for kind in ("allgather", "fetch", "reduce_scatter")
        )

    @cached_property
    def _lines(self) -> list[str]:
        return common_to_ranks(self._plan)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256("\n".join([self._schedule.kind, *self._lines]).encode()).hexdigest()

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
        apart = [tile for tile in self._replicated if any(not one.share.agreed for one in storages[tile].members)]
        ranks = dict.fromkeys(storages[tile].ranks for tile in dict.fromkeys([*self._tiles, *apart]))
        many = [each for each in ranks if each.size > 1]
        due = [tile for tile in self._gathered if not self._is_gathered(storages[tile], tile, staging)]
        stale = [tile for tile in self._refreshed if self._is_stale(storages[tile], tile, staging)]
        reduced = [(tile, gradients.reduced_now(tile)) for tile in self._reduced]
        takes_over = self._is_first and bool(apart)
        if not many or not (self._gathered or stale or takes_over or any(any(members) for _, members in reduced)):
            return True
        fixed = _number(self._digest, reduced, apart)
        state = _number(due, stale, takes_over, has_successor and self._schedule.kind == "forward")
        common = True
        for each in many:
            same_order, same_state = each.alike([fixed, state], self._what)
            if not same_order:
                self._refuse(each, reduced, apart)
            common = common and same_state
        if takes_over or not common:
            for storage in (storage for tile in apart for storage in storages[tile].members):
                storage.agree()
        self._is_first = False
        if not common:
            staging.drop_staying()
        return common

    def _is_gathered(self, storage: Stored, tile: int, staging: Staging) -> bool:
        flying = staging.present(storage, self._schedule.tiles[tile])
        return flying is not None and flying.state is TileState.GATHERED

    def _is_stale(self, storage: Stored, tile: int, staging: Staging) -> bool:
        stale = any(member.share.stale for member in storage.members)
        return stale and staging.present(storage, self._schedule.tiles[tile]) is None

    @property
    def _what(self) -> str:
        labels = [self._schedule.tiles[tile].label for tile in (self._tiles or self._replicated)]
        first, *others = labels
        several = f" and {len(others)} more" if others else ""
        return f"the collectives of {first}{several} in a {self._schedule.kind} graph"

    def _refuse(self, ranks: Ranks, reduced: Sequence[tuple[int, Sequence[bool]]], apart: Sequence[int]) -> NoReturn:
        labels = [self._schedule.tiles[tile].label for tile, members in reduced if any(members)]
        written = [self._schedule.tiles[tile].label for tile in apart]
        lines = [
            *(f"to run {self._what}", *self._lines),
            f"it reduces the gradients of {', '.join(labels) or 'no parameter'}",
            f"eager code wrote to {', '.join(written) or 'no parameter'}",
        ]
        found = ranks.of_all(lines, "what ranks are about to run")
        places = range(max(map(len, found)))
        texts = ([one[place] if place < len(one) else "nothing more" for one in found] for place in places)
        differing = next(each for each in texts if len(set(each)) > 1)
        shown = (_around_difference(text, differing) for text in differing)
        by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(shown))
        raise RanksError(
            f"ranks disagree about the plan of a graph that they are about to run together ({by_rank}). No collective "
            "was started. All ranks must hold the same model, options and package versions, and call the same parts of "
            "the model in the same order: a part that one rank skips, a batch that one has more than the others, "
            "no_sync() on some ranks only. Sizes of batches may differ"
        )


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
