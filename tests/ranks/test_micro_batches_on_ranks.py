"""Ranks that find out by themselves how many micro-batches fit agree on a number."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.frontend import decisions
from zinf_fx.plan.hardware import Hardware


def decided(rank: int) -> float:
    """Return the largest difference of a parameter to DistributedDataParallel's; by itself, the second rank finds that
    nothing fits."""
    loop = training.Loop(1, micro_batches=2, optimizers=training.adamw(eps=1e-2))
    _, parameters = training.train_plain(loop)
    machine = decisions.this_machine

    def smaller(*arguments: object) -> Hardware:
        hardware = machine(*arguments)
        return replace(hardware, device=replace(hardware.device, capacity=1 << (40 if rank == 0 else 10)))

    stored = zinf_fx.offload(training.model(seed=rank), placement="infinity-nvme")
    optimizer = loop.optimizers[1](stored.parameters())
    run = torch.compile(stored, backend="zinf", dynamic=True, options={"micro_batches": "auto"})
    with mock.patch.object(decisions, "this_machine", smaller):
        for step in training.batches(1, rank, 2):
            run(*(torch.cat(parts) for parts in zip(*step, strict=True))).backward()
            optimizer.step()
    with zinf_fx.gathered(stored) as values:
        pairs = [(value, parameters[name]) for (name, _), value in zip(stored.named_parameters(), values, strict=True)]
        return max((value - other).abs().max().item() for value, other in pairs)


@pytest.mark.slow
def test_all_ranks_divide_as_the_first_one_decides() -> None:
    assert all(difference < 1e-5 for difference in on_ranks(2, decided))
