"""TRL's SFTTrainer, on texts that this file has."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import test_transformers
import torch
from datasets import Dataset
from rows import Row
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import zinf_fx
import zinf_fx.integrations.accelerate

TEXTS = ["the cat sat on the mat", "a dog ran to the cat", "the mat is on a dog", "the cat ran", "a cat sat"] * 4


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<pad>", "<eos>", *sorted({word for text in TEXTS for word in text.split()})]
    known = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def base(name: str, store: Path, stored: bool) -> nn.Module:
    """GPT-2 in fp32, in bf16, or frozen with the values that a format has; on disk where it is `stored`."""
    torch.manual_seed(0)
    model = test_transformers._gpt2()
    if name == "bf16":
        model.to(torch.bfloat16)
    if name != "nf4":
        return zinf_fx.offload(model, store=store, placement="nvme") if stored else model
    quantised = zinf_fx.offload(
        copy.deepcopy(model).requires_grad_(False), store=store, placement="nvme", frozen_dtype=name
    )
    assert quantised.transformer.h[0].attn.c_attn.weight.quantised is not None
    if stored:
        return quantised
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), quantised.parameters(), strict=True):
            mine.copy_(theirs.full_tensor())
    return model


@pytest.mark.parametrize(
    ("lora", "kind"),
    [
        pytest.param(False, "fp32", marks=pytest.mark.row("trl", "`SFTTrainer`, GPT-2, a text dataset in memory")),
        pytest.param(True, "fp32", marks=pytest.mark.row("trl", "`SFTTrainer` with `peft_config` (LoRA)")),
        pytest.param(True, "bf16", marks=pytest.mark.row("trl", "`SFTTrainer` with `peft_config`, over bf16")),
        pytest.param(True, "nf4", marks=pytest.mark.row("trl", "`SFTTrainer` with `peft_config`, over nf4")),
    ],
)
def test_supervised_fine_tuning(row: Row, tmp_path: Path, lora: bool, kind: str) -> None:
    outcomes = {}
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True) if lora else None
    for name, compiled in (
        ("plain", {}),
        ("stored", {"torch_compile": True, "torch_compile_backend": "zinf"}),
    ):
        model = base(kind, tmp_path / "store", stored=bool(compiled))
        torch.manual_seed(0)
        arguments = SFTConfig(
            output_dir=str(tmp_path / name), per_device_train_batch_size=2, max_length=12, learning_rate=1e-2,
            max_steps=4, logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, seed=0,
            save_strategy="no", gradient_checkpointing=False, dataset_num_proc=None, **compiled,
        )  # fmt: skip
        run = SFTTrainer(
            model, args=arguments, train_dataset=Dataset.from_dict({"text": TEXTS}), processing_class=tokenizer(),
            peft_config=adapters,
        )  # fmt: skip
        run.train()
        logged = [entry[key] for entry in run.state.log_history for key in ("loss", "grad_norm") if key in entry]
        outcomes[name] = [*logged, *(p.detach() for p in run.model.parameters())]
    row.compare(outcomes["stored"], outcomes["plain"])
