"""Training through zinf equals plain PyTorch, on several ranks in DistributedDataParallel: every loss and every
parameter, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gate import slow
from ranks.launching import on_ranks
from ranks.training import (
    PRESETS,
    ROUNDING,
    SPREAD,
    VOCABULARY,
    Loop,
    Trained,
    adamw,
    differences,
    model,
    world_size,
)
from torch import nn

import zinf_fx
from zinf_fx.optim.formats import decode, encode
from zinf_fx.sizes import BLOCK

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig


def gpt(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(layers=1, hidden=32, heads=2, context=16, vocabulary=VOCABULARY, tied=True))


PLAIN, LONG, ACCUMULATING = Loop(), Loop(20), Loop(20, micro_batches=2)
CLIPPING, SCALED = Loop(3, micro_batches=2, clip=0.5), Loop(3, scaled=True)
# Optimizers that update whole parameters: PyTorch's in memory, and on stored parameters zinf's, or the same.
ADAFACTOR = torch.optim.Adafactor, zinf_fx.optim.Adafactor
PLAIN_ADAFACTOR = torch.optim.Adafactor, torch.optim.Adafactor
AHEAD = {"prefetch": (1, 2, 3)}

# On one rank, every placement; every pair of a tier that is read, prefetching or not, and one or two micro-batches. In
# the gate, one placement reads the disk ahead, and another does not. On two ranks, all presets: in the gate,
# test_order_on_ranks has dp, test_lengths zero-2 and infinity-nvme, SCALED zero-1, and test_owners nvme; SPREAD has
# parameters that are divided on the device, as all of zero-3 are.
RUNS = [
    (1, ["device"], ACCUMULATING, AHEAD),
    slow(1, ["host"], LONG, AHEAD),
    slow(1, ["host"], ACCUMULATING, {"prefetch": None}),
    (1, ["nvme"], ACCUMULATING, AHEAD),
    slow(1, ["nvme"], LONG, {"prefetch": None}),
    slow(1, ["infinity-nvme"], LONG, AHEAD),
    (1, ["infinity-nvme"], ACCUMULATING, {"prefetch": None}),
    slow(1, ["zero-offload"], ACCUMULATING, AHEAD),
    (1, ["nvme"], LONG, {"activations": "recompute"}),
    (1, ["nvme"], Loop(20, clip=0.5, schedule=True), {}),
    (1, ["nvme"], LONG, {"how": "constructed", "build": gpt}),
    (1, ["nvme"], LONG, {"how": "in one line", "build": gpt}),
    slow(1, ["device"], LONG, {"how": "in one line", "build": gpt}),
    slow(1, ["zero-1", "infinity-nvme"], SCALED, {}),
    slow(1, ["infinity-nvme"], Loop(3, optimizers=ADAFACTOR), {}),
    (2, [SPREAD], Loop(3), {}),
    slow(2, [*PRESETS, SPREAD], PLAIN, {}),
    slow(2, ["dp"], CLIPPING, {}),
    slow(2, ["dp"], CLIPPING, {"how": "eager"}),
    slow(2, ["zero-3"], Loop(3), {"how": "constructed", "build": gpt}),
    (2, ["zero-1", "infinity-nvme"], SCALED, {}),
    (2, ["infinity-nvme"], Loop(3, optimizers=ADAFACTOR), {}),
    slow(2, ["zero-1"], Loop(3, optimizers=ADAFACTOR), {}),
    slow(2, ["zero-3"], Loop(3, optimizers=PLAIN_ADAFACTOR), {}),
]


@pytest.mark.parametrize(("size", "placements", "loop", "options"), RUNS)
def test_trains_bitwise_as_plain_pytorch(size: int, placements: list, loop: Loop, options: dict[str, Any]) -> None:
    for apart in on_ranks(size, partial(differences, **options), placements, loop):
        assert apart == [0.0] * len(placements)


@pytest.mark.slow  # in the gate, test_hybrid and test_owners accumulate and clip, in groups and in tiles
@pytest.mark.parametrize(
    ("size", "placements", "loop", "how"),
    [
        (4, PRESETS, PLAIN, "compiled"),
        (2, ("zero-1", "infinity-nvme"), CLIPPING, "compiled"),
        (2, ("zero-1", "infinity-nvme"), CLIPPING, "eager"),
    ],
    ids=["four", "compiled", "eager"],
)
def test_ranks_train_as_distributed_data_parallel_but_for_rounding(
    size: int, placements: tuple[str, ...], loop: Loop, how: str
) -> None:
    for apart in on_ranks(size, partial(differences, how=how), placements, loop):
        assert len(apart) == len(placements) and max(apart) < ROUNDING


class Masters:
    """Steps fp32 masters of a model's trained parameters with the average of the ranks' gradients."""

    def __init__(self, plain: nn.Module, make: Callable, rounds: bool) -> None:
        self.parameters = [p for p in plain.parameters() if p.requires_grad]
        self.masters = [p.detach().float() for p in self.parameters]
        self.optimizer, self.rounds = make(self.masters), rounds

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                average = parameter.grad / world_size()
                if dist.is_initialized():
                    dist.all_reduce(average)
                master.grad = average.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
        for state in self.optimizer.state.values() if self.rounds else ():
            for name in ("exp_avg", "exp_avg_sq"):
                _round(name, state[name])

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _round(name: str, value: torch.Tensor) -> None:
    """Leave of a state's value what codes of 8 bits have of it."""
    codes, scales = torch.empty(value.numel(), dtype=torch.uint8), torch.empty(-(-value.numel() // BLOCK))
    encode(name, value.view(-1), codes, scales)
    decode(name, codes, scales, value.view(-1))


def train_masters(loop: Loop, build: Callable[..., nn.Module], rounds: bool = False) -> Trained:
    plain = build(seed=0)
    losses = loop.train(plain, Masters(plain, loop.optimizers[0], rounds), nullcontext)
    return losses, {name: p.detach() for name, p in plain.named_parameters()}


CODES = {"state_dtype": "8bit", "master_dtype": "split"}


@pytest.mark.parametrize(
    ("size", "placements", "in_backward", "states", "loop"),
    [
        (1, ["infinity-nvme"], False, {}, ACCUMULATING),
        slow(1, ["host"], False, {}, ACCUMULATING),
        slow(1, ["nvme"], False, {}, LONG),
        slow(1, ["infinity-nvme"], True, CODES, LONG),
        (2, ["infinity-nvme"], True, CODES, Loop(3)),
        slow(2, ["infinity-nvme"], True, {}, Loop(3)),
        *(slow(2, [p], b, states, Loop(3)) for p, b in (("zero-1", False), ("zero-2", True)) for states in ({}, CODES)),
    ],
)
def test_bf16_equals_a_loop_with_an_fp32_master(
    size: int, placements: list, in_backward: bool, states: dict[str, str], loop: Loop
) -> None:
    """Steps are after backward, or in backward. With codes, blocks are those of the whole parameter on any number of
    ranks."""
    loop = replace(loop, optimizers=adamw(step_in_backward=in_backward, **states))
    reference = partial(train_masters, rounds=bool(states))
    in_bf16 = partial(differences, build=partial(model, torch.bfloat16), reference=reference)
    for apart in on_ranks(size, in_bf16, placements, loop):
        assert apart == [0.0] * len(placements)
