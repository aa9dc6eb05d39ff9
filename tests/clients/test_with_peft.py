"""PEFT's adapters train over a base model on disk."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import test_transformers
import torch
from rows import Row, compare_training
from torch import nn

import zinf_fx


def adapted(kind: str) -> nn.Module:
    """GPT-2 with adapters whose values are not the usual zeros, so that gradients reach everything."""
    configs = {
        "LoRA": peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False
        ),
        "DoRA": peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True),
        "LoRA and a trained head": peft.LoraConfig(
            r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["ln_f"]
        ),
        "IA3": peft.IA3Config(
            target_modules=["c_attn", "mlp.c_fc"], feedforward_modules=["mlp.c_fc"], fan_in_fan_out=True
        ),
    }
    return peft.get_peft_model(test_transformers._gpt2(), configs[kind])


KINDS = ("LoRA", "DoRA", "LoRA and a trained head", "IA3")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.row("peft", f"{kind} over GPT-2; offload()")) for kind in KINDS]
)
def test_adapters(row: Row, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    batches = [test_transformers._text() for _ in range(3)]
    compare_training(row, lambda: adapted(kind), batches, tmp_path / "store")


@pytest.mark.row("peft", "LoRA added to an offloaded model; `save_pretrained`, `from_pretrained`, `merge_and_unload`")
def test_adapters_come_later(row: Row, tmp_path: Path) -> None:
    torch.manual_seed(1)
    batches = [test_transformers._text() for _ in range(3)]
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)

    def make(store: Path | None) -> nn.Module:
        torch.manual_seed(0)
        base = test_transformers._gpt2()
        if store is not None:
            zinf_fx.offload(base, store=store, placement="nvme")
        return peft.get_peft_model(base, config)

    outputs = []
    for store in (None, tmp_path / "store"):
        model = make(store)
        run = model if store is None else torch.compile(model, backend="zinf")
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        for batch in batches:
            run(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = tmp_path / f"adapter{store is None}"
        model.save_pretrained(saved)
        torch.manual_seed(0)
        base = test_transformers._gpt2()
        if store is not None:
            zinf_fx.offload(base, store=store, placement="nvme")
        loaded = peft.PeftModel.from_pretrained(base, saved)
        merged = loaded.merge_and_unload()
        with torch.no_grad():
            outputs.append([model(**batches[0]).loss, loaded(**batches[0]).loss, *merged.parameters()])
    row.compare(outputs[1], outputs[0])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("beo,eoi->bi", torch.einsum("bi,eio->beo", x, self.up).relu(), self.down)


@pytest.mark.row("peft", "LoRA over fused experts (`target_parameters`), saved, loaded, merged and unmerged; offload()")
def test_experts(row: Row, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_parameters=["1.up", "1.down"], init_lora_weights=False)
    x = torch.linspace(-1, 1, 48).view(3, 16)

    def make(store: Path | None) -> nn.Module:
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(16, 16), Experts())
        return base if store is None else zinf_fx.offload(base, store=store, placement="nvme")

    outputs = []
    for store in (None, tmp_path / "store"):
        model = peft.get_peft_model(make(store), config)
        run = model if store is None else torch.compile(model, backend="zinf")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        values = []
        for _ in range(3):
            loss = run(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        model.save_pretrained(saved := tmp_path / f"adapter{store is None}")
        loaded = peft.PeftModel.from_pretrained(make(store), saved)
        with torch.no_grad():
            model.merge_adapter()
            values.append(model(x))
            model.unmerge_adapter()
            values += [model(x), loaded(x)]
            values += [parameter.clone() for parameter in loaded.merge_and_unload().parameters()]
        outputs.append(values)
    row.compare(outputs[1], outputs[0])
