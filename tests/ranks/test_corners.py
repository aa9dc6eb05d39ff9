"""What is small, empty, or oddly laid out, and unusual orders: all ranks do the same, and nothing is lost."""

from __future__ import annotations

import copy
import io
import os
import time
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from gate import slow
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.errors import OptimizerError, RanksError, StoredTensorError
from zinf_fx.runtime.gradients import accumulate, backward

SOON = 20.0
HOST_AND_NVME = {"parameters": "host", "gradients": "nvme", "optimizer": "nvme", "stage": 2}


class Small(nn.Module):
    """Parameters of which one rank has all elements, of no elements, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(5, 7)
        self.head = nn.Linear(7, 70)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.linear(x).tanh()) * self.scale).square().mean() + self.empty.sum()


def train(model: nn.Module, run: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        run(torch.randn(4, 5, generator=generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def small(rank: int) -> dict[str, float]:
    """Return the largest difference to DistributedDataParallel."""
    twin = Small()
    train(twin, nn.parallel.DistributedDataParallel(twin), torch.optim.AdamW(twin.parameters(), 0.1, fused=True), rank)
    apart = {}
    for optimizer in (zinf_fx.optim.AdamW, torch.optim.AdamW):
        for placement in ("zero-1", "infinity-nvme", HOST_AND_NVME):
            model = zinf_fx.offload(Small(), placement=placement, collective_timeout=SOON)
            run = torch.compile(model, backend="zinf") if placement == "infinity-nvme" else model
            train(model, run, optimizer(model.parameters(), 0.1, fused=True), rank)
            pairs = zip(model.parameters(), twin.parameters(), strict=True)
            differences = [(mine.full_tensor() - theirs).abs() for mine, theirs in pairs]
            name = f"{optimizer.__module__} {placement}"
            apart[name] = max(difference.max().item() for difference in differences if difference.numel())
    return apart


def test_parameters_smaller_than_a_shard_train_as_distributed_data_parallel():
    for differences in on_ranks(2, small):
        assert len(differences) == 6 and max(differences.values()) < 1e-6, differences


AFTER_ERRORS = {"eager": {}, "whole": {}, "packs": {"pack": "auto"}, "tiles": {"tile": "4KiB"}}


def after_an_error(model: nn.Linear, how: str, inputs: torch.Tensor) -> list[float]:
    """Return what is accumulated under no_sync, and then outside, after a backward pass that failed in between; of the
    weight and of the bias."""
    run = model if how == "eager" else torch.compile(model, backend="zinf")
    with zinf_fx.no_sync():
        run(inputs).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        for module in (backward, accumulate):
            patch.setattr(module, "accumulate", Mock(side_effect=InterruptedError))
        with pytest.raises(InterruptedError):
            run(inputs).sum().backward()
    run(inputs).sum().backward()
    return [value for p in model.parameters() for value in p.grad.full_tensor().unique().tolist()]


def gradients(rank: int, placement: str) -> dict[str, object]:
    """Return gradients of one linear layer whose inputs are 1 on the first rank and 2 on the second: 1.5 on average."""
    inputs = torch.full((1, 64), rank + 1.0)

    def layer(**options: str) -> nn.Linear:
        return zinf_fx.offload(nn.Linear(64, 64), placement=placement, collective_timeout=SOON, **options)

    def value(model: nn.Module) -> list[float]:
        return model.weight.grad.full_tensor().unique().tolist()

    by_case: dict[str, object] = {}
    early = nn.Linear(64, 64)
    early(inputs).sum().backward()
    zinf_fx.offload(early, placement=placement, collective_timeout=SOON)
    for kind in (zinf_fx.optim.AdamW, torch.optim.AdamW):
        with pytest.raises(OptimizerError, match="of this rank alone"):
            kind(early.parameters(), fused=True).step()
    early(inputs).sum().backward()
    by_case["before offload and after it"] = value(early)

    model = layer()
    model(inputs).sum().backward()
    torch.autograd.grad(model(inputs).square().sum(), model.weight)
    by_case["beside torch.autograd.grad"] = value(model)

    model = layer()
    with zinf_fx.no_sync():
        model(inputs).sum().backward()
    twin = copy.deepcopy(model)
    twin(inputs).sum().backward()
    by_case["of a copy"] = value(twin)
    for how, options in AFTER_ERRORS.items():
        by_case[how] = after_an_error(layer(**options), how, inputs)
    return by_case


@pytest.mark.parametrize("placement", [slow("dp"), "zero-2"])
def test_gradients_of_one_rank_are_reduced_once_and_never_lost(placement: str):
    for by_case in on_ranks(2, gradients, placement):
        expected = {"before offload and after it": [3.0], "beside torch.autograd.grad": [1.5], "of a copy": [3.0]}
        # Eager autograd had added the bias's gradient of the pass that failed.
        expected |= {how: [3.0, 3.0 if how == "eager" else 2.0] for how in AFTER_ERRORS}
        assert by_case == expected


def second_derivatives(rank: int) -> list[str]:
    """Return what ranks that train together are told of gradients that they can't have."""
    model = zinf_fx.offload(nn.Linear(64, 64), placement="zero-2", collective_timeout=SOON)
    said = []
    inputs = torch.ones(2, 64)
    for attempt in (
        lambda: model(inputs).square().sum().backward(create_graph=True),
        lambda: torch.autograd.grad(torch.compile(model, backend="zinf")(inputs).sum(), list(model.parameters())),
    ):
        with pytest.raises(StoredTensorError) as caught:
            attempt()
        said.append(str(caught.value))
    assert all(parameter.grad is None for parameter in model.parameters())
    model(inputs).sum().backward()
    assert model.bias.grad.full_tensor().unique().tolist() == [2.0]
    return said


def test_gradients_with_graphs_and_returned_ones_are_refused():
    for recorded, returned in on_ranks(2, second_derivatives):
        assert "2 ranks reduce it" in recorded and "where 2 ranks train it" in returned


def values(rank: int) -> dict[str, object]:
    """Return what ranks agree on, whatever its dtype and strides; and what is written to files."""
    torch.manual_seed(rank)
    model = nn.Linear(6, 40)
    model.weight = nn.Parameter(torch.randn(6, 40).t())
    for name, buffer in {
        "complex": torch.randn(3, dtype=torch.complex64),
        "short": torch.full((), rank, dtype=torch.int16),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "transposed": torch.randn(3, 4).t(),
        "empty": torch.empty(0),
    }.items():
        model.register_buffer(name, buffer)
    zinf_fx.offload(model, placement="zero-3", collective_timeout=SOON)
    file = io.BytesIO()
    torch.save(zinf_fx.offload(nn.Linear(1, 1), placement="nvme", collective_timeout=SOON).state_dict(), file)
    return {
        "agreed": {
            name: (value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value).tolist()
            for name, value in model.state_dict().items()
        },
        "bytes in a file": len(file.getvalue()),
    }


def lost(rank: int) -> list[str]:
    """Errors of the first rank, when the second one comes late to gather what the optimizer updated: before the gather
    begins, as users do it, and while it is under way, as in graphs."""
    model = zinf_fx.offload(nn.Linear(64, 64), placement="zero-2", collective_timeout=1.0)
    model(torch.ones(2, 64)).sum().backward()
    zinf_fx.optim.SGD(model.parameters(), lr=1.0).step()
    errors = []
    if rank:
        time.sleep(2)
        return errors
    for gather in (model.weight.full_tensor, model.weight.stored.refreshed, model.weight.stored.refreshed):
        with pytest.raises(RanksError) as raised:
            gather()
        errors.append(str(raised.value))
    return errors


def late(rank: int) -> str:
    """Return the error when torch.distributed is initialised after the model was offloaded."""
    dist.destroy_process_group()
    model = zinf_fx.offload(nn.Linear(64, 64), placement="zero-3")
    folder = os.path.dirname(os.environ["ZINF_STORE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/late", rank=rank, world_size=2)
    with pytest.raises(Exception) as raised:
        torch.compile(model, backend="zinf")(torch.ones(1, 64))
    return str(raised.value)


def odd(rank: int) -> tuple[dict[str, object], list[str], str]:
    by_case = values(rank)
    with pytest.raises(Exception, match="give it once, where the model is offloaded"):
        model = zinf_fx.offload(nn.Linear(8, 8), placement="zero-3", collective_timeout=SOON)
        torch.compile(model, backend="zinf", options={"reduce_dtype": torch.bfloat16})(torch.ones(1, 8))
    with pytest.raises(OptimizerError, match="takes all ranks at the same time: leave step_in_backward out"):
        zinf_fx.optim.Adafactor(model.parameters(), step_in_backward=True)
    return by_case, lost(rank), late(rank)


def test_odd_values_and_failures():
    (first, errors, late_error), (second, _, _) = on_ranks(2, odd)
    assert first == second
    assert first["bytes in a file"] < 4096  # a shard on NVMe is larger than that
    assert "gather of parameter 'weight'" in errors[0] and "within collective_timeout (1 s)" in errors[0]
    assert "all-gather of parameter 'weight' failed on rank 0 of 2" in errors[1] and "failed before" in errors[2]
    assert "before offload()" in late_error


def groups(rank: int) -> tuple[float, float]:
    """Train two models, of two ranks each."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank)
    group = pairs[rank // 2]
    model = zinf_fx.offload(nn.Linear(64, 64), placement="zero-3", process_group=group, collective_timeout=SOON)
    loss = torch.compile(model, backend="zinf")(torch.full((2, 64), rank + 1.0)).sum()
    loss.backward()
    return model.weight.full_tensor().sum().item(), model.weight.grad.full_tensor().mean().item()


@pytest.mark.slow
def test_two_process_groups_train_a_model_each():
    first, second, third, fourth = on_ranks(4, groups)
    assert first == second != third == fourth
    assert first[1] == 3.0 and third[1] == 7.0
