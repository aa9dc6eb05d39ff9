"""Bases have weights that are torchao's own tensors, with LoRA beside them."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from rows import Row, train
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

import zinf_fx
from zinf_fx.runtime.tensor.local_parameter import stored_in

CONFIGS = {"Int8WeightOnlyConfig": Int8WeightOnlyConfig, "Float8WeightOnlyConfig": Float8WeightOnlyConfig}


def adapted(how: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lora" not in name}
    quantize_(model, CONFIGS[how](), filter_fn=lambda module, name: name in layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model.train()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.row("torchao", f"LoRA of peft over weights of `{how}`; offload()"))
        for how in CONFIGS
    ],
)
def test_lora_over_weights(row: Row, tmp_path: Path, how: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (2, 9), generator=generator) for _ in range(3)]
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    outcomes = []
    for is_stored in (False, True):
        torch._dynamo.reset()
        model = adapted(how)
        if is_stored:
            model = zinf_fx.offload(model, store=tmp_path / "store", placement={"parameters": "nvme"})
            assert all(map(stored_in, model.parameters()))
        trained = [parameter for name, parameter in model.named_parameters() if "lora" in name]
        optimizer = zinf_fx.optim.AdamW(trained, lr=1e-2)
        run = torch.compile(model, backend="zinf" if is_stored else "aot_eager")
        outcomes.append([*train(run, optimizer, batches, trained), *trained])
    row.compare(outcomes[1], outcomes[0], to="to `aot_eager`")
