"""Short names for tiles: what a table has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def module_of(name: str) -> str:
    """The module that a parameter belongs to: `blocks.0.mlp.up` for `blocks.0.mlp.up.weight`; a root's is itself."""
    return name.rpartition(".")[0] or name


def abbreviate(paths: Iterable[str]) -> dict[str, str]:
    """The shortest distinct name of each module path: layer numbers and the last word, and more where these collide.

    `blocks.0.attention.qkv` -> `0.qkv`; `encoder.0.q` and `decoder.0.q` -> `encoder.0.q` and `decoder.0.q`.
    """
    names = {path: _candidates(path) for path in dict.fromkeys(paths)}
    level = dict.fromkeys(names, 0)
    while True:
        short = {path: names[path][min(level[path], len(names[path]) - 1)] for path in names}
        counts = Counter(short.values())
        colliding = [p for p in names if counts[short[p]] > 1 and level[p] < len(names[p]) - 1]
        if not colliding:
            return short
        for path in colliding:
            level[path] += 1


def _candidates(path: str) -> list[str]:
    """Ever longer names of one path; the last is the path itself."""
    parts = path.split(".")
    numbers = {i for i, part in enumerate(parts) if part.isdigit()}
    words = [i for i in range(len(parts)) if i not in numbers] or [0]
    kept = [
        numbers | set(words[-1:]),
        numbers | set(words[-2:]),
        numbers | {words[0], *words[-2:]},
        set(range(len(parts))),
    ]
    return list(dict.fromkeys(".".join(p for i, p in enumerate(parts) if i in keep) for keep in kept))
