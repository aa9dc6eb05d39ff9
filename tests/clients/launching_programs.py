"""Runs the programs of `programs/` as a user launches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

PROGRAMS = Path(__file__).parent / "programs"


def results_of(
    program: str, ranks: int, how: str, directory: Path, *arguments: str, ends: bool = True
) -> list[Tensor | float | str]:
    """Return what the program, launched by torchrun on so many ranks, wrote to `directory/how.pt`. `ends`: it ends
    without error."""
    for rank in range(ranks):
        (directory / f"store{rank}").mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(PROGRAMS / program), how, str(directory), *arguments]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert (done.returncode == 0) == ends, (done.stdout + done.stderr)[-6000:]
    return torch.load(directory / f"{how}.pt", weights_only=True)
