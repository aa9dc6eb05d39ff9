"""Whether ranks compare what they are about to start follows from the plan, and not from what happened on one of them:
what eager code wrote there, what it has just compiled, and where gradients are accumulated first."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from gate import slow
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.errors import RanksError
from zinf_fx.runtime.execute import order
from zinf_fx.runtime.execute.order import CollectiveOrder

SOON = 6.0
STEPS = 3


class Taught(nn.Module):
    """Has a trained part, and a frozen one in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = nn.Linear(8, 4).requires_grad_(False)


def taught(seed: int) -> Taught:
    torch.manual_seed(seed)
    return Taught()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, zinf_fx.StoredTensor) else parameter.detach()


@torch.no_grad()
def write(model: Taught, how: str, rank: int, step: int) -> None:
    """What eager code does before a step."""
    if how == "clips weights":
        for parameter in model.parameters():
            parameter.copy_(whole(parameter).clamp(-0.2, 0.2))
    elif how == "averages weights":
        for mine, theirs in zip(model.teacher.parameters(), model.student[2].parameters(), strict=True):
            mine.copy_(0.5 * whole(mine) + 0.5 * whole(theirs))
    elif how in ("writes on the second", "writes on the first") and step == 0 and rank == (how[-1] == "d"):
        model.student[0].weight.add_(1.0)


def trained(model: Taught, student, teacher, optimizer: torch.optim.Optimizer, how: str, rank: int) -> list[float]:
    """Return the losses. The second rank's batch has another size than the first one's, from the second step on."""
    losses = []
    for step in range(STEPS):
        write(model, how, rank, step)
        x = torch.ones(4 + step * rank, 8) * (rank + 1 + torch.arange(8) / 8)
        target = torch.zeros(())
        if how != "skips the teacher" or rank == 0:
            with torch.no_grad() if how == "averages weights" else nullcontext():
                target = teacher(x)
        loss = (student(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(rank: int, placement: str, how: str) -> tuple[bool, float]:
    """Return whether losses and parameters equal those of DistributedDataParallel; the sum of the parameters here."""
    plain = taught(0)
    with torch.no_grad():
        if how == "writes on the first":
            plain.student[0].weight.add_(1.0)
    wrapped = nn.parallel.DistributedDataParallel(plain.student)
    eager = "" if how.startswith("writes") else how
    optimizer = torch.optim.SGD(plain.student.parameters(), lr=0.01)
    expected = trained(plain, wrapped, plain.teacher, optimizer, eager, rank)

    model = zinf_fx.offload(taught(rank), placement=placement, collective_timeout=SOON)
    student, teacher = (torch.compile(part, backend="zinf") for part in (model.student, model.teacher))
    optimizer = zinf_fx.optim.SGD(model.student.parameters(), lr=0.01)
    losses = trained(model, student, teacher, optimizer, how, rank)
    values = [whole(parameter) for parameter in model.parameters()]
    same = all(map(torch.equal, values, (parameter.detach() for parameter in plain.parameters())))
    return same and losses == expected, sum(value.sum().item() for value in values)


CASES = [
    slow("clips weights", "dp"),
    slow("averages weights", "dp"),
    ("writes on the second", "dp"),
    ("skips the teacher", "zero-2"),
    slow("writes on the first", "zero-2"),
    slow("clips weights", "zero-2"),
    slow("averages weights", "zero-2"),
    slow("writes on the second", "zero-2"),
    slow("writes on the first", "dp"),
    slow("skips the teacher", "dp"),
]


@pytest.mark.parametrize(("how", "placement"), CASES)
def test_ranks_where_eager_code_writes_train_as_distributed_data_parallel(how: str, placement: str):
    (same, first), (same_there, second) = on_ranks(2, compared, placement, how)
    assert same and same_there and first == second


def accumulates_alone(rank: int, placement: str) -> tuple[list[str], str]:
    """Return what this rank did before its error; the second one accumulates the first of two micro-batches, alone."""
    model = zinf_fx.offload(taught(rank).student, placement=placement, collective_timeout=SOON)
    run = torch.compile(model, backend="zinf")
    done = []
    try:
        with zinf_fx.no_sync() if rank else nullcontext():
            run(torch.ones(4, 8)).sum().backward()
        done.append("the first backward pass")
        run(torch.ones(4, 8)).sum().backward()
        done.append("the second backward pass")
    except RanksError as error:
        return done, str(error)
    return done, ""


@pytest.mark.parametrize("placement", ["dp", slow("zero-1"), slow("zero-2"), slow("zero-3")])
def test_a_rank_that_accumulates_alone_is_told_so_before_the_collective(placement: str):
    for done, error in on_ranks(2, accumulates_alone, placement):
        assert done == [] and "no_sync() on some of them" in error
        assert "rank 0: the reduction of the gradient of" in error and "rank 1: nothing more" in error


def describes_nothing(rank: int) -> None:
    model = zinf_fx.offload(taught(rank).student, placement="zero-2", collective_timeout=SOON)
    run, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.SGD(model.parameters(), lr=0.01)
    with mock.patch.object(CollectiveOrder, "_due_now", side_effect=AssertionError("no error needs it")):
        for _ in range(2):
            run(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_due_is_described_for_errors_alone():
    on_ranks(2, describes_nothing)


def test_numbers_that_differ_where_descriptions_do_not_are_an_error_all_the_same():
    ranks = mock.Mock(of_all=lambda value, what: [value, value])
    with pytest.raises(RanksError, match="rank 1: what has the same description"):
        order._refuse(ranks, "the forward graph", ["forward", "the refresh of weight"])
