"""Bases have bitsandbytes' codes, frozen, and LoRA beside them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import Int8Params, Params4bit
from rows import Row, compare_training
from torch import nn

import zinf_fx

HOW = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double quantisation": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (2, 9), generator=generator) for _ in range(3)]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def saved(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapted(folder: Path, how: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BitsAndBytesConfig(**HOW[how])
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).train()


def marked(cases: dict[str, str]) -> list:
    return [pytest.param(how, marks=pytest.mark.row("bitsandbytes", words)) for how, words in cases.items()]


@pytest.mark.parametrize("how", marked({how: f"LoRA over {how} codes; offload(), offloading()" for how in HOW}))
def test_lora_over_codes(row: Row, tmp_path: Path, how: str) -> None:
    """Operations of Linear4bit and Linear8bitLt gather the codes."""
    make: Callable[[], nn.Module] = functools.partial(adapted, saved(tmp_path / "model"), how)
    compare_training(row, make, batches(), tmp_path / "store", ("offload()", "offloading()"))


@pytest.mark.row("bitsandbytes", "int8 codes after a first call, copies, evaluation")
def test_what_was_called_before(row: Row, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    for how, kind in (("int8", Int8Params), ("nf4", Params4bit)):
        model = adapted(folder, how)
        assert any(type(parameter) is kind for parameter in model.parameters())
        expected = model(**batches()[0]).loss
        zinf_fx.offload(model, store=tmp_path / "store", placement="nvme")
        assert all(isinstance(parameter, zinf_fx.StoredTensor) for parameter in model.parameters())
        twin = copy.deepcopy(model).to("cpu")
        row.compare([net(**batches()[0]).loss for net in (model, twin)], [expected] * 2)
        plain = adapted(folder, how).eval()
        for module in plain.modules():
            module.support_avx512bf16_for_cpu = False  # computes in bf16
        with torch.no_grad():
            row.compare([model.eval()(**batches()[0]).loss], [plain(**batches()[0]).loss])
