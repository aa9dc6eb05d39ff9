"""What every rank runs, or the only one: a model trained by plain PyTorch, in DistributedDataParallel, and through
zinf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from followed import followed_plans
from torch import nn
from torch.nn import functional as F

import zinf_fx
from zinf_fx.plan.simulation.communication import communication

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
    """For each step, this rank's micro-batches."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for _ in range(steps):
        step = [torch.randint(VOCABULARY, (2, 3, 16), generator=generator) for _ in range(micro_batches)]
        yield [(both[0], both[1]) for both in step]


def data_parallel(plain: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel; on one rank, which has no process group, the model itself."""
    return nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True) if dist.is_initialized() else plain


def no_sync(run: nn.Module) -> AbstractContextManager:
    """A context in which backward passes of what `data_parallel` gave only accumulate."""
    return run.no_sync() if isinstance(run, nn.parallel.DistributedDataParallel) else nullcontext()


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def train_ddp(
    steps: int = 10, micro_batches: int = 1, clip: float | None = None, eps: float = 1e-8, tied: bool = True
) -> tuple[list[float], dict]:
    """Losses of this rank, and the parameters at the end."""
    plain = model(tied=tied)
    wrapped = data_parallel(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=eps, fused=True)
    losses = _train(wrapped, optimizer, lambda: no_sync(wrapped), steps, micro_batches, clip)
    return losses, {name: p.detach() for name, p in plain.named_parameters()}


def train_zinf(
    placement: object,
    steps: int = 10,
    micro_batches: int = 1,
    clip: float | None = None,
    compiled: bool = True,
    eps: float = 1e-8,
    **options: object,
) -> tuple[list[float], dict, nn.Module]:
    """As `train_ddp`; and the model. Ranks begin with different values: those of the first are taken."""
    stored = zinf_fx.offload(model(seed=this_rank()), placement=placement, **options)
    run = torch.compile(stored, backend="zinf") if compiled else stored
    optimizer = zinf_fx.optim.AdamW(stored.parameters(), lr=1e-2, eps=eps)
    losses = _train(run, optimizer, zinf_fx.no_sync, steps, micro_batches, clip)
    with zinf_fx.gathered(stored) as values:
        names = [name for name, _ in stored.named_parameters()]
        return losses, {name: value.clone() for name, value in zip(names, values, strict=True)}, stored


def bytes_sent(model: nn.Module) -> tuple[int, int]:
    """Bytes that this rank sends in a step of an offloaded model, in the steady state; and those of its plan."""
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
    return counts[2] - counts[1], sum(each.total for each in communication(plan))


def _train(run, optimizer, no_sync, steps: int, micro_batches: int, clip: float | None) -> list[float]:
    losses = []
    for micro in batches(steps, this_rank(), micro_batches):
        for number, (tokens, targets) in enumerate(micro, start=1):
            with nullcontext() if number == len(micro) else no_sync():
                loss = run(tokens, targets) / len(micro)
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(run.parameters()), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses
