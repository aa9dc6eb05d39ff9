"""Models of transformers, from small random configurations, in the three ways of use."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_transformers
import torch
from rows import WAYS, Row, compare_training

MODELS = {
    "GPT-2": (test_transformers._gpt2, test_transformers._text),
    "Llama": (test_transformers._llama, test_transformers._text),
    "Mixtral": (test_transformers._mixtral, test_transformers._text),
    "BERT": (test_transformers._bert, test_transformers._masked_text),
    "T5": (test_transformers._t5, test_transformers._text),
    "ViT": (test_transformers._vit, test_transformers._images),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.row("transformers", name)) for name in MODELS])
def test_model(row: Row, tmp_path: Path, name: str) -> None:
    row.ran += "; " + ", ".join(WAYS)
    make, inputs = MODELS[name]
    torch.manual_seed(1)
    compare_training(row, make, [inputs() for _ in range(3)], tmp_path / "store", WAYS)
