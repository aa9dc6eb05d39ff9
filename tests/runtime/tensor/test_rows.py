"""Views and rows of stored tensors in eager code: what is read is what is used, and values are those of the whole."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from injecting import Fault, inject
from torch import nn

import zinf_fx
from zinf_fx.errors import StoreError

ROWS, WIDTH = 256, 4096  # of 16 KiB
ROW = 4 * WIDTH
BLOCK = 4096

TOKENS = torch.tensor([[5, 6, 40], [40, 0, 5]])


def values() -> torch.Tensor:
    """All different."""
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


def table(store: Path, **options: object) -> nn.Embedding:
    table = nn.Embedding.from_pretrained(values(), **options)
    zinf_fx.offload(table, store=store, placement="nvme", pack=None)
    table.weight.stored.tiers.drain()
    return table


def bytes_read(table: nn.Embedding) -> int:
    return table.weight.stored.tiers.store.counters().bytes_read


USES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "a row": (lambda weight: weight[3] + 1, 1),
    "the last row": (lambda weight: weight[-1] + 1, 1),
    "a view of rows": (lambda weight: weight[2:6].view(8, -1)[1].sum(), 1),
    "a column of some rows": (lambda weight: weight[10:12, 7] * 2, 2),
    "a split": (lambda weight: weight.split(8)[2] + 1, 8),
    "a converted row": (lambda weight: weight[3].double(), 1),
    "a flat part": (lambda weight: weight[2:6, 3:9].flatten(), 4),
    "an expanded row": (lambda weight: weight[4].expand(3, -1) + 1, 1),
    "a column of the transpose": (lambda weight: weight.t()[:, 5] + 1, 1),
    "embeddings": (lambda weight: nn.functional.embedding(TOKENS, weight), 8),  # with those between two that are near
    "rows by numbers": (lambda weight: weight[torch.tensor([3, -1, 3])], 2),
    "rows by a matrix of numbers": (lambda weight: weight[TOKENS], 8),
    "selected rows": (lambda weight: weight.index_select(0, torch.tensor([9, 2, 9])), 8),
}


@pytest.mark.parametrize("use", USES)
def test_what_is_used_is_read_alone(tmp_path: Path, use: str):
    operation, rows = USES[use]
    stored = table(tmp_path)
    before = bytes_read(stored)
    assert torch.equal(operation(stored.weight), operation(values()))
    assert 0 < bytes_read(stored) - before <= rows * (ROW + BLOCK)
    with torch.inference_mode():  # in which conversions and copies are steps of a view
        assert torch.equal(operation(stored.weight), operation(values()))


WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "most rows": lambda weight: weight[torch.arange(2, ROWS)],
    "rows far from each other": lambda weight: weight[::16] + 1,
    "columns": lambda weight: weight.index_select(1, torch.tensor([1, 2])),
    "a contiguous part of the transpose": lambda weight: weight.t()[5:9].contiguous(),
    "a transposed row": lambda weight: weight[5:6].t().contiguous() + 1,
    "rows by truth": lambda weight: weight[torch.arange(ROWS) == 3],
    "another dtype": lambda weight: weight.view(torch.int32)[2] + 1,
    "no row": lambda weight: weight[torch.tensor([], dtype=torch.int64)],
    "rows and columns": lambda weight: weight[torch.tensor([1]), torch.tensor([2])],
    "rows of the transpose": lambda weight: weight.t()[torch.tensor([3])],
}


@pytest.mark.parametrize("use", WHOLE)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_other_uses_have_the_same_values(tmp_path: Path, use: str, mode: Callable[[], AbstractContextManager]):
    with mode():
        assert torch.equal(WHOLE[use](table(tmp_path).weight), WHOLE[use](values()))


@pytest.mark.parametrize(("shape", "dtype"), [((100_001, 3), torch.float32), ((300_000, 1), torch.uint8)])
def test_rows_of_the_last_block_which_is_not_full(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype):
    values = torch.arange(math.prod(shape)).to(dtype).view(shape)
    stored = nn.ParameterList([nn.Parameter(values.clone(), requires_grad=False)])
    zinf_fx.offload(stored, store=tmp_path, placement="nvme", pack=None)
    indices = torch.tensor([0, shape[0] - 7, shape[0] - 1])
    assert torch.equal(stored[0][indices], values[indices])


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float32])
def test_indices_of_another_dtype_are_the_error_of_pytorch(tmp_path: Path, dtype: torch.dtype):
    errors = []
    for weight in (values(), table(tmp_path).weight):
        with pytest.raises(RuntimeError) as raised:
            nn.functional.embedding(torch.ones(2, dtype=dtype), weight)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1])
def test_an_index_of_no_row_is_the_error_of_pytorch(tmp_path: Path, index: int):
    stored = table(tmp_path)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        stored.weight[torch.tensor([index])]
    with pytest.raises(IndexError, match="out of range"):
        stored(torch.tensor([index]))


def test_gradients_of_rows_are_those_of_the_table(tmp_path: Path):
    stored, plain = table(tmp_path, freeze=False), nn.Embedding.from_pretrained(values(), freeze=False)
    for model in (stored, plain):
        (model(TOKENS).square().sum() + model.weight[3].sum()).backward()
    assert torch.equal(stored.weight.grad.full_tensor(), plain.weight.grad)


def test_rows_are_what_was_written_last(tmp_path: Path):
    stored = table(tmp_path)
    with torch.no_grad():
        stored.weight[5] = 7.0
        stored.weight[40:].zero_()
    assert torch.equal(stored(TOKENS)[0], torch.stack([torch.full((WIDTH,), 7.0), values()[6], torch.zeros(WIDTH)]))


def test_an_error_of_the_disk_is_raised(tmp_path: Path):
    stored = table(tmp_path)
    inject(stored.weight.stored.tiers.store, Fault("completion", operation="read", errno=errno.EIO))
    with pytest.raises(StoreError):
        stored(TOKENS)
