"""The benchmark of generation runs, and prints what it measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import generate

TINY = ["--layers", "1", "--hidden", "64", "--vocabulary", "256", "--batches", "2", "--prompt", "5", "--tokens", "6"]


@pytest.mark.slow
def test_generation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert generate.main([*TINY, "--store", str(tmp_path), "--variants", *generate.VARIANTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    for variant in generate.VARIANTS:
        (row,) = [line.split() for line in lines if line.split()[:2] == ["2", variant]]
        assert float(row[4]) > 0 and row[-1] == "yes"
