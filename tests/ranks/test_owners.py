"""Parameters that are whole at one rank each, which broadcasts them: the training of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import training
from ranks.launching import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import zinf_fx

# Of fp32 sums in another order, over three steps.
ROUNDING = 1e-5
EPSILON = 1e-4  # where tiles round otherwise: see test_ranks_tiles


def compare(rank: int, placements: tuple[str, ...], options: dict[str, Any], **others: Any) -> dict[str, float]:
    """By placement, the largest difference to DistributedDataParallel, in losses and parameters."""
    losses, parameters = training.train_ddp(**options)
    found = {}
    for placement in placements:
        mine, trained, _ = training.train_zinf(placement, partition="owner", **options, **others)
        differences = [abs(a - b) for a, b in zip(mine, losses, strict=True)]
        differences += [(trained[name] - p).abs().max().item() for name, p in parameters.items()]
        found[placement] = max(differences)
    return found


def sent(rank: int, placement: str) -> tuple[int, int, int, int]:
    """Bytes that this rank sent in a step, and that the plan says of the average rank; elements that it holds, and of
    the largest parameter."""
    options = {"residency": False, "prefetch": None}
    model = zinf_fx.offload(training.model(), placement=placement, partition="owner", **options)
    counted, planned = training.bytes_sent(model)
    sizes = [parameter.numel() for parameter in model.parameters()]
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return counted, planned, held, max(sizes)


def check_sent(found: list[tuple[int, int, int, int]]) -> None:
    counted, planned, held, largest = zip(*found, strict=True)
    assert sum(counted) == sum(planned) and min(counted) < max(counted)
    assert max(held) - min(held) <= largest[0]


def on_two(rank: int) -> tuple:
    options = {"steps": 3, "micro_batches": 2}
    return (
        compare(rank, ("nvme",), options),
        compare(rank, ("infinity-nvme",), options | {"steps": 2, "clip": 0.5, "eps": EPSILON}, tile=2500),
        sent(rank, "infinity-nvme"),
    )


def test_two_ranks_own_parameters_and_tiles():
    results = on_ranks(2, on_two)
    for bitwise, tiled, _ in results:
        assert bitwise == {"nvme": 0.0}
        assert tiled["infinity-nvme"] < ROUNDING
    check_sent([each for *_, each in results])


def on_four(rank: int) -> tuple:
    options = {"steps": 3, "micro_batches": 2, "eps": EPSILON}
    mesh = init_device_mesh("cpu", (2, 2))
    return (
        compare(rank, ("zero-1", "zero-3"), options),
        compare(rank, ("zero-2", "infinity-cpu"), options, mesh=mesh, tile=2500),
        sent(rank, "zero-3"),
    )


@pytest.mark.slow
def test_gradients_and_states_that_two_ranks_own():
    for differences in on_ranks(2, compare, ("zero-2",), {"steps": 3, "micro_batches": 2}):
        assert differences == {"zero-2": 0.0}


@pytest.mark.slow
def test_four_ranks_own_parameters_in_one_group_and_in_two():
    results = on_ranks(4, on_four)
    for plain, hybrid, _ in results:
        assert max(*plain.values(), *hybrid.values()) < ROUNDING and len(plain) == len(hybrid) == 2
    check_sent([each for *_, each in results])
