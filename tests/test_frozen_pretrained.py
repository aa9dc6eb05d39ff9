"""The recipe of adding tokens trains the embeddings and head of a pretrained base in four bits whole."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from gate import slow

import zinf_fx
from zinf_fx.errors import ConfigError, StoredTensorError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PATTERNS = [("lm_head.*", None), ("*", "nf4")]


def pretrained(tmp_path: Path, tied: bool) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=96,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    (tmp_path / "store").mkdir()
    return tmp_path / "base"


def loaded(tmp_path: Path, patterns: object) -> torch.nn.Module:
    with zinf_fx.offloading(store=tmp_path / "store", placement="nvme", frozen_dtype=patterns):
        return transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")


def quantised(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.quantised is not None}


@pytest.mark.parametrize("tied", [slow(False), True])
def test_embeddings_and_head_are_trained_after_tokens_were_added(tmp_path: Path, tied: bool):
    pretrained(tmp_path, tied)
    base = loaded(tmp_path, PATTERNS)
    names = quantised(base)
    assert len(names) == 14 and not [name for name in names if "lm_head" in name or "embed" in name]
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(base.lm_head.weight.full_tensor(), plain.lm_head.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base.resize_token_embeddings(100, mean_resizing=False)
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], r=4)
        model = peft.get_peft_model(base, config)
    head = model.base_model.model.lm_head.modules_to_save.default.weight
    assert head.requires_grad and head.shape == (100, 64)
    before = head.full_tensor() if hasattr(head, "full_tensor") else head.detach().clone()
    run = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
    tokens = torch.arange(16).view(1, 16) + 84  # the new ones among them
    losses = []
    for _ in range(3):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = head.full_tensor() if hasattr(head, "full_tensor") else head.detach()
    assert losses[-1] < losses[0] and not torch.equal(before, after)


def test_a_head_that_is_quantised_says_how_to_leave_it_out(tmp_path: Path):
    pretrained(tmp_path, tied=False)
    base = loaded(tmp_path, "nf4")
    with pytest.raises(StoredTensorError, match="with patterns that leave this one out, such as"):
        peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def test_what_trains_is_left_out_by_itself_of_a_model_with_adapters(tmp_path: Path):
    pretrained(tmp_path, tied=False)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], r=4)
    model = zinf_fx.offload(
        peft.get_peft_model(base, config), store=tmp_path / "store", placement="nvme", frozen_dtype="nf4"
    )
    assert not any(parameter.quantised for parameter in model.parameters() if parameter.requires_grad)
    assert {name for name in quantised(model) if "lm_head" in name} == {
        "base_model.model.lm_head.original_module.weight"
    }


def test_patterns_of_a_pretrained_model_have_to_match_something(tmp_path: Path):
    pretrained(tmp_path, tied=False)
    with pytest.raises(ConfigError, match=r"frozen_dtype has the pattern 'lm_haed\.\*', which matches no parameter"):
        loaded(tmp_path, [("lm_haed.*", None), ("*", "nf4")])
    with pytest.raises(ConfigError, match=r"says nothing of parameter 'lm_head\.weight'"):
        loaded(tmp_path, [("model.*", "nf4")])
