"""Modules of torch itself, in the three ways of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rows import WAYS, Row, compare_training
from torch import Tensor, nn


class Recurrent(nn.Module):
    """Has an LSTM between an embedding and the same embedding as a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.layers = kind(32, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            self.head(self.layers(self.tokens(tokens))[0]).flatten(0, 1), tokens.flatten()
        )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 32))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, groups=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.ConvTranspose2d(16, 4, 2),
    )  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def transformer() -> nn.Module:
    return nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)


def batches(*shapes: tuple[int, ...], tokens: bool = False) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    if tokens:
        return [tuple(torch.randint(50, shape, generator=generator) for shape in shapes) for _ in range(3)]
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3)]


CASES = {
    "MLP with dropout and LayerNorm": (mlp, batches((4, 32))),
    "convolutions, BatchNorm, GroupNorm": (convolutions, batches((2, 3, 16, 16))),
    "LSTM, tied embedding": (lambda: Recurrent(nn.LSTM), batches((2, 8), tokens=True)),
    "GRU, tied embedding": (lambda: Recurrent(nn.GRU), batches((2, 8), tokens=True)),
    "TransformerEncoder with dropout": (encoder, batches((2, 8, 32))),
    "Transformer, encoder and decoder": (transformer, batches((2, 8, 32), (2, 6, 32))),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.row("torch", name)) for name in CASES])
def test_module(row: Row, tmp_path: Path, name: str) -> None:
    make, inputs = CASES[name]
    row.ran += "; " + ", ".join(WAYS)
    compare_training(row, make, inputs, tmp_path / "store", WAYS)
