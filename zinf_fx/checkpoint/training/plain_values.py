"""Whether the plain values of a manifest have the form in which the parts of a training write them.

What a part's state consists of is its own matter (`values.decode` reads that); here is what is around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zinf_fx.config import shortened
from zinf_fx.plan.codec import dtypes
from zinf_fx.quantisation import FORMATS

DEEPEST = 100
"""How deeply values may be nested: states of schedulers and samplers have a few levels."""

_Form = Callable[[Any], str | None]
"""A form says in words what is wrong with a value; None: nothing is."""


def fault_in(values: object) -> str | None:
    """Say what is wrong with the plain values of all parts, by their names; None: nothing is."""
    inside: list[object] = [values]
    for _ in range(DEEPEST + 1):
        if not all(math.isfinite(one) for one in inside if isinstance(one, float)):
            return "a number among its plain values is beyond all numbers"
        inside = [inner for one in inside for inner in _inside(one)]
    if any(isinstance(one, (dict, list)) for one in inside):
        return f"its plain values are nested in more than {DEEPEST} levels"
    fault = _by_name(_part)(values)
    if fault is None and not all(name.isprintable() for name in values):
        fault = "a name has characters that can't be printed"
    return None if fault is None else f"its plain values by part: {fault}"


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _anything(value: object) -> None:
    return None


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else f"{_shown(value)} is no text"


def _truth(value: object) -> str | None:
    return None if isinstance(value, bool) else f"{_shown(value)} is neither true nor false"


def _size(value: object) -> str | None:
    return None if type(value) is int and value >= 0 else f"{_shown(value)} is no size"


def _list(form: _Form) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, list):
            return f"{_shown(value)} is no list"
        return next((wrong for one in value if (wrong := form(one)) is not None), None)

    return fault


def _by_name(form: _Form) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"{_shown(value)} has no names"
        faults = ((name, form(one)) for name, one in value.items())
        return next((f"{shortened(name)}: {wrong}" for name, wrong in faults if wrong is not None), None)

    return fault


def _fields(required: Mapping[str, _Form], optional: Mapping[str, _Form] | None = None) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"{_shown(value)} has no fields"
        if missing := [name for name in required if name not in value]:
            return f"there is no field '{missing[0]}'"
        for name, form in {**required, **(optional or {})}.items():
            if name in value and (wrong := form(value[name])) is not None:
                return f"'{name}': {wrong}"
        return None

    return fault


def _format(value: object) -> str | None:
    """A format is what `format_of` returns of a quantised tensor."""
    is_known = _list(_text)(value) is None and value[:1] and value[0] in FORMATS and value[1:2] and value[1] in dtypes()
    return None if is_known and value[2:] in ([], ["transposed"]) else f"{_shown(value)} is no format"


def _class(value: object) -> str | None:
    """A tensor that is made of others has a class, and what else that says of them."""
    return None if _list(_text)(value) is None and len(value) == 2 else f"{_shown(value)} is no class of tensors"


_TEXTS = _list(_text)
_GROUP = _fields({"params": _TEXTS, "options": _by_name(_anything)})
_OF_KIND: dict[str, _Form] = {
    "module": _fields(
        {"extra": _by_name(_anything)},
        {"quantised": _by_name(_format), "quantised_shapes": _by_name(_list(_size)), "composed": _by_name(_class)},
    ),
    "optimizer": _fields(
        {
            "class": _text,
            "groups": _list(_GROUP),
            "state": _by_name(_by_name(_anything)),
            "rest": _by_name(_anything),
        }
    ),
    "gradients": _fields({"of": _by_name(_fields({"alone": _truth}))}),
    "random": _by_name(_anything),
    "state": _fields({"state": _anything}),
    "generator": _fields({"state": _anything}),
    "value": _fields({"value": _anything}),
}


def _part(value: object) -> str | None:
    """There is one part, or the same part of each rank."""
    if isinstance(value, dict) and "ranks" in value:
        return _kind(value) or _list(lambda one: None if one is None else _of_kind(one))(value["ranks"])
    return _of_kind(value)


def _of_kind(value: object) -> str | None:
    return _kind(value) or _OF_KIND[value["kind"]](value)


def _kind(value: object) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else None
    known = isinstance(kind, str) and kind in _OF_KIND
    return None if known else f"{_shown(kind)} is no kind of part, which are {', '.join(_OF_KIND)}"


def _shown(value: object) -> str:
    return "{...}" if isinstance(value, dict) else "[...]" if isinstance(value, list) else shortened(value)
