"""Ranks whose batches have other sizes, as padded texts have: each compiles for its own when it meets new ones, and all
train as DistributedDataParallel does. What ranks must not do apart is an error on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from gate import slow
from ranks import training
from ranks.launching import on_ranks

import zinf_fx

# By step, those of three micro-batches, which ranks take from different places on.
LENGTHS = [(7, 11, 5), (7, 9, 8), (12, 9, 3), (3, 30, 6), (1, 5, 9)]


def batches(rank: int, micro_batches: int, multiple: int = 1, steps: int = 5) -> Iterator[list[torch.Tensor]]:
    """Return, for each step, this rank's micro-batches: tokens and targets, of other sizes than on other ranks.
    `multiple`: of which the number of texts is one."""
    generator = torch.Generator().manual_seed(1000 + rank)
    for step, lengths in enumerate(LENGTHS[:steps]):
        yield [
            torch.randint(
                training.VOCABULARY,
                (2, (2 + (step + rank + number) % 2) * multiple, lengths[(rank + number) % len(lengths)]),
                generator=generator,
            )
            for number in range(micro_batches)
        ]


def losses_of(
    run, optimizer, no_sync, rank: int, micro_batches: int, evaluates: bool, multiple: int, steps: int
) -> list[float]:
    losses = []
    for step, micro in enumerate(batches(rank, micro_batches, multiple, steps)):
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
    rank: int, placement: str, dynamic: bool | None, options: dict, micro_batches: int, evaluates: bool, steps: int = 5
) -> tuple[bool, float]:
    """Return whether losses and parameters equal those of DistributedDataParallel, and how far parameters are from
    them."""
    plain = training.model()
    wrapped = torch.nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    rest = rank, micro_batches, evaluates, 4 if "micro_batches" in options else 1, steps
    expected = losses_of(wrapped, optimizer, wrapped.no_sync, *rest)
    model = zinf_fx.offload(training.model(seed=rank), placement=placement, **options)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = losses_of(torch.compile(model, backend="zinf", dynamic=dynamic), optimizer, zinf_fx.no_sync, *rest)
    with zinf_fx.gathered(model) as values:
        pairs = list(zip(values, plain.parameters(), strict=True))
        same = losses == expected and all(torch.equal(mine, theirs) for mine, theirs in pairs)
        return same, max((mine - theirs).abs().max().item() for mine, theirs in pairs)


CASES = [
    ("zero-2", True, {}, 1, False, 2),
    ("infinity-nvme", None, {"device_memory": "160KiB"}, 1, False, 2),
    *(
        slow(*case, 5)
        for case in [
            ("zero-3", None, {"tile": "8KiB", "activations": "recompute"}, 2, True),
            ("infinity-nvme", None, {"device_memory": "160KiB"}, 1, False),
            ("infinity-nvme", True, {}, 1, False),
            ("infinity-nvme", None, {}, 1, False),
            ("zero-2", None, {}, 2, True),
            ("zero-1", False, {}, 1, False),
            ("zero-3", False, {}, 1, True),
            ("zero-2", True, {}, 2, True),
            ("dp", None, {}, 2, True),
            ("infinity-nvme", None, {"pack": "8KiB", "prefetch": (2, 3, 4)}, 2, True),
            ("infinity-nvme", None, {"pack": None, "prefetch": None}, 2, True),
            ("infinity-nvme", True, {"activations": "offload"}, 2, True),
            ("infinity-nvme", None, {"device_memory": "250KiB", "activations": "auto"}, 1, True),
            ("infinity-nvme", True, {"device_memory": "250KiB", "activations": "offload"}, 1, True),
            ("infinity-nvme", True, {"device_memory": "160KiB"}, 1, True),
            ("infinity-nvme", True, {"host_memory": "500KiB"}, 1, True),
            ("infinity-nvme", True, {"micro_batches": "auto"}, 1, False),
        ]
    ),
]


@pytest.mark.parametrize(("placement", "dynamic", "options", "micro_batches", "evaluates", "steps"), CASES)
def test_ranks_with_batches_of_other_sizes_train_as_distributed_data_parallel(
    placement: str, dynamic: bool | None, options: dict, micro_batches: int, evaluates: bool, steps: int
):
    results = on_ranks(2, trained, placement, dynamic, options, micro_batches, evaluates, steps)
    assert all(same for same, _ in results), results


@pytest.mark.slow
def test_ranks_that_divide_batches_of_other_sizes():
    """Within rounding, as a sum over micro-batches has another order."""
    for _, far in on_ranks(2, trained, "infinity-nvme", True, {"micro_batches": 2}, 1, False):
        assert far < 1e-5


@pytest.mark.slow
def test_three_ranks_with_batches_of_other_sizes():
    for dynamic in (None, True):
        for _, far in on_ranks(3, trained, "infinity-nvme", dynamic, {}, 2, True):
            assert far < 1e-5


SOON = 6.0


class TwoTowers(torch.nn.Module):
    """A frozen tower that a call may do without, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).requires_grad_(False)
        self.trained = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        return self.trained(x if image is None else x + self.tower(image)).square().mean()


def towers(seed: int) -> TwoTowers:
    torch.manual_seed(seed)
    return TwoTowers()


def skips_the_tower(rank: int, placement: str) -> tuple[list[bool], str]:
    """The second rank has an image in every other step. Whether losses are those of DistributedDataParallel, as far as
    the program comes; the error."""
    plain = towers(0)
    wrapped = torch.nn.parallel.DistributedDataParallel(plain)
    model = zinf_fx.offload(towers(rank), placement=placement, collective_timeout=SOON)
    run = torch.compile(model, backend="zinf")
    both = [
        (wrapped, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)),
        (run, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)),
    ]
    same = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x, image = torch.randn(2, 3 + step + rank, 16, generator=generator).unbind()
        losses = []
        for call, optimizer in both:
            try:
                loss = call(x, image if rank == 0 or step % 2 else None)
                loss.backward()
            except Exception as error:
                return same, f"{type(error).__name__}: {error}"
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        same.append(losses[0] == losses[1])
    return same, ""


@pytest.mark.parametrize("placement", [slow("zero-2"), "zero-3"])
def test_a_rank_that_skips_a_frozen_tower(placement: str):
    """Where every rank has all parameters, that changes no collective. Where they are partitioned, the other one needs
    this rank's shards."""
    for same, error in on_ranks(2, skips_the_tower, placement):
        if placement == "zero-2":
            assert same == [True] * 4 and not error
        else:
            assert same == [] and error.startswith("RanksError: ranks disagree about the plan of a graph")
            assert "rank 0: " in error and "rank 1: " in error and "tower.0.weight" in error
            assert "a part that one rank skips" in error


class Experts(torch.nn.Module):
    """A call trains the experts that get tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        return torch.stack([self.experts[number](x).square().mean() for number in which]).sum()


def starves_an_expert(rank: int, placement: str, compiled: bool) -> str:
    """Return the error on this rank, whose tokens go to other experts of the same shape than those of the other one."""
    model = zinf_fx.offload(Experts(), placement=placement, collective_timeout=SOON)
    run = torch.compile(model, backend="zinf") if compiled else model
    x = torch.ones(2 + rank, 16)
    try:
        run(x, [0, 1, 2]).backward()
        run(x, [0, 1] if rank else [0, 2]).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("placement", "compiled"),
    [("zero-3", True), slow("zero-2", True), slow("dp", True), slow("zero-2", False), ("dp", False)],
)
def test_ranks_whose_tokens_go_to_different_experts_are_told_so(placement: str, compiled: bool):
    for error in on_ranks(2, starves_an_expert, placement, compiled):
        assert error.startswith("RanksError: ranks disagree")
        assert "on rank 0" in error or "rank 0: " in error
        assert "experts.1" in error and "experts.2" in error


def goes_apart(rank: int, how: str) -> str:
    """Return the error on this rank, which does something else than the other one."""
    model = zinf_fx.offload(towers(rank), placement="zero-3", collective_timeout=SOON)
    run = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.trained.parameters(), lr=1e-2)
    batch = torch.ones(2, 3 + rank, 16).unbind()
    for _ in range(2):
        run(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        if how == "no_sync" and rank:
            with zinf_fx.no_sync():
                run(*batch).backward()
        elif how == "a batch more" and rank:
            model.trained[1].weight.full_tensor()
        elif how == "evaluates" and rank:
            with torch.no_grad():
                run(*batch)
        else:
            run(*batch).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


SAID = {
    "no_sync": ("rank 1: nothing more", "rank 0: the reduction of the gradient of "),
    "a batch more": ("rank 1 of 2 for the others to come to the gather of", "rank 0 for comparison of the collectives"),
    "evaluates": ("rank 1: the inference graph with", "rank 0: the forward graph with"),
}


@pytest.mark.parametrize("how", SAID)
def test_ranks_that_do_different_things_are_told_so(how: str):
    for error in on_ranks(2, goes_apart, how):
        assert error.startswith("RanksError: ranks")
        for said in SAID[how]:
            assert said in error
