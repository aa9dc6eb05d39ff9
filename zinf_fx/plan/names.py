"""Short names for tiles: what a table has room for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from zinf_fx.plan.accounting import started_by_turn, tiles_of
from zinf_fx.plan.schedule import HEAD, Event, EventKind, GraphSchedule, Plan


def module_of(name: str) -> str:
    """The module that a parameter belongs to: `blocks.0.mlp.up` for `blocks.0.mlp.up.weight`; a root's is itself."""
    return name.rpartition(".")[0] or name


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


class PlanNames:
    """The short names of a plan's modules, the same in all its tables."""

    def __init__(self, plan: Plan) -> None:
        self.short = abbreviate(module_of(tile.name) for tile in tiles_of(plan).values())

    def of(self, plan: Plan, graph: GraphSchedule) -> GraphNames:
        """The names in one graph's table."""
        return GraphNames(plan, graph, self.short)

    @property
    def example(self) -> tuple[str, str] | None:
        """A module's path and its short name, where they differ most."""
        return max(self.short.items(), key=lambda item: len(item[0]) - len(item[1]), default=None)


class _Group(NamedTuple):
    """Events of one sort that the tiles of a module have in common."""

    kind: EventKind
    turn: bool
    resident: bool
    module: str


class GraphNames:
    """How one graph's cells name tiles."""

    def __init__(self, plan: Plan, graph: GraphSchedule, short: dict[str, str]) -> None:
        self._graph, self._short = graph, short
        self._started = {kind: started_by_turn(plan, graph, kind) for kind in ("fetch", "upload", "allgather")}
        self._together: dict[_Group, set[int]] = {}
        for event in graph.events:
            self._together.setdefault(self._group(event), set()).add(event.tile)

    def short(self, name: str) -> str:
        """The short name of the module of a parameter."""
        return self._short[module_of(name)]

    def groups(self, events: Iterable[Event]) -> list[str]:
        """The names for the tiles of events of one kind: a module's tiles together, most bytes first."""
        members: dict[_Group, list[Event]] = {}
        for event in events:
            members.setdefault(self._group(event), []).append(event)
        sized = []
        for group, together in members.items():
            if {e.tile for e in together} == self._together[group]:
                sized.append((self._nbytes(together), self._short[group.module] + self._mark(together[0])))
            else:
                sized += [(self._nbytes([e]), self._full(e) + self._mark(e)) for e in together]
        return [name for _, name in sorted(sized, key=lambda item: -item[0])]

    def _group(self, event: Event) -> _Group:
        return _Group(event.kind, event.turn, event.resident, module_of(self._graph.tiles[event.tile].name))

    def _full(self, event: Event) -> str:
        tile = self._graph.tiles[event.tile]
        module = module_of(tile.name)
        return self._short[module] + tile.label[len(module) :]

    def _mark(self, event: Event) -> str:
        under_way = event.operator == HEAD and self._graph.tiles[event.tile].label in self._started.get(event.kind, ())
        return "*" if event.turn or under_way else ""

    def _nbytes(self, events: Iterable[Event]) -> int:
        return sum(self._graph.tiles[e.tile].nbytes for e in events)
