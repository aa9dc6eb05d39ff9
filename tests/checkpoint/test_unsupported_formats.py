"""Weights in formats that are not read are refused by the word of the configuration beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zinf_fx
from zinf_fx.errors import CheckpointError

GPTQ = {"0.qweight": torch.zeros(2, 8, dtype=torch.int32), "0.qzeros": torch.zeros(1, 1, dtype=torch.int32)}
PACKED = {"0.weight_packed": torch.zeros(8, 8, dtype=torch.uint8), "0.weight_scale": torch.zeros(8, 1)}
NVFP4 = {"0.weight": torch.zeros(8, 8, dtype=torch.uint8), "0.weight_scale": torch.zeros(8, 1).to(torch.float8_e4m3fn)}


@pytest.mark.parametrize(
    ("said", "tensors", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, GPTQ, "quantised by 'gptq', 4 bits, as its config.json says"),
        ({"quant_method": "awq", "bits": 4}, GPTQ, "quantised by 'awq', 4 bits, as"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4, r"'modelopt' \(NVFP4\), as"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            PACKED,
            r"'compressed-tensors' \(pack-quantized\), as",
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, NVFP4, "'bitsandbytes', as"),
        # What is read, or isn't understood, is not blamed.
        ({"quant_method": "mxfp4"}, PACKED, "it lacks"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, PACKED, "it lacks"),
        ({}, GPTQ, "it lacks"),
        ([1], GPTQ, "it lacks"),
        ("gptq", GPTQ, "it lacks"),
    ],
)
@pytest.mark.parametrize("file", [True, False])
def test_a_format_that_is_not_read_is_named(
    said: object, tensors: dict[str, torch.Tensor], words: str, file: bool, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    with pytest.raises(CheckpointError, match=words):
        zinf_fx.load_safetensors(model, tmp_path / "model.safetensors" if file else tmp_path)
    with pytest.raises(CheckpointError, match=words):
        zinf_fx.attach_base(model, tmp_path / "model.safetensors" if file else tmp_path)
    assert type(model[0].weight) is nn.Parameter


def test_a_broken_configuration_is_not_blamed(tmp_path: Path) -> None:
    save_file(GPTQ, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"')
    with pytest.raises(CheckpointError, match=r"it lacks '0\.weight'"):
        zinf_fx.load_safetensors(nn.Sequential(nn.Linear(16, 8, bias=False)), tmp_path)
