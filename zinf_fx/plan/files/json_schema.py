"""The JSON schema of plan files, made of the dataclasses that they hold. docs/plan.schema.json is it:

python -m zinf_fx.plan.files.json_schema > docs/plan.schema.json
"""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from zinf_fx.config import ACTIVATIONS, LARGEST, TIERS, Config, Placement
from zinf_fx.plan.codec import dtypes, shared_options
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
    hints = get_type_hints(kind)
    properties = {}
    for one in fields(kind):
        properties[one.name] = dict(_of(hints[one.name], kinds))
        if one.default is not MISSING:
            properties[one.name]["default"] = one.default
    required = [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _of(kind: Any, kinds: dict[str, Any]) -> dict[str, Any]:
    """A value's schema; a dataclass is described once, among `kinds`."""
    if is_dataclass(kind):
        name = kind.__name__
        if name not in kinds:
            kinds[name] = {}  # its place, in the order of use
            kinds[name] = _config() if kind is Config else _of_dataclass(kind, kinds)
        return {"$ref": f"#/$defs/{name}"}
    if kind is torch.dtype:
        return {"enum": sorted(dtypes())}
    if kind is bool:
        return {"type": "boolean"}
    if kind is int:
        return {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
    if kind is str:
        return {"type": "string"}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], kinds)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_of(each, kinds) for each in arguments], **_length(len(arguments))}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if each is type(None) else _of(each, kinds) for each in arguments]}
    raise TypeError(f"no plan has a field of type {kind}")


def _config() -> dict[str, Any]:
    """The options, as `Config` parses them; those beyond these are of the version of zinf_fx that wrote them."""
    nbytes = {"type": ["integer", "null"], "minimum": 1, "maximum": LARGEST}
    known = {
        "placement": {
            "type": "object",
            "properties": {
                one.name: {"enum": [0, 1, 2, 3] if one.name == "stage" else list(TIERS)} for one in fields(Placement)
            },
            "additionalProperties": False,
        },
        "device_memory": nbytes,
        "host_memory": nbytes,
        "prefetch": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0}, **_length(3)},
        "residency": {"type": "boolean"},
        "chunk": {"type": "integer", "minimum": 1 << 16, "maximum": LARGEST},
        "tile": {"anyOf": [nbytes, {"const": "auto"}]},
        "activations": {"anyOf": [{"enum": list(ACTIVATIONS)}, {"type": "integer", "minimum": 1}]},
        "partition_activations": {"type": "boolean"},
        "compute": {"type": "string"},
        "partition": {"enum": ["shards", "owner"]},
        "gradient_reduction": {"enum": ["mean", "sum"]},
        "reduce_dtype": {"enum": [None, *sorted(dtypes())]},
    }
    return {"type": "object", "properties": known, "required": shared_options()}


def _length(count: int) -> dict[str, int]:
    return {"minItems": count, "maxItems": count}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
