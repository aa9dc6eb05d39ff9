"""Short names for tiles: what a table has room for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import EventKind, GraphSchedule, Tile


def module_of(name: str) -> str:
    """The module that a parameter belongs to: `blocks.0.mlp.up` for `blocks.0.mlp.up.weight`; a root's is itself."""
    return name.rpartition(".")[0] or name


def first_parameter(tile: Tile) -> str:
    """The parameter that a tile is named after: of a pack, the first."""
    return tile.members[0].name if tile.members else tile.name


def abbreviate(paths: Iterable[str]) -> dict[str, str]:
    """A short, distinct name of each module path: layer numbers, the last word, and the words that tell it from others.

    `blocks.0.attention.qkv` -> `0.qkv`, or, beside `blocks.0.cross.qkv`, `0.attention.qkv`.
    """
    paths = list(dict.fromkeys(paths))
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        alike[_shortened(path, frozenset())].append(path)
    short = {}
    for group in alike.values():
        common = frozenset.intersection(*(frozenset(path.split(".")) for path in group))
        for path in group:
            short[path] = _shortened(path, frozenset(path.split(".")) - common)
    counts = Counter(short.values())
    return {path: short[path] if counts[short[path]] == 1 else path for path in paths}


def _shortened(path: str, telling: frozenset[str]) -> str:
    """The numbers, the last word, and `telling` words of a path."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(part for i, part in enumerate(parts) if i == last or part.isdigit() or part in telling)


def short_names(plan: Plan) -> dict[str, str]:
    """Return the short names of a plan's modules by path, the same in all its tables."""
    return abbreviate(module_of(first_parameter(tile)) for tile in plan.tiles)


class _Group(NamedTuple):
    """Events of one sort that the tiles of a module have in common. `further`: parameters of a pack besides the first,
    whose module it is."""

    kind: EventKind
    ahead: bool
    kept: bool
    module: str
    further: int

    def name(self, short: Mapping[str, str]) -> str:
        """What stands in a cell, with the short names of modules."""
        return short[self.module] + (f"&{self.further}" if self.further else "")


class GraphNames:
    """How one graph's cells name tiles."""

    def __init__(self, plan: Plan, graph: GraphSchedule, short: dict[str, str]) -> None:
        self._graph, self._short, self._lifetimes = graph, short, plan.lifetimes
        self._number = plan.graphs.index(graph)
        self._together: dict[_Group, set[int]] = {}
        for number, event in enumerate(graph.events):
            self._together.setdefault(self._group(number), set()).add(event.tile)

    def module(self, tile: Tile) -> str:
        """The short name of the module of a tile's first parameter."""
        return self._short[module_of(first_parameter(tile))]

    def groups(self, numbers: Iterable[int]) -> list[str]:
        """The names for the tiles of events of one kind, given by their numbers: a module's tiles together, most bytes
        first."""
        members: dict[_Group, list[int]] = {}
        for number in numbers:
            members.setdefault(self._group(number), []).append(number)
        sized = []
        for group, together in members.items():
            if {self._graph.events[number].tile for number in together} == self._together[group]:
                sized.append((self._nbytes(together), group.name(self._short) + self._mark(together[0])))
            else:
                for alone in together:
                    sized.append((self._nbytes([alone]), self._full(alone) + self._mark(alone)))
        return [name for _, name in sorted(sized, key=lambda item: -item[0])]

    def _group(self, number: int) -> _Group:
        kind, live_range = self._graph.events[number].kind, self._lifetimes.live_range_of(self._number, number)
        ahead = live_range is not None and live_range.graph != self._number
        kept = live_range is not None and (
            live_range.kept if kind == "release" else kind != "wait" and live_range.found == "kept"
        )
        tile = self._tile(number)
        return _Group(kind, ahead, kept, module_of(first_parameter(tile)), max(len(tile.members) - 1, 0))

    def _tile(self, number: int) -> Tile:
        return self._graph.tiles[self._graph.events[number].tile]

    def _full(self, number: int) -> str:
        tile = self._tile(number)
        first = first_parameter(tile)
        module = module_of(first)
        if tile.members:
            return f"{self._short[module]}{first[len(module) :]}&{len(tile.members) - 1}"
        return self._short[module] + tile.label[len(module) :]

    def _mark(self, number: int) -> str:
        live_range = self._lifetimes.live_range_of(self._number, number)
        return "*" if live_range is not None and self._graph.events[number].kind in live_range.prefetched else ""

    def _nbytes(self, numbers: Iterable[int]) -> int:
        return sum(self._tile(number).nbytes for number in numbers)
