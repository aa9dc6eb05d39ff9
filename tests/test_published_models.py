"""Quantised models as they are published for transformers: their values are those that transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from gate import slow
from safetensors.torch import save_file
from test_published import published
from torch import Tensor

import zinf_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BF16 = torch.bfloat16
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}


def fp8() -> tuple[transformers.PretrainedConfig, dict[str, str], dict]:
    config = transformers.Qwen3Config(hidden_size=128, intermediate_size=256, head_dim=128, **SMALL)
    layer = "model.layers.0."
    names = [f"self_attn.{letter}_proj" for letter in "qkvo"] + [f"mlp.{kind}_proj" for kind in ("gate", "up", "down")]
    how = {f"{layer}{name}.weight": "blocks" for name in names}
    return config, how, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def mxfp4() -> tuple[transformers.PretrainedConfig, dict[str, str], dict]:
    """With as many columns as rows, which don't tell that these are swapped."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=64, head_dim=32, num_local_experts=2, num_experts_per_tok=1, **SMALL
    )
    experts = "model.layers.0.mlp.experts."
    how = {f"{experts}gate_up_proj": "_blocks", f"{experts}down_proj": "_blocks"}
    return config, how, {"quant_method": "mxfp4", "dequantize": True}


def experts() -> tuple[transformers.PretrainedConfig, dict[str, str], dict]:
    """In files, each expert has matrices of its own."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, moe_intermediate_size=128, head_dim=128, num_experts=2, num_experts_per_tok=1, **SMALL
    )
    _, _, quantisation = fp8()
    layer = "model.layers.0.mlp.experts."
    how = {f"{layer}{e}.{part}_proj.weight": "blocks" for e in range(2) for part in ("gate", "up", "down")}
    return config, how, {**quantisation, "modules_to_not_convert": ["self_attn"]}


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of experts one by one."""
    by_expert = {}
    for name, tensor in tensors.items():
        stem, _, own = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(own, ())
        if parts and stem.endswith("experts"):
            for expert, matrix in enumerate(tensor):
                by_expert |= {
                    f"{stem}.{expert}.{p}.weight": m for p, m in zip(parts, matrix.chunk(len(parts)), strict=True)
                }
        else:
            by_expert[name] = tensor
    return by_expert


@pytest.mark.parametrize("model", [slow(fp8), mxfp4, experts])
def test_values_are_those_of_transformers(tmp_path: Path, model):
    torch.manual_seed(0)
    config, how, quantisation = model()
    config.tie_word_embeddings = False
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    files, _ = published(apart(plain.state_dict()) if model is experts else plain.state_dict(), how)
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, tmp_path / "model.safetensors")
    described = {**plain.config.to_dict(), "architectures": [type(plain).__name__], "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(described))
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    with init_empty_weights(include_buffers=False):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    (tmp_path / "store").mkdir()
    mine = zinf_fx.attach_base(empty, tmp_path, store=tmp_path / "store")
    theirs: dict[str, Tensor] = expected.state_dict()
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter.full_tensor(), theirs[name]) and not parameter.isnan().any()
        is_packed = name in how or (model is experts and "experts" in name)
        assert (parameter.quantised is not None) == is_packed
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(torch.compile(mine, backend="zinf")(tokens).logits, expected(tokens).logits)
