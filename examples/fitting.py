"""A GPT whose states exceed a memory and fit a disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpt import GPT, GPTConfig

from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.sizes import in_words

# Bytes of an element of the optimizer's two moments, on disk.
MOMENTS = {"float32": 4, "bfloat16": 2, "8bit": 1}


def bytes_per_parameter(state_dtype: str) -> dict[str, int]:
    """Return the bytes per parameter of each kind: the parameter and its gradient in bfloat16, and the optimizer's
    master copy in float32 and moments."""
    return {"parameters": 2, "gradients": 2, "optimizer": 4 + 2 * MOMENTS[state_dtype]}


# The part of the free disk space that may be taken: others write there too.
DISK_SHARE = 0.95
HEAD_SIZE = 128
HIDDEN_PER_LAYER = 64


class RefusedError(Exception):
    """What was asked for can't be done here."""


@dataclass(frozen=True)
class Fit:
    """A model for this machine, what of it there is, bytes per parameter of each kind, and what was changed to make it
    fit."""

    config: GPTConfig
    parameters: int
    bytes_of_kind: Mapping[str, int]
    note: str | None = None

    @property
    def states(self) -> int:
        """Return the bytes of everything that training keeps from step to step."""
        return self.parameters * sum(self.bytes_of_kind.values())

    @property
    def shape(self) -> str:
        return f"{self.config.layers} layers of {self.config.hidden}"


def parameters_of(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


def shaped(parameters: float, context: int) -> GPTConfig:
    """Return a GPT of usual proportions with about so many parameters, not fewer."""
    layers = (parameters / (12 * HIDDEN_PER_LAYER**2)) ** (1 / 3)  # a block has about 12 hidden**2
    hidden = max(1, round(layers * HIDDEN_PER_LAYER / HEAD_SIZE)) * HEAD_SIZE
    shallow = GPTConfig(layers=1, hidden=hidden, heads=hidden // HEAD_SIZE, context=context)
    block = parameters_of(replace(shallow, layers=2)) - parameters_of(shallow)
    return replace(shallow, layers=1 + max(0, math.ceil((parameters - parameters_of(shallow)) / block)))


def fit(states: int, memory: int, room: int, context: int, bytes_of_kind: Mapping[str, int]) -> Fit:
    """Return the GPT whose states have at least `states` bytes or, where the disk has only `room`, as many as it holds.

    Raises: RefusedError if they would not exceed the memory then.
    """
    config = shaped(min(states, room) / sum(bytes_of_kind.values()), context)
    while config.layers > 1 and parameters_of(config) * sum(bytes_of_kind.values()) > room:
        config = replace(config, layers=config.layers - 1)
    fitted = Fit(config, parameters_of(config), bytes_of_kind)
    if fitted.states > room or fitted.states <= memory:
        raise RefusedError(
            f"states larger than the memory, {in_words(memory)}, don't fit the disk, of which {in_words(room)} may be "
            "taken: free some, or give a --store on another one, more of --disk, or a smaller --memory"
        )
    if fitted.states >= states:
        return fitted
    return replace(fitted, note=f"scaled down: states of {in_words(states)} don't fit {in_words(room)} of the disk")


def room_on(directories: Sequence[Path]) -> int:
    """Return the bytes of the stores' disks that may be taken. Raises: RefusedError where a disk is memory."""
    free: dict[str, int] = {}
    for directory in directories:
        existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
        file_system = file_system_of(existing)
        if file_system.in_memory:
            raise RefusedError(f"{directory} is on {file_system.kind}, which is memory: give a --store on a disk")
        free[file_system.key] = file_system.free
    return int(sum(free.values()) * DISK_SHARE)
