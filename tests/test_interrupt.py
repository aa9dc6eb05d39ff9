"""An interrupted run leaves nothing behind, wherever the interrupt strikes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gate import slow

TRAIN = """
import sys, torch, zinf_fx
torch.manual_seed(0)
with zinf_fx.offloading(store=sys.argv[1], placement="nvme"):
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(3)])
compiled = torch.compile(model, backend="zinf")
optimizer = zinf_fx.optim.AdamW(model.parameters())
step = 0
while True:
    compiled(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    print("step", step, flush=True)
"""


def _interrupt(training: subprocess.Popen, signals: int) -> str:
    """Press Ctrl-C; and again, as people do, where steps go on: Python drops one that strikes in a destructor."""
    for _ in range(signals):
        training.send_signal(signal.SIGINT)
    for more, _ in enumerate(training.stdout, start=1):
        assert more < 40, "the training goes on after many interrupts"
        if more % 5 == 0:
            training.send_signal(signal.SIGINT)
    return training.communicate(timeout=60)[1]


@pytest.mark.parametrize(("steps", "signals"), [slow(1, 1), (3, 2)])
def test_ctrl_c_leaves_no_scratch_directory(tmp_path: Path, steps: int, signals: int):
    training = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while training.stdout.readline().strip() != f"step {steps}":
            assert training.poll() is None, training.stderr.read()
        assert len(list(tmp_path.iterdir())) == 1
        errors = _interrupt(training, signals)
    finally:
        training.kill()
    assert training.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []
