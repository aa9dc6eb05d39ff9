"""Stages of torch.distributed.pipelining that are offloaded and compiled: with ZeRO, and with tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from ranks import tensor_parallel as tp
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import zinf_fx

MICRO_BATCHES = 4
# Of fp32 sums in another order, over a few steps.
ROUNDING = 2e-6


class Stage(nn.Module):
    """Half of a GPT, with the names of its parameters there."""

    def __init__(self, gpt: tp.GPT, number: int) -> None:
        super().__init__()
        half = tp.LAYERS // 2
        if number == 0:
            self.tokens = gpt.tokens
        else:
            self.norm, self.head = gpt.norm, gpt.head
        kept = range(half) if number == 0 else range(half, tp.LAYERS)
        self.layers = nn.ModuleDict({str(layer): gpt.layers[layer] for layer in kept})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained_stage(mesh: DeviceMesh, kind: type, steps: int, **options: object) -> dict[str, torch.Tensor]:
    """Return the parameters at the end of this rank's stage. `mesh`: of stages, data-parallel and tensor-parallel
    ranks."""
    number = mesh["pp"].get_local_rank()
    gpt = tp.model()
    if mesh["tp"].size() > 1:
        tp.parallel(gpt, mesh["tp"])
    stage = zinf_fx.offload(Stage(gpt, number), process_group=mesh["dp"].get_group(), **options)
    run = torch.compile(stage, backend="zinf")
    pipelined = PipelineStage(run, number, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = kind(pipelined, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = zinf_fx.optim.AdamW(stage.parameters(), **tp.STEPS)
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for micro in tp.batches(steps, size, MICRO_BATCHES):
        tokens, targets = (torch.cat([of_ranks[rank][which] for of_ranks in micro]) for which in (0, 1))
        schedule.step(*((tokens,) if number == 0 else ()), **({} if number == 0 else {"target": targets}))
        optimizer.step()
        optimizer.zero_grad()
    return tp.values(stage)


def as_alone(rank: int, cases: list[tuple[str, str, tuple[int, int]]], steps: int = 2) -> list[float]:
    """Return, by case (schedule, placement, how many data-parallel and tensor-parallel ranks), the largest difference
    to what one process trains."""
    apart = []
    for schedule, placement, ranks in cases:
        kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]
        mesh = init_device_mesh("cpu", (2, *ranks), mesh_dim_names=("pp", "dp", "tp"))
        mine = trained_stage(mesh, kind, steps, placement=placement)
        alone = tp.train_alone(steps, ranks[0], MICRO_BATCHES)
        assert mine and mine.keys() <= alone.keys()
        apart.append(max((value - alone[name]).abs().max().item() for name, value in mine.items()))
    return apart


@pytest.mark.slow
def test_two_stages_of_two_ranks_train_as_one_process():
    cases = [("GPipe", "zero-2", (2, 1)), ("1F1B", "infinity-nvme", (2, 1)), ("1F1B", "nvme", (1, 2))]
    for differences in on_ranks(4, as_alone, cases):
        assert len(differences) == len(cases) and max(differences) < ROUNDING
