"""The plan's data as JSON, for other programs to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from zinf_fx.plan.schedule import Plan


def to_json(plans: Sequence[Plan]) -> str:
    """An array with an object per plan. Fields are those of the dataclasses; dtypes are names such as "float32"."""
    return json.dumps([asdict(plan) for plan in plans], indent=1, default=_plain)


def _plain(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a plan has no field of type {type(value).__name__}")
