"""Module.to() of a model that two ranks train, before its first call and later."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import training
from ranks.launching import on_ranks
from torch import nn

import zinf_fx

STEPS: list[Callable[[nn.Module], nn.Module]] = [lambda m: m.to("cpu"), lambda m: m.float(), lambda m: m.double()]


def train(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> list[float]:
    """Two steps after each of the conversions, with gradients that are converted too."""
    losses = []
    for convert in STEPS:
        convert(model)
        run = wrap(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        for (batch,) in training.batches(2, dist.get_rank(), 1):
            optimizer.zero_grad()
            run(*batch).backward()
            losses.append(run(*batch).item())
            optimizer.step()
    return losses


def converted(rank: int) -> dict[str, bool]:
    """Whether losses, parameters and gradients equal those of DistributedDataParallel."""
    plain = training.model()
    expected = train(plain, lambda m: nn.parallel.DistributedDataParallel(m, find_unused_parameters=True))
    found = {}
    for placement, compiled in (("zero-3", True), ("infinity-nvme", True), ("zero-2", False)):
        torch._dynamo.reset()
        model = zinf_fx.offload(training.model(), placement=placement)
        losses = train(model, (lambda m: torch.compile(m, backend="zinf")) if compiled else (lambda m: m))
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        same = all(mine.equal(theirs) for mine, theirs in pairs)
        used = [(mine.grad, theirs.grad) for mine, theirs in pairs if mine.grad is not None]
        found[placement] = losses == expected and same and len(used) > 10 and all(m.equal(t) for m, t in used)
    return found


def test_two_ranks_train_on_after_conversions_as_distributed_data_parallel():
    for found in on_ranks(2, converted):
        assert all(found.values()), found
