"""Steps that depend on more than this rank's shard: scaled gradients, masters, updates in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gate import slow
from ranks import training
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.errors import OptimizerError
from zinf_fx.optim.formats import decode, encode
from zinf_fx.sizes import BLOCK

# Parameters are whole on every rank, which then have to agree, or are in shards.
WHOLE_AND_SHARDED = ("zero-1", "infinity-nvme")
# By placement, whether the steps with masters are taken in backward.
WITH_MASTERS = {"infinity-nvme": True}
# Of parameters that are updated whole: zinf's class, and PyTorch's.
UPDATED_WHOLE = {"infinity-nvme": zinf_fx.optim.Adafactor}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with zinf_fx.gathered(model) as values:
        return {name: v.detach().clone() for (name, _), v in zip(model.named_parameters(), values, strict=True)}


def scaled(run: Callable, optimizer: Any) -> list[float]:
    """Three steps with a GradScaler; in the second, one element of one gradient on the last rank is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    rank = torch.distributed.get_rank()
    scales = []
    for number, ((tokens, targets),) in enumerate(training.batches(3, rank, 1)):
        loss = run(tokens, targets)
        if number == 1 and rank == torch.distributed.get_world_size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def with_a_scaler(rank: int) -> dict[str, tuple[list[float], float]]:
    """By placement: the scale after each step, and the largest difference to DistributedDataParallel."""
    plain = training.model()
    wrapped = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    expected = scaled(wrapped, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True))
    found = {"plain": (expected, 0.0)}
    for placement in WHOLE_AND_SHARDED:
        model = zinf_fx.offload(training.model(), placement=placement)
        scales = scaled(torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
        got = weights(model)
        differences = [(got[n] - p).abs().max().item() for n, p in plain.named_parameters()]
        found[placement] = scales, max(differences)
    return found


def test_a_step_is_skipped_on_every_rank_when_one_has_an_infinite_gradient():
    for found in on_ranks(2, with_a_scaler):
        assert found["plain"][0] == [256.0, 128.0, 128.0]
        for placement, (scales, difference) in found.items():
            assert scales == found["plain"][0] and difference == 0.0, placement


def in_low_precision(rank: int, cases: dict[str, bool], options: dict[str, str]) -> dict[str, float]:
    """By placement: the largest difference of bf16 parameters, after steps in `step()` or in backward, to an explicit
    fp32 master that is stepped with the average of the ranks' gradients, and whose states are kept as `options` say."""
    plain = training.model(torch.bfloat16)
    trained = [p for p in plain.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for (batch,) in training.batches(3, rank, 1):
        plain.zero_grad()
        plain(*batch).backward()
        for p, master in zip(trained, masters, strict=True):
            if p.grad is not None:
                average = p.grad / 2
                torch.distributed.all_reduce(average)
                master.grad = average.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(trained, masters, strict=True):
                p.copy_(master)
        for state in optimizer.state.values() if options else ():
            for name in ("exp_avg", "exp_avg_sq"):
                _round(name, state[name])
    found = {}
    for placement, in_backward in cases.items():
        model = zinf_fx.offload(training.model(torch.bfloat16), placement=placement)
        run = torch.compile(model, backend="zinf")
        mine = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2, step_in_backward=in_backward, **options)
        for (batch,) in training.batches(3, rank, 1):
            run(*batch).backward()
            mine.step()
            mine.zero_grad()
        got = weights(model)
        differences = [(got[n] - p).abs().max().item() for n, p in plain.named_parameters()]
        found[placement] = max(differences)
    return found


def _round(name: str, value: torch.Tensor) -> None:
    """Leave of a state's value what codes of 8 bits have of it."""
    codes, scales = torch.empty(value.numel(), dtype=torch.uint8), torch.empty(-(-value.numel() // BLOCK))
    encode(name, value.view(-1), codes, scales)
    decode(name, codes, scales, value.view(-1))


@pytest.mark.parametrize("options", [slow({}), {"state_dtype": "8bit", "master_dtype": "split"}])
@pytest.mark.parametrize("cases", [WITH_MASTERS, slow({"zero-1": False, "zero-2": True})])
def test_masters_and_steps_in_backward(cases: dict[str, bool], options: dict[str, str]):
    """With codes, blocks are those of the whole parameter on any number of ranks."""
    for found in on_ranks(2, in_low_precision, cases, options):
        assert found == dict.fromkeys(cases, 0.0)


def whole(rank: int, cases: dict[str, type[torch.optim.Optimizer]]) -> dict[str, float]:
    """By placement: the largest difference to DistributedDataParallel with the plain optimizer."""
    found = {}
    plain = training.model()
    wrapped = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    _steps(wrapped, torch.optim.Adafactor(plain.parameters()), rank)
    for placement, kind in cases.items():
        model = zinf_fx.offload(training.model(), placement=placement)
        _steps(torch.compile(model, backend="zinf"), kind(model.parameters()), rank)
        got = weights(model)
        differences = [(got[n] - p).abs().max().item() for n, p in plain.named_parameters()]
        found[placement] = max(differences)
    return found


def _steps(run: Callable, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for (batch,) in training.batches(3, rank, 1):
        run(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "cases", [UPDATED_WHOLE, slow({"zero-3": torch.optim.Adafactor, "zero-1": zinf_fx.optim.Adafactor})]
)
def test_whole_parameters_are_updated_alike_on_every_rank(cases: dict[str, type[torch.optim.Optimizer]]):
    for found in on_ranks(2, whole, cases):
        assert found == dict.fromkeys(cases, 0.0)


def whole_in_backward(rank: int) -> str:
    model = zinf_fx.offload(training.model(), placement="zero-3")
    with pytest.raises(OptimizerError) as error:
        zinf_fx.optim.Adafactor(model.parameters(), step_in_backward=True)
    return str(error.value)


def test_whole_parameters_in_shards_are_not_updated_in_backward():
    for message in on_ranks(2, whole_in_backward):
        assert "takes all ranks at the same time: leave step_in_backward out" in message
