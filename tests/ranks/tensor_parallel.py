"""What every rank runs under tensor parallelism: a GPT whose layers are divided, by plain PyTorch and through zinf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import zinf_fx

VOCABULARY, HIDDEN, HEADS, LAYERS, LENGTH = 96, 32, 4, 2, 64  # so that a checkpoint is worth dividing
# With a smaller eps, Adam divides gradients that are nothing but rounding by themselves.
STEPS = {"lr": 1e-2, "eps": 1e-4}


class Attention(nn.Module):
    """Of as many heads as this rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [w(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Is one layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Has weights tied between the embedding and the head, or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(tied)


def parallel(gpt: GPT, mesh: DeviceMesh, sequence: bool = False) -> GPT:
    """Divide as Megatron does: columns, then rows; with `sequence`, what lies between is divided along the sequence."""
    if sequence:
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    tied = gpt.head.weight is gpt.tokens.weight
    parallelize_module(gpt, mesh, plan)
    if tied:  # each got one of its own
        gpt.head.weight = gpt.tokens.weight
    for layer in gpt.layers:
        columns = ("attention.query", "attention.key", "attention.value", "up")
        plan = {name: ColwiseParallel() for name in columns}
        if sequence:
            rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            plan |= {
                "attention_norm": SequenceParallel(),
                "mlp_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "up": ColwiseParallel(input_layouts=Shard(1)),
            }
        else:
            rows = RowwiseParallel()
        parallelize_module(layer, mesh, plan | {"attention.out": rows, "down": rows})
    return gpt


def mesh_of(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def batches(steps: int, ranks: int, micro_batches: int) -> Iterator[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Return, for each step, by micro-batch, by data-parallel rank: tokens and targets."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        shape = (micro_batches, ranks, 2, 2, LENGTH)
        yield [[tuple(mine) for mine in micro] for micro in torch.randint(VOCABULARY, shape, generator=generator)]


def train_alone(steps: int, ranks: int, micro_batches: int = 1, clip: float | None = None, tied: bool = False) -> dict:
    """By name, parameters of a model that one process trained on the batches of all data-parallel ranks."""
    gpt = model(tied)
    optimizer = torch.optim.AdamW(gpt.parameters(), fused=True, **STEPS)
    for micro in batches(steps, ranks, micro_batches):
        for of_ranks in micro:
            for tokens, targets in of_ranks:
                (gpt(tokens, targets) / (micro_batches * ranks)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in gpt.named_parameters()}


def train(
    run: nn.Module,
    optimizer: torch.optim.Optimizer,
    coordinate: tuple[int, int],
    steps: int,
    micro_batches: int = 1,
    clip: float | None = None,
    no_sync: Callable[[], AbstractContextManager] = nullcontext,
) -> list[float]:
    """Return losses of the data-parallel rank `coordinate`: which, of how many."""
    rank, ranks = coordinate
    losses = []
    for micro in batches(steps, ranks, micro_batches):
        for number, of_ranks in enumerate(micro, start=1):
            with nullcontext() if number == len(micro) else no_sync():
                loss = run(*of_ranks[rank])
                (loss / micro_batches).backward()
            losses.append(loss.item())
        if clip is not None:
            with implicit_replication():  # norms and biases of rows are no DTensors
                torch.nn.utils.clip_grad_norm_(list(run.parameters()), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def groups(gpt: nn.Module) -> list[dict]:
    """Return the parameters, DTensors apart from others: plain fused optimizers can't have both in one group."""
    parameters = list(gpt.parameters())
    distributed = [p for p in parameters if isinstance(p, DTensor)]
    return [{"params": distributed}, {"params": [p for p in parameters if not isinstance(p, DTensor)]}]


def values(gpt: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full parameters by name."""
    with zinf_fx.gathered(gpt) as full:
        named = zip(gpt.named_parameters(), full, strict=True)
        return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for (name, _), v in named}
