"""The plan's data as JSON, for other programs to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from zinf_fx.plan.checkpoint_bytes import checkpoint_sizes
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.memory.use import arena_by_operator
from zinf_fx.plan.placement.decision import Decision
from zinf_fx.plan.placement.division import Division
from zinf_fx.plan.plan import Plan


def to_json(plans: Sequence[Plan], decision: Decision | None = None, divisions: Sequence[Division] = ()) -> str:
    """An array with an object per plan. Fields are those of the dataclasses; dtypes are names such as "float32".

    Each graph has `memory` besides, with an object per operator, that of the prologue (-1) first: bytes that start to
    be read from NVMe (`fetched`), that are in flight (`device`, `host`), and that the host arena holds (`arena`). Where
    "auto" decided the placement, each plan has `decision`, which tells how, and where it decided the micro-batches of
    graphs, `divisions`. `checkpoint`: bytes of one, by dtype.
    """
    more = {} if decision is None else {"decision": asdict(decision)}
    more |= {"divisions": [*map(asdict, divisions)]} if divisions else {}
    return json.dumps([_object(plan) | more for plan in plans], indent=1, default=_plain)


def _object(plan: Plan) -> dict[str, object]:
    data: dict[str, Any] = asdict(plan) | {"checkpoint": asdict(checkpoint_sizes(plan))}
    for graph_data, graph in zip(data["graphs"], plan.graphs, strict=True):
        both = zip(flows(plan, graph), arena_by_operator(plan, graph), strict=True)
        graph_data["memory"] = [{**asdict(flow), "arena": arena} for flow, arena in both]
    return data


def _plain(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a plan has no field of type {type(value).__name__}")
