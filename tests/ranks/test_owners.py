"""Parameters that are whole at one rank each, which broadcasts them: the training of DistributedDataParallel."""

from __future__ import annotations

from functools import partial

import pytest
from ranks import training
from ranks.launching import on_ranks
from ranks.training import ROUNDING, Loop, adamw, differences
from torch.distributed.device_mesh import init_device_mesh

import zinf_fx

# Where tiles round otherwise: see test_tiled_training.
TILED = adamw(eps=1e-4)

owned = partial(differences, partition="owner")


def sent(rank: int, placement: str) -> tuple[int, int, int, int]:
    """Return bytes that this rank sent in a step, and that the plan says of the average rank; elements that it holds,
    and of the largest parameter."""
    options = {"residency": False, "prefetch": None}
    model = zinf_fx.offload(training.model(), placement=placement, partition="owner", **options)
    counted, planned = training.bytes_sent(model)
    sizes = [parameter.numel() for parameter in model.parameters()]
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return counted, planned, held, max(sizes)


def check_sent(results: list[tuple[int, int, int, int]]) -> None:
    counted, planned, held, largest = zip(*results, strict=True)
    assert sum(counted) == sum(planned) and min(counted) < max(counted)
    assert max(held) - min(held) <= largest[0]


def on_two(rank: int) -> tuple:
    tiled = Loop(2, micro_batches=2, clip=0.5, optimizers=TILED)
    return (
        owned(rank, ["nvme"], Loop(3, micro_batches=2)),
        owned(rank, ["infinity-nvme"], tiled, tile=2500),
        sent(rank, "infinity-nvme"),
    )


def test_two_ranks_own_parameters_and_tiles():
    results = on_ranks(2, on_two)
    for bitwise, tiled, _ in results:
        assert bitwise == [0.0] and tiled[0] < ROUNDING
    check_sent([counts for *_, counts in results])


def on_four(rank: int) -> tuple:
    loop = Loop(3, micro_batches=2, optimizers=TILED)
    mesh = init_device_mesh("cpu", (2, 2))
    return (
        owned(rank, ["zero-1", "zero-3"], loop),
        owned(rank, ["zero-2", "infinity-cpu"], loop, mesh=mesh, tile=2500),
        sent(rank, "zero-3"),
    )


@pytest.mark.slow
def test_gradients_and_states_that_two_ranks_own():
    for apart in on_ranks(2, owned, ["zero-2"], Loop(3, micro_batches=2)):
        assert apart == [0.0]


@pytest.mark.slow
def test_four_ranks_own_parameters_in_one_group_and_in_two():
    results = on_ranks(4, on_four)
    for plain, hybrid, _ in results:
        assert max(*plain, *hybrid) < ROUNDING and len(plain) == len(hybrid) == 2
    check_sent([counts for *_, counts in results])
