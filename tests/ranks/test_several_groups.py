"""One optimizer over models that different ranks train, as those of experts and of what all experts share."""

from __future__ import annotations

import gc
import math
import threading

import pytest
import torch
import torch.distributed as dist
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.runtime.ranks import Ranks


def shared_and_own(ranks: int) -> tuple[nn.Module, nn.Module]:
    """Return a layer that all ranks train, and one that so many neighbours do, with their gradients: 1 for every weight
    of the first, and the number of their group for those of the second."""
    first = dist.get_rank() // ranks * ranks
    group = dist.new_group(range(first, first + ranks), use_local_synchronization=True)
    shared = zinf_fx.offload(nn.Linear(64, 64, bias=False), placement="zero-3")
    own = zinf_fx.offload(nn.Linear(64, 64, bias=False), placement="zero-3", process_group=group)
    (shared(torch.ones(1, 64)) + own(torch.full((1, 64), float(first // ranks)))).sum().backward()
    return shared, own


def skipped(rank: int) -> bool:
    """Return whether all skip a step for an infinity in the last rank's shard of what they share, which isn't first."""
    shared, own = shared_and_own(1)
    optimizer = zinf_fx.optim.SGD([*own.parameters(), *shared.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with zinf_fx.gathered(shared.weight.grad, modify=True) as gradient:
        gradient[-1, -1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() == 2.0


def test_an_infinity_in_one_shard_concerns_all():
    assert on_ranks(2, skipped) == [True, True]


def norms(rank: int) -> list[float]:
    """Return norms of the gradients of both layers, whichever comes first."""
    layers = shared_and_own(2)
    gradients = [layer.weight.grad for layer in layers]
    return [torch.nn.utils.get_total_norm(ordered, foreach=True).item() for ordered in (gradients, gradients[::-1])]


def known_after_cycles(rank: int) -> list[tuple[int, int]]:
    """Return how many ranks and how many threads there are after torch.distributed was initialised again, and again."""
    counts, store = [], dist.distributed_c10d._get_default_store()
    for cycle in range(3):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(str(cycle), store), rank=rank, world_size=2)
        zinf_fx.offload(nn.Linear(8, 8), placement="zero-3").weight.full_tensor()
        gc.collect()
        watchdogs = [thread for thread in threading.enumerate() if "watchdog" in thread.name]
        counts.append((len(Ranks._known), len(watchdogs)))
    return counts


def test_nothing_is_kept_of_ranks_whose_group_was_destroyed():
    assert on_ranks(2, known_after_cycles) == [[(1, 1)] * 3] * 2


@pytest.mark.slow
def test_norms_are_over_the_ranks_of_each_model():
    for rank, totals in enumerate(on_ranks(4, norms)):
        assert totals == [pytest.approx(64 * math.sqrt(1 + (rank // 2) ** 2))] * 2
