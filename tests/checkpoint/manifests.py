"""Manifests that somebody else may have written, with a right checksum."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zinf_fx.checkpoint.manifest import MANIFEST
from zinf_fx.native.engine import crc32c

_SUM = ',"crc32c":"%08x"}\n'

_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**62, 2**63, -(2**63), 10**30, 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "../x", "/etc/passwd", "\x1b[2J", "data-00000000-0-0.extents", "float32", "qint8", "complex64", "bits8"),
    *([], {}, [[]], [0], [-1], {"a": 1}, {"kind": "value"}, {"kind": "module"}, {"kind": "state", "ranks": [7]}),
    *({"$kept": "model/first.weight"}, {"$kept": 5}, {"$kept": []}, {"$nothing": 1}, {"$int": "9" * 5000}),
    *({"$size": [2**62, 2**62]}, {"$tensor": ["float32", [1], "AAAA"]}, {"$tensor": []}, {"$bounded": [[1], -1]}),
    *({"$numpy": [{"$tensor": ["bfloat16", [2], "AAAAAA=="]}, True]}, {"$set": [[1]]}, {"$dict": 3}, {"$device": "x"}),
]


def read(directory: Path) -> dict[str, Any]:
    """Return what a checkpoint's manifest says, without its checksum."""
    content = json.loads((directory / MANIFEST).read_bytes())
    del content["crc32c"]
    return content


def write(directory: Path, content: dict[str, Any] | str) -> None:
    """Give a checkpoint another manifest; a text is of JSON."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    begin = text.encode()[:-1]
    (directory / MANIFEST).write_bytes(begin + (_SUM % crc32c(begin)).encode())


def nested(levels: int) -> Any:
    """Return lists in lists."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def mutated(content: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the manifest with some changes that follow its structure."""
    chance, content = random.Random(seed), copy.deepcopy(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = list(_places(content))
        if chance.random() < 0.5:  # near the top, there are few
            places = [place for place in places if len(place) <= 4]
        *above, last = chance.choice(places)
        inside = _at(content, above)
        what = chance.randrange(8)
        if what == 0:
            del inside[last]
        elif what == 1:
            inside[last] = nested(chance.choice([3, 30]))
        elif what == 2 and isinstance(inside, list):
            inside.insert(chance.randrange(len(inside) + 1), copy.deepcopy(inside[last]))
        elif what == 3 and isinstance(inside, list):
            chance.shuffle(inside)
        elif what == 4 and type(inside[last]) is int:
            inside[last] += chance.choice([-1, 1, 4096, -4096, 10**6])
        elif what == 5:
            inside[last] = copy.deepcopy(_at(content, chance.choice(places)))
        elif what == 6 and isinstance(inside, dict):
            inside[chance.choice(["other", "", " \n", "kind"])] = inside.pop(last)
        else:
            inside[last] = copy.deepcopy(chance.choice(_VALUES))
    return content


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield every place in a value, but for itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _at(value: Any, place: tuple | list) -> Any:
    for key in place:
        value = value[key]
    return value
