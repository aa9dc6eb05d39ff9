"""Ranks whose batches have other sizes, as padded texts have: each compiles for its own when it meets new ones, and all
train as DistributedDataParallel does. What ranks must not do apart is an error on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from ranks import training
from ranks.launching import on_ranks

import zinf_fx

# By step, those of three micro-batches, which ranks take from different places on.
LENGTHS = [(7, 11, 5), (7, 9, 8), (12, 9, 3), (3, 30, 6), (1, 5, 9)]


def batches(rank: int, micro_batches: int) -> Iterator[list[torch.Tensor]]:
    """For each step, this rank's micro-batches: tokens and targets, of other sizes than on other ranks."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for step, lengths in enumerate(LENGTHS):
        yield [
            torch.randint(
                training.VOCABULARY,
                (2, 2 + (step + rank + number) % 2, lengths[(rank + number) % len(lengths)]),
                generator=generator,
            )
            for number in range(micro_batches)
        ]


def losses_of(run, optimizer, no_sync, rank: int, micro_batches: int, evaluates: bool) -> list[float]:
    losses = []
    for step, micro in enumerate(batches(rank, micro_batches)):
        for number, (tokens, targets) in enumerate(micro, start=1):
            with nullcontext() if number == len(micro) else no_sync():
                loss = run(tokens, targets) / len(micro)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step % 2:
            with torch.no_grad():
                losses.append(run(*micro[0]).item())
    return losses


def trained(
    rank: int, placement: str, dynamic: bool | None, options: dict, micro_batches: int, evaluates: bool
) -> tuple[bool, float]:
    """Whether losses and parameters equal those of DistributedDataParallel, and how far parameters are from them."""
    plain = training.model()
    wrapped = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    rest = rank, micro_batches, evaluates
    expected = losses_of(wrapped, optimizer, wrapped.no_sync, *rest)
    model = zinf_fx.offload(training.model(seed=rank), placement=placement, **options)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    found = losses_of(torch.compile(model, backend="zinf", dynamic=dynamic), optimizer, zinf_fx.no_sync, *rest)
    with zinf_fx.gathered(model) as values:
        pairs = list(zip(values, plain.parameters(), strict=True))
        same = found == expected and all(torch.equal(mine, theirs) for mine, theirs in pairs)
        return same, max((mine - theirs).abs().max().item() for mine, theirs in pairs)


CASES = [
    ("infinity-nvme", None, {}, 1, False),
    ("infinity-nvme", True, {}, 1, False),
    ("zero-2", None, {}, 2, True),
    ("zero-3", None, {"tile": "8KiB", "activations": "recompute"}, 2, True),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("zero-1", False, {}, 1, False),
            ("zero-3", False, {}, 1, True),
            ("zero-2", True, {}, 2, True),
            ("dp", None, {}, 2, True),
            ("infinity-nvme", None, {"pack": "8KiB", "prefetch": (2, 3, 4)}, 2, True),
            ("infinity-nvme", None, {"pack": None, "prefetch": None}, 2, True),
            ("infinity-nvme", True, {"activations": "offload"}, 2, True),
        ]
    ),
]


@pytest.mark.parametrize(("placement", "dynamic", "options", "micro_batches", "evaluates"), CASES)
def test_ranks_with_batches_of_other_sizes_train_as_distributed_data_parallel(
    placement: str, dynamic: bool | None, options: dict, micro_batches: int, evaluates: bool
):
    results = on_ranks(2, trained, placement, dynamic, options, micro_batches, evaluates)
    assert all(same for same, _ in results), results


@pytest.mark.slow
def test_three_ranks_with_batches_of_other_sizes():
    for dynamic in (None, True):
        for _, far in on_ranks(3, trained, "infinity-nvme", dynamic, {}, 2, True):
            assert far < 1e-5
