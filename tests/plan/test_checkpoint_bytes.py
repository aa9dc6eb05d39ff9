"""What a plan says of checkpoints is what they have."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.plan.checkpoint_bytes import checkpoint_sizes


class Net(nn.Module):
    """Parameters of two dtypes, small ones and one of several tiles, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 200).bfloat16(), nn.Linear(200, 3).bfloat16()
        self.norm, self.frozen = nn.LayerNorm(3), nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((self.narrow(self.wide(x)) + self.frozen).float()).square().sum()


STATES = {"parameters": "host", "gradients": "host", "optimizer": "nvme", "activations": "device"}


FEWER = {"state_dtype": "8bit", "master_dtype": "split"}


@pytest.mark.parametrize("placement", ["nvme", slow("host"), slow(STATES)], ids=["nvme", "host", "states"])
@pytest.mark.parametrize(
    ("options", "states"),
    [({}, {}), ({"pack": "auto"}, FEWER), ({"tile": "4KiB"}, {})],
    ids=["plain", "packs, states of fewer bytes", "tiles"],
)
def test_bytes_of_a_checkpoint(tmp_path: Path, placement: Any, options: dict[str, Any], states: dict[str, str]):
    x = torch.randn(2, 64).bfloat16()
    model = zinf_fx.offload(Net(), store=tmp_path, placement=placement, **options)
    sizes = checkpoint_sizes(zinf_fx.export_plan(model, (x,), **options, **states))
    optimizer = zinf_fx.optim.AdamW([p for p in model.parameters() if p.requires_grad], **states)
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_fx.save_checkpoint(tmp_path / "saved", model, optimizer)
    parts: dict[str, Counter[str]] = {"model": Counter(), "optimizer": Counter()}
    beside = 0  # in memory
    for tensor in manifest_of(tmp_path / "saved").tensors:
        beside += tensor.nbytes if tensor.name.endswith(("_scale", "_up")) else 0
        if tensor.part in parts:
            parts[tensor.part][str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    assert sizes.parameters == parts["model"] and sizes.states == parts["optimizer"]
    stored = {"nvme": sizes.nbytes - beside, "host": 0}.get(str(placement), sum(sizes.states.values()) - beside)
    assert sizes.in_store == stored
