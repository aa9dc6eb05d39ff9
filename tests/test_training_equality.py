"""Training through zinf equals plain PyTorch: every loss and every parameter, bit for bit, over 20 steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from gate import slow

import zinf_fx

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig, default_dtype

STEPS = 20
CONFIG = GPTConfig(layers=1, hidden=32, heads=2, context=16, vocabulary=64, tied=True)

Batch = tuple[torch.Tensor, torch.Tensor]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def build(dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    with default_dtype(dtype):
        return GPT(CONFIG)


def batches(accumulate: int) -> list[list[Batch]]:
    torch.manual_seed(1)

    def tokens() -> torch.Tensor:
        return torch.randint(0, CONFIG.vocabulary, (2, CONFIG.context))

    return [[(tokens(), tokens()) for _ in range(accumulate)] for _ in range(STEPS)]


def train(call: Callable, optimizer: torch.optim.Optimizer, accumulate: int = 1) -> list[float]:
    losses = []
    for step in batches(accumulate):
        for tokens, targets in step:
            loss = call(tokens, targets) / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def plain_run(accumulate: int = 1) -> tuple[GPT, list[float]]:
    model = build()
    return model, train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), accumulate)


def assert_equal(model: GPT, losses: list[float], plain: GPT, expected: list[float]) -> None:
    assert losses == expected
    assert losses[-1] != losses[0]
    assert model.head.weight is model.tokens.weight
    parameters = dict(plain.named_parameters())
    assert set(parameters) == set(dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), parameters[name]), name


# Every placement; every pair of a tier that is read, prefetching or not, and one or two micro-batches. In the gate, one
# placement reads the disk ahead, and another does not.
RUNS = [
    ("device", (1, 2, 3), 2),
    slow("host", (1, 2, 3), 1),
    slow("host", None, 2),
    ("nvme", (1, 2, 3), 2),
    slow("nvme", None, 1),
    slow("infinity-nvme", (1, 2, 3), 1),
    ("infinity-nvme", None, 2),
    slow("zero-offload", (1, 2, 3), 2),
]


@pytest.mark.parametrize(("placement", "prefetch", "accumulate"), RUNS)
def test_offloaded_model(tmp_path: Path, placement: str, prefetch: tuple | None, accumulate: int) -> None:
    plain, expected = plain_run(accumulate)
    model = zinf_fx.offload(build(), store=tmp_path, placement=placement, prefetch=prefetch)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(torch.compile(model, backend="zinf"), optimizer, accumulate)
    assert_equal(model, losses, plain, expected)


def test_partitioned_construction_from_one_seed(tmp_path: Path) -> None:
    plain, expected = plain_run()
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        model = build()
    losses = train(torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert_equal(model, losses, plain, expected)


@pytest.mark.parametrize("placement", [slow("device"), "nvme"])
def test_one_line_use_on_an_ordinary_model(tmp_path: Path, placement: str) -> None:
    plain, expected = plain_run()
    model = build()
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    call = torch.compile(model, backend="zinf", options={"placement": placement, "store": tmp_path})
    losses = train(call, optimizer)
    assert_equal(model, losses, plain, expected)


def test_recomputed_activations(tmp_path: Path) -> None:
    plain, expected = plain_run()
    model = zinf_fx.offload(build(), store=tmp_path, placement="nvme", activations="recompute")
    losses = train(torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))
    assert_equal(model, losses, plain, expected)


def test_clipping_and_a_schedule(tmp_path: Path) -> None:
    runs = []
    for through_zinf in (False, True):
        model = build()
        if through_zinf:
            zinf_fx.offload(model, store=tmp_path, placement="nvme")
            call, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            call, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        results = []
        for [(tokens, targets)] in batches(1):
            loss = call(tokens, targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            results.append((loss.item(), norm.item()))
        runs.append((model, results))
    (plain, expected), (model, results) = runs
    assert_equal(model, results, plain, expected)


@pytest.mark.parametrize(("placement", "accumulate"), [slow("host", 2), slow("nvme", 1), ("infinity-nvme", 2)])
def test_bf16_equals_a_loop_with_an_fp32_master(tmp_path: Path, placement: str, accumulate: int) -> None:
    plain = build(torch.bfloat16)
    parameters = list(plain.parameters())
    masters = [p.detach().float() for p in parameters]
    inner = torch.optim.AdamW(masters, lr=1e-2, fused=True)

    class MasterLoop:
        def step(self) -> None:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = parameter.grad.float()
            inner.step()
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master)

        def zero_grad(self) -> None:
            plain.zero_grad()

    expected = train(plain, MasterLoop(), accumulate)
    model = zinf_fx.offload(copy.deepcopy(build(torch.bfloat16)), store=tmp_path, placement=placement)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = train(torch.compile(model, backend="zinf"), optimizer, accumulate)
    assert_equal(model, losses, plain, expected)
