"""Unscaling and clipping of stored gradients is exact, and takes bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import utils

import zinf_fx
from zinf_fx.runtime.gradients.accumulate import accumulate
from zinf_fx.runtime.tensor.storage import TensorStorage

SHAPES = ((700, 1000), (33,), (), (0,), (700_001,), (5, 4096))
CHUNK = 64 << 10


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=8.0)
    made.scale(torch.ones(()))
    return made


def unscale(parameters: list[torch.Tensor]) -> float:
    """Returns whether an infinity was found."""
    optimizer, unscaler = torch.optim.SGD(parameters, fused=True), scaler()
    unscaler.unscale_(optimizer)
    (found_inf,) = unscaler._found_inf_per_device(optimizer).values()
    return found_inf.item()


OPERATIONS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "unscale": unscale,
    "clip the norm": lambda parameters: utils.clip_grads_with_norm_(parameters, 1.0, torch.tensor(3.0)),
    "clip the norm, foreach": lambda parameters: utils.clip_grads_with_norm_(
        parameters, 1.0, torch.tensor(3.0), foreach=True
    ),
    "clip values": lambda parameters: utils.clip_grad_value_(parameters, 0.5),
    "clip values, foreach": lambda parameters: utils.clip_grad_value_(parameters, 0.5, foreach=True),
}


@pytest.fixture
def pair(tmp_path, request: pytest.FixtureRequest) -> tuple[torch.nn.ParameterList, torch.nn.ParameterList]:
    """Return stored and ordinary parameters with the same gradients; the last one is ordinary on both sides."""
    placement, dtype = request.param
    torch.manual_seed(0)
    gradients = [(3 * torch.randn(shape)).to(dtype) for shape in SHAPES]
    stored, plain = (torch.nn.ParameterList(torch.zeros(g.shape, dtype=dtype) for g in gradients) for _ in range(2))
    zinf_fx.offload(stored, store=tmp_path, placement=placement, chunk=CHUNK)
    extra = [torch.nn.Parameter(torch.zeros(9, dtype=dtype)) for _ in range(2)]
    for side, parameter in zip((stored, plain), extra, strict=True):
        parameter.grad = torch.arange(9).to(dtype)
        side.append(parameter)
    for mine, theirs, gradient in zip(stored, plain, gradients, strict=False):
        accumulate([mine], [gradient])
        theirs.grad = gradient.clone()
    return stored, plain


ON_NVME, ELSEWHERE = ("nvme", torch.float32), (("device", torch.bfloat16), ("host", torch.float32))


@pytest.mark.parametrize(
    ("pair", "special"),
    [
        *((ON_NVME, special) for special in (None, torch.inf, torch.nan)),
        (("nvme", torch.bfloat16), torch.inf),
        *((kind, torch.nan) for kind in ELSEWHERE),
    ],
    indirect=["pair"],
    ids=str,
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_bitwise_equal_to_memory(pair, name: str, special: float | None):
    stored, plain = pair
    if special is not None:
        for side in pair:
            side[4].grad[600_000] = special
    results = [OPERATIONS[name](list(side)) for side in (stored, plain)]
    assert results[0] == results[1] and (name != "unscale" or results[1] == (special is not None))
    for index, (mine, theirs) in enumerate(zip(stored, plain, strict=True)):
        value = mine.grad.full_tensor() if isinstance(mine.grad, zinf_fx.StoredTensor) else mine.grad
        assert torch.equal(value.isnan(), theirs.grad.isnan()) and torch.equal(
            value.nan_to_num(), theirs.grad.nan_to_num()
        ), index


@pytest.mark.parametrize("pair", [("nvme", torch.float32)], indirect=True, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_few_chunks_are_in_memory(pair, name: str, monkeypatch: pytest.MonkeyPatch):
    value_of = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        assert storage.numel == 1, "a whole gradient was brought to memory"
        return value_of(storage)

    stored, _ = pair
    tiers = stored[0].stored.tiers
    tiers.drain()
    allocated, allocate = [], tiers.host.allocate
    monkeypatch.setattr(
        tiers.host, "allocate", lambda nbytes: (allocated.append(tiers.host.in_use + nbytes), allocate(nbytes))[1]
    )
    monkeypatch.setattr(TensorStorage, "value", value)
    OPERATIONS[name](list(stored))
    assert CHUNK < max(allocated) <= 4 * CHUNK and tiers.host.in_use == 0
