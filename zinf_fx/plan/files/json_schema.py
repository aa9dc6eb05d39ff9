"""The JSON schema of plan files, made of the dataclasses that they hold. docs/plan.schema.json is it:

python -m zinf_fx.plan.files.json_schema > docs/plan.schema.json
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import MISSING, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from zinf_fx.config import LARGEST, Config, Positive
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.codec import defaults, dtypes, shared_options
from zinf_fx.plan.plan import FORMAT, SCHEMA, Plan


def schema() -> dict[str, Any]:
    """The schema, draft 2020-12. It tells what a file is made of; that indices lead somewhere is checked on reading."""
    kinds: dict[str, Any] = {}
    plan = _of_dataclass(Plan, kinds)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A plan of zinf_fx",
        "description": "What is moved and computed in a training step, in which order. Fields left out have their "
        "defaults.",
        **plan,
        "properties": {"format": {"const": FORMAT}, "schema": {"const": SCHEMA}, **plan["properties"]},
        "required": ["format", "schema", *plan["required"]],
        "$defs": kinds,
    }


def _of_dataclass(kind: type, kinds: dict[str, Any]) -> dict[str, Any]:
    hints, default = get_type_hints(kind, localns={"torch": torch}, include_extras=True), defaults(kind)
    names = shared_options() if kind is Config else list(default)
    if kind is Config:  # a file has all of them, and placement and micro-batches are decided
        hints["micro_batches"] = Positive
        hints["placement"], default = Placement | PlacementRules, dict.fromkeys(names, MISSING)
    properties = {name: dict(_of(hints[name], kinds)) for name in names}
    for name in names:
        if default[name] is not MISSING and not is_dataclass(default[name]):
            properties[name]["default"] = default[name]
    required = [name for name in names if default[name] is MISSING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of(kind: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """A value's schema; a dataclass is described once, among `kinds`."""
    if isinstance(kind, type) and is_dataclass(kind):
        name = kind.__name__
        if name not in kinds:
            kinds[name] = {}  # its place, in the order of use
            kinds[name] = _of_dataclass(kind, kinds)
        return {"$ref": f"#/$defs/{name}"}
    if kind is torch.dtype:
        return {"enum": sorted(dtypes())}
    if kind is int:
        return _of(Annotated[int, -LARGEST], kinds)
    if kind in (bool, str):
        return {"type": "boolean" if kind is bool else "string"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return {"type": "integer", "minimum": arguments[1], "maximum": LARGEST}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], kinds)}
    if origin is tuple:
        length = {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": "array", "prefixItems": [_of(argument, kinds) for argument in arguments], **length}
    if origin in (Union, types.UnionType):
        kinds_of_data = [kind for kind in arguments if get_origin(kind) is not Callable]  # a plan has what one chose
        return {"anyOf": [{"type": "null"} if kind is type(None) else _of(kind, kinds) for kind in kinds_of_data]}
    raise TypeError(f"no plan has a field of type {kind}")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
