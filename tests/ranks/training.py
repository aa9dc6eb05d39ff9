"""What every rank runs, or the only one: a model trained by plain PyTorch, in DistributedDataParallel, and through
zinf."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from followed import followed_plans
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import zinf_fx
from zinf_fx.plan.simulation.communication import communication

# Losses of this rank, and the parameters at the end.
Trained = tuple[list[float], dict[str, torch.Tensor]]

PRESETS = ("dp", "zero-1", "zero-2", "zero-3", "zero-offload", "infinity-cpu", "infinity-nvme", "nvme")

# States of each parameter on tiers of their own.
SPREAD = {
    "parameters": [("layers.0.*", "device"), ("norms.1.*", "host"), ("*", "nvme")],
    "gradients": [("layers.?.bias", "nvme"), ("norms.*", "device"), ("*", "host")],
    "optimizer": [("layers.1.*", "device"), ("norms.*", "nvme"), ("*", "host")],
}

# By how much ten steps differ where fp32 sums have another order.
ROUNDING = 1e-5

VOCABULARY, HIDDEN = 97, 60  # of which no number of ranks divides the elements


class Model(nn.Module):
    """With tied weights or not, a frozen and an unused parameter, biases, norms, and sizes that ranks don't divide."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN)
        self.frozen.weight.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.unused = nn.Linear(7, 3)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.tokens(tokens))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def model(dtype: torch.dtype = torch.float32, seed: int = 0, tied: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(tied).to(dtype)


def batches(steps: int, rank: int, micro_batches: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return, for each step, this rank's micro-batches."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        step = [torch.randint(VOCABULARY, (2, 3, 16), generator=generator) for _ in range(micro_batches)]
        yield [(both[0], both[1]) for both in step]


def data_parallel(plain: nn.Module) -> nn.Module:
    """Return the model in DistributedDataParallel; on one rank, which has no process group, the model itself."""
    return nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True) if dist.is_initialized() else plain


def no_sync(run: nn.Module) -> AbstractContextManager:
    """Return a context in which backward passes of what `data_parallel` gave only accumulate."""
    return run.no_sync() if isinstance(run, nn.parallel.DistributedDataParallel) else nullcontext()


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def adamw(lr: float = 1e-2, eps: float = 1e-8, **stored: object) -> tuple[Callable, Callable]:
    """PyTorch's AdamW and zinf's, which has more options."""
    options = {"lr": lr, "eps": eps}
    return partial(torch.optim.AdamW, fused=True, **options), partial(zinf_fx.optim.AdamW, **options, **stored)


@dataclass(frozen=True)
class Loop:
    """What a training loop does.

    Attributes:
        clip: the norm to which gradients are clipped.
        schedule: whether the learning rate changes.
        scaled: whether the loss is scaled; in the second step, gradients on the last rank are infinite then.
        optimizers: what makes the plain model's optimizer, and the stored one's.
    """

    steps: int = 10
    micro_batches: int = 1
    clip: float | None = None
    schedule: bool = False
    scaled: bool = False
    optimizers: tuple[Callable, Callable] = adamw()

    def train(self, run: nn.Module, optimizer: Any, without_sync: Callable[[], AbstractContextManager]) -> list[float]:
        """Return this rank's losses and, where gradients are clipped, their norms."""
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100, enabled=self.scaled)
        warmup = [LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))] if self.schedule else []
        values, scales = [], []
        for step, micro in enumerate(batches(self.steps, this_rank(), self.micro_batches)):
            overflows = self.scaled and step == 1 and this_rank() == world_size() - 1
            for number, (tokens, targets) in enumerate(micro, start=1):
                with nullcontext() if number == len(micro) else without_sync():
                    loss = run(tokens, targets) / len(micro)
                    scaler.scale(loss * torch.inf if overflows else loss).backward()
                values.append(loss.item())
            scaler.unscale_(optimizer)
            if self.clip is not None:
                values.append(float(torch.nn.utils.clip_grad_norm_(list(run.parameters()), self.clip)))
            scaler.step(optimizer)
            scaler.update()
            for schedule in warmup:
                schedule.step()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        assert scales == ([256.0] + [128.0] * (self.steps - 1) if self.scaled else [1.0] * self.steps)
        return values


def train_plain(loop: Loop, build: Callable[..., nn.Module] = model) -> Trained:
    """Train the model that `build(seed=...)` makes in plain PyTorch."""
    plain = build(seed=0)
    run = data_parallel(plain)
    losses = loop.train(run, loop.optimizers[0](plain.parameters()), lambda: no_sync(run))
    return losses, {name: p.detach() for name, p in plain.named_parameters()}


def train_zinf(
    placement: object,
    loop: Loop,
    build: Callable[..., nn.Module] = model,
    how: str = "compiled",
    plan: Path | None = None,
    **options: object,
) -> Trained:
    """Train it through zinf. Ranks begin with different values: those of the first are taken.

    Arguments:
        how: "compiled" or "eager"; "constructed" if parameters are stored while the model is made, from one seed; "in
            one line" if the first call stores them.
        plan: the file of the plan that is followed.
    """
    options = {"placement": placement, **options}
    if how == "constructed":
        with zinf_fx.offloading(**options):
            stored = build(seed=0)
    else:
        stored = build(seed=this_rank())
    if how in ("compiled", "eager"):
        zinf_fx.offload(stored, **options)
    optimizer = loop.optimizers[1](stored.parameters())
    given = options if how == "in one line" else {"plan": plan} if plan is not None else None
    compiled = torch.compile(stored, backend="zinf", options=given)
    losses = loop.train(stored if how == "eager" else compiled, optimizer, zinf_fx.no_sync)
    with zinf_fx.gathered(stored) as values:
        names = [name for name, _ in stored.named_parameters()]
        return losses, {name: value.clone() for name, value in zip(names, values, strict=True)}


def differences(
    rank: int,
    placements: Sequence[object],
    loop: Loop,
    build: Callable[..., nn.Module] = model,
    reference: Callable[[Loop, Callable[..., nn.Module]], Trained] = train_plain,
    **options: object,
) -> list[float]:
    """For each placement, return the largest difference to plain PyTorch, in losses and in parameters at the end."""
    losses, parameters = reference(loop, build)
    assert loop.steps == 1 or losses[0] != losses[-1]
    results = []
    for placement in placements:
        mine, trained = train_zinf(placement, loop, build, **options)
        assert trained.keys() == parameters.keys()  # of which a tied weight is one
        apart = [abs(a - b) for a, b in zip(mine, losses, strict=True)]
        apart += [(trained[name] - p).abs().max().item() for name, p in parameters.items()]
        assert not any(map(math.isnan, apart))
        results.append(max(apart))
    return results


def bytes_sent(model: nn.Module) -> tuple[int, int]:
    """Return bytes that this rank sends in a step of an offloaded model, in the steady state; and those of its plan."""
    run = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    counts = []
    with followed_plans(model) as plans:
        for (batch,) in batches(3, this_rank(), 1):
            counts.append(zinf_fx.stats(model).sent_bytes)
            run(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    (plan,) = plans
    return counts[2] - counts[1], sum(collective.total for collective in communication(plan))
