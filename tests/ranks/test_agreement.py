"""Ranks that differ, or end, are an error on the others, and soon; nothing hangs and no scratch is left."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.runtime.memory.process import MemoryLimit
from zinf_fx.runtime.ranks import Ranks

SOON = 5.0


def first_error(call) -> tuple[str, str, float]:
    """Its type and text, and the seconds until it was raised."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def different_plans(rank: int) -> tuple[str, str, float]:
    model = zinf_fx.offload(training.model(), placement="zero-3", collective_timeout=SOON)
    run = torch.compile(model, backend="zinf", options={"prefetch": (1, 2, 3) if rank else None})
    ((batch,),) = training.batches(1, rank, 1)
    return first_error(lambda: run(*batch))


def test_plans_that_differ_are_refused_on_every_rank_before_the_first_step():
    for kind, text, _ in on_ranks(2, different_plans):
        assert kind == "RanksError" and "disagree about the plan" in text and "rank 1: " in text


def one_ends(rank: int) -> tuple[str, str, float]:
    """The second rank is killed between two steps."""
    model = zinf_fx.offload(training.model(), placement="infinity-nvme", collective_timeout=SOON)
    run = torch.compile(model, backend="zinf")
    ((batch,),) = training.batches(1, rank, 1)
    run(*batch).backward()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return first_error(lambda: run(*batch).backward())


def test_a_killed_rank_ends_the_others_within_the_timeout():
    (kind, text, seconds), _ = on_ranks(2, one_ends, killed=[1])
    assert kind == "RanksError" and "rank 1 ended" in text and "tokens.weight" in text
    assert seconds < 2 * SOON


def refused(rank: int) -> list[tuple[str, str]]:
    """Return what is refused before anything is moved, or lost."""
    model = training.model()
    on_disk = first_error(lambda: zinf_fx.offload(model, placement={"parameters": "nvme", "stage": 2}))
    unchanged = not any(isinstance(p, zinf_fx.StoredTensor) for p in model.parameters())
    zinf_fx.offload(model, placement="zero-2")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    ((batch,),) = training.batches(1, rank, 1)
    with zinf_fx.no_sync():
        model(*batch).backward()
    alone = first_error(optimizer.step)
    tiled = first_error(lambda: torch.compile(model, backend="zinf", options={"tile": 4096})(*batch))
    return [on_disk[:2], ("", str(unchanged)), alone[:2], tiled[:2]]


def test_what_many_ranks_can_not_do_is_refused():
    for on_disk, (_, unchanged), alone, tiled in on_ranks(2, refused):
        assert on_disk[0] == "ConfigError" and "stage 3 partitions them" in on_disk[1] and unchanged == "True"
        assert alone[0] == "OptimizerError" and "no_sync" in alone[1]
        assert tiled[0] == "ConfigError" and "give it once, where the model is offloaded" in tiled[1]


def replicas(rank: int) -> list[list[float]]:
    """Train a replica that eager code initialised with each rank's own random numbers."""
    model = zinf_fx.offload(training.model(), placement="zero-2")
    torch.manual_seed(100 + rank)
    torch.nn.init.normal_(model.layers[0].weight)
    run = torch.compile(model, backend="zinf")
    ((batch,),) = training.batches(1, 0, 1)
    return [run(*batch).item(), model.layers[0].weight.full_tensor().sum().item()]


def test_replicas_that_were_initialised_apart_agree_from_the_first_compiled_call_on():
    first, second = on_ranks(2, replicas)
    assert first == second


class Initialised(torch.nn.Module):
    """A model that eager code initialises once more when its parameters have left, and of which some is random."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 96))
        self.table = torch.nn.Embedding(97, 60)
        self.register_buffer("noise", torch.randn(3))
        torch.nn.init.normal_(self.layers[0].weight)
        torch.nn.init.trunc_normal_(self.table.weight)
        with torch.no_grad():
            self.layers[2].weight[1].uniform_()
            self.table.weight.data = torch.randn(97, 60, dtype=torch.float64)


def built_with_other_seeds(rank: int, options: dict[str, object]) -> list[bool]:
    torch.manual_seed(rank)
    with zinf_fx.offloading(collective_timeout=SOON, **options):
        model = Initialised().to(torch.bfloat16)
    after = torch.rand(3)
    torch.manual_seed(0)
    plain = Initialised().to(torch.bfloat16)
    values = model.state_dict()
    return [
        *(values[name].equal(value) for name, value in plain.state_dict().items()),
        bool(rank) or torch.rand(3).equal(after),
    ]


@pytest.mark.parametrize(
    "options",
    [{"placement": "zero-3"}, {"placement": "infinity-nvme"}, {"placement": "zero-2"}, {"placement": "dp"}],
    ids=lambda options: options["placement"],
)
def test_a_model_that_is_built_with_other_seeds_has_the_values_of_the_first_rank(options):
    assert all(map(all, on_ranks(2, built_with_other_seeds, options)))


def built_otherwise(rank: int, how: str) -> tuple[str, str, float]:
    def build() -> None:
        with zinf_fx.offloading(placement="zero-3", collective_timeout=SOON):
            model = Initialised(96 + 64 * rank if how == "shape" else 96)
            if rank:
                torch.nn.init.ones_(model.layers[0].weight if how == "write" else model.layers[1].weight)
            else:
                torch.nn.init.ones_(model.layers[0].bias)

    return first_error(build)


@pytest.mark.parametrize("how", ["shape", "write"])
def test_ranks_that_build_other_models_are_told(how):
    for kind, text, seconds in on_ranks(2, built_otherwise, how):
        assert kind == "RanksError" and "model that is being built" in text and "rank 1" in text
        assert seconds < 2 * SOON


def wide() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))


def decided(rank: int) -> list[str]:
    """Return the placements that ranks take where the first one has less memory than the other, or next to none."""
    x = torch.ones(2, 256)

    def memory(of_the_first: int) -> mock._patch:
        nbytes = 1 << 40 if rank else of_the_first
        return mock.patch("zinf_fx.frontend.auto_placement.memory_limit", lambda: MemoryLimit(nbytes, "a test"))

    with memory(4_800_000):  # a rank's states take 4,210,688 bytes
        options = {"chunk": "64KiB", "pack": None}  # what else would be there at a time
        model = zinf_fx.offload(wide(), **options)
        compiled = wide()
        torch.compile(compiled, backend="zinf", options=options)(x)
    placements = [str(next(net.parameters()).stored.placement) for net in (model, compiled)]
    with memory(64):
        error = first_error(lambda: torch.compile(wide(), backend="zinf")(x))
    return [*placements, *error[:2]]


def test_ranks_take_the_placement_that_the_first_one_decides():
    first, second = on_ranks(2, decided)
    assert first == second
    offloaded, simulated, kind, text = first
    assert "optimizer='nvme'" in offloaded and "'nvme'" in simulated
    assert kind == "BudgetError" and "placement 'auto' finds none that fits" in text


def test_what_ranks_decide_is_decided_once_and_not_by_a_failure():
    ranks, decide = Ranks(None, SOON), mock.Mock(side_effect=[OSError, 0, 1])
    assert first_error(lambda: ranks.decided_once("a", decide))[0] == "OSError"
    assert [ranks.decided_once(key, decide) for key in ("a", "a", "b", "a")] == [0, 0, 1, 0]
