from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import checkpoint

TINY = [
    "--layers",
    "1",
    "--hidden",
    "64",
    "--heads",
    "1",
    "--context",
    "64",
    "--steps",
    "1",
    "--blocks",
    "1",
    "--saves",
    "1",
]


@pytest.mark.slow
def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main([*TINY, "--folder", str(tmp_path)]) == 0
    text, verdicts = capsys.readouterr().out.rsplit("\n\n", 1)
    lines = text.splitlines()
    assert "parameters, bf16 with fp32 masters and moments, all on disk" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines[-len(checkpoint.WAYS) :]}
    assert list(rows) == list(checkpoint.WAYS)
    assert len(rows["copies"]) == len(rows["torch.save"]) + 1 > len(rows["nothing"])
    assert "generations: bytes written more per step: 0, as <= 0" in verdicts
    assert list(tmp_path.iterdir()) == []
