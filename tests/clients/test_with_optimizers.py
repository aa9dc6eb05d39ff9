"""Optimizers of other libraries over stored parameters, as they are."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest
import torch
from rows import Row
from torch import nn

import zinf_fx
from zinf_fx.errors import OptimizerError

CASES = {
    "bitsandbytes": ("AdamW", "Lion", "LAMB", "AdamW8bit", "AdEMAMix8bit", "PagedAdamW8bit"),
    "pytorch_optimizer": ("AdaBelief", "Lion", "Lamb", "Adan", "CAME", "Ranger", "ScheduleFreeAdamW", "StableAdamW"),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"),
}
REFUSED = {"torchao": ("AdamW8bit", "AdamW4bit"), "prodigyopt": ("Prodigy",), "pytorch_optimizer": ("Prodigy", "SOAP")}


def marked(cases: dict[str, tuple[str, ...]], words: str) -> list:
    return [
        pytest.param(library, name, marks=pytest.mark.row(library, f"`{name}` over stored parameters{words}"))
        for library, names in cases.items()
        for name in names
    ]


def kind_of(library: str, name: str) -> type[torch.optim.Optimizer]:
    pytest.importorskip(library)
    module = importlib.import_module(f"{library}.optim" if library in ("bitsandbytes", "torchao") else library)
    return getattr(module, name)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 160))


def trained(model: nn.Module, kind: type[torch.optim.Optimizer]) -> list[torch.Tensor | float]:
    """Return losses, then parameters, after steps, evaluation, and more steps."""
    optimizer = kind(list(model.parameters()), lr=1e-2)
    values: list[torch.Tensor | float] = []
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for step in range(5):
        for mode in ("eval", "train") if step == 3 else ("train",):
            getattr(optimizer, mode, lambda: None)()
        loss = model(x * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    getattr(optimizer, "eval", lambda: None)()
    return [*values, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize(("library", "name"), marked(CASES, ": steps, evaluation, steps"))
def test_equal_to_memory(row: Row, tmp_path: Path, library: str, name: str) -> None:
    kind = kind_of(library, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trained(network(), kind)
        stored = trained(zinf_fx.offload(network(), store=tmp_path, placement="nvme"), kind)
    row.compare(stored, plain)


@pytest.mark.parametrize(("library", "name"), marked(REFUSED, ""))
def test_refused(row: Row, tmp_path: Path, library: str, name: str) -> None:
    kind = kind_of(library, name)
    model = zinf_fx.offload(network(), store=tmp_path, placement="nvme")
    before = [parameter.full_tensor() for parameter in model.parameters()]
    with pytest.raises(OptimizerError) as raised:
        trained(model, kind)
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.parameters(), before, strict=True))
    row.add(f"refused: {raised.value}")
