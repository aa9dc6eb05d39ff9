"""Short names for tiles: what a table has room for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable


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
