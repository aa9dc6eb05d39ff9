"""TRL's SFTTrainer, on texts that this file has."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import test_transformers
import torch
from datasets import Dataset
from rows import Row
from tokenizers import Tokenizer, models, pre_tokenizers
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


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(False, marks=pytest.mark.row("trl", "`SFTTrainer`, GPT-2, a text dataset in memory")),
        pytest.param(True, marks=pytest.mark.row("trl", "`SFTTrainer` with `peft_config` (LoRA)")),
    ],
)
def test_supervised_fine_tuning(row: Row, tmp_path: Path, lora: bool) -> None:
    found = {}
    adapters = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True) if lora else None
    for name, compiled in (
        ("plain", {}),
        ("stored", {"torch_compile": True, "torch_compile_backend": "zinf"}),
    ):
        torch.manual_seed(0)
        model = test_transformers._gpt2()
        if compiled:
            zinf_fx.offload(model, store=tmp_path / "store", placement="nvme")
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
        found[name] = [*logged, *(p.detach() for p in run.model.parameters())]
    row.compare(found["stored"], found["plain"])
