"""Saving and loading take no more memory than what is under way."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run
from gate import slow

PROGRAM = """
import re, sys, torch, zinf_fx
from torch import nn

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

placement, folder = sys.argv[1], sys.argv[2]
with zinf_fx.offloading(store=folder, placement=placement):
    model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(3)))
optimizer = zinf_fx.optim.AdamW(model.parameters())
for parameter in model.parameters():
    parameter.grad = torch.full(parameter.shape, 0.1)
    optimizer.step()
    parameter.grad = None
optimizer.finish()
peaks = [peak()]
for act in (zinf_fx.save_checkpoint, zinf_fx.load_checkpoint):
    act(folder + "/saved", model, optimizer)
    peaks.append(peak())
print(*peaks)
"""


@pytest.mark.parametrize("placement", ["nvme", slow("host")])
def test_peaks(tmp_path: Path, placement: str):
    """The model has 288 MiB of states."""
    ended = run(PROGRAM, placement, tmp_path)
    assert ended.returncode == 0, ended.stderr
    before, saved, loaded = map(int, ended.stdout.split())
    assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) > 285 << 20
    assert saved - before <= 64 and loaded - before <= 64
