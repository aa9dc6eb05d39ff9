"""Micro-batches over several ranks: each reduces its gradients once, as DistributedDataParallel does after no_sync."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from gate import slow
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.frontend import decisions
from zinf_fx.plan.hardware import Hardware

COUNT, STEPS = 2, 2


def trained(rank: int, group: object, tied: bool) -> tuple[float, int, int]:
    """The largest difference of a parameter to DistributedDataParallel's at the end, and the bytes that this rank sent
    in a step of several micro-batches, and in one of one."""
    _, parameters = training.train_ddp(STEPS, COUNT, tied=tied)
    stored = zinf_fx.offload(training.model(seed=rank, tied=tied), placement="infinity-nvme")
    optimizer = zinf_fx.optim.AdamW(stored.parameters(), lr=1e-2)
    sent = []
    for count in (COUNT, 1):
        options = {"micro_batches": count} | ({"micro_batch_group": group} if count > 1 else {})
        run = torch.compile(stored, backend="zinf", dynamic=True, options=options)
        for step in training.batches(STEPS, rank, COUNT) if count == COUNT else training.batches(2, rank, 1):
            before = zinf_fx.stats(stored).sent_bytes
            run(*(torch.cat(parts) for parts in zip(*step, strict=True))).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.finish()
        sent.append(zinf_fx.stats(stored).sent_bytes - before)
        if count == COUNT:
            with zinf_fx.gathered(stored) as values:
                names = [name for name, _ in stored.named_parameters()]
                pairs = [(one, parameters[name]) for name, one in zip(names, values, strict=True)]
                difference = max((one - other).abs().max().item() for one, other in pairs)
    return difference, *sent


def decided(rank: int) -> float:
    """The largest difference of a parameter to DistributedDataParallel's; by itself, the second rank finds that nothing
    fits."""
    _, parameters = training.train_ddp(1, COUNT, eps=1e-2)
    machine = decisions.this_machine

    def smaller(*arguments: object) -> Hardware:
        found = machine(*arguments)
        return replace(found, device=replace(found.device, capacity=1 << (40 if rank == 0 else 10)))

    stored = zinf_fx.offload(training.model(seed=rank), placement="infinity-nvme")
    optimizer = zinf_fx.optim.AdamW(stored.parameters(), lr=1e-2, eps=1e-2)
    run = torch.compile(stored, backend="zinf", dynamic=True, options={"micro_batches": "auto"})
    with mock.patch.object(decisions, "this_machine", smaller):
        for step in training.batches(1, rank, COUNT):
            run(*(torch.cat(parts) for parts in zip(*step, strict=True))).backward()
            optimizer.step()
    with zinf_fx.gathered(stored) as values:
        pairs = [(one, parameters[name]) for (name, _), one in zip(stored.named_parameters(), values, strict=True)]
        return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.slow
def test_all_ranks_divide_as_the_first_one_decides() -> None:
    assert all(difference < 1e-5 for difference in on_ranks(2, decided))


@pytest.mark.parametrize(("group", "tied"), [(1, False), slow("auto", True)])
def test_two_ranks_train_as_distributed_data_parallel_and_send_as_much_as_with_one_micro_batch(
    group: object, tied: bool
) -> None:
    for difference, of_several, of_one in on_ranks(2, trained, group, tied):
        # The gradients of a tied weight's two uses are summed over the micro-batches each by itself.
        assert difference < 1e-5 if tied else difference == 0
        assert of_several == of_one > 0
