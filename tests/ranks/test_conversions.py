"""Module.to() of a model that two ranks train in tensor parallelism, before its first call and later."""

from __future__ import annotations

import pytest
import torch
from ranks import tensor_parallel as tp
from ranks.launching import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zinf_fx
from zinf_fx.runtime.tensor.local_parameter import stored_parameter


def train_in_parallel(gpt: nn.Module, run: nn.Module) -> list[torch.Tensor | float]:
    """Return losses, gradients and parameters of steps with one optimizer before and after a conversion to what the
    model is, and with another one after that to double, which gradients take part in."""
    results: list[torch.Tensor | float] = []
    opt, other = (torch.optim.AdamW(tp.groups(gpt), fused=True, **tp.STEPS) for _ in range(2))
    for convert, optimizer in ((lambda m: m.to("cpu"), opt), (lambda m: m.float(), opt), (lambda m: m.double(), other)):
        convert(gpt)
        if optimizer is other:
            results += [p.grad.full_tensor().clone() for p in gpt.parameters() if isinstance(p, DTensor)]
        results += tp.train(run, optimizer, (0, 1), 1)
        ((tokens, targets),) = next(iter(tp.batches(1, 1, 1)))[0]
        run(tokens, targets).backward()
    return results + list(tp.values(gpt).values())


def converted_in_parallel(rank: int) -> list[str]:
    """Return what differs from PyTorch's tensor parallelism, and parameters whose stored part is another object by the
    end."""
    mesh: DeviceMesh = tp.mesh_of(1, 2)["tp"]
    plain = tp.parallel(tp.model(), mesh)
    expected, wrong = train_in_parallel(plain, plain), []
    for placement, compiled in (("host", False), ("nvme", True)):
        gpt = zinf_fx.offload(tp.parallel(tp.model(), mesh), placement=placement)
        before = [stored_parameter(p) for p in gpt.parameters()]
        results = train_in_parallel(gpt, torch.compile(gpt, backend="zinf") if compiled else gpt)
        for number, (mine, theirs) in enumerate(zip(results, expected, strict=True)):
            same = mine.equal(theirs) if isinstance(mine, torch.Tensor) else mine == theirs
            wrong += [] if same else [f"{placement}: {number} of {len(results)}"]
        after = [stored_parameter(p) for p in gpt.parameters()]
        wrong += [
            f"{placement}: {parameter}" for parameter, two in zip(before, after, strict=True) if parameter is not two
        ]
        wrong += [
            f"{placement}: {parameter} in memory"
            for parameter in after
            if stored_parameter(parameter.whole).dtype != torch.double
        ]
    return wrong


@pytest.mark.slow
def test_tensor_parallel_models_train_on_after_conversions_as_plain_ones():
    for wrong in on_ranks(2, converted_in_parallel):
        assert not wrong
