"""The benchmark of predictions and that of the optimizer's share run, and print what they measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import optimizer_share
import prediction

TINY = ["--layers", "1", "--hidden", "64", "--heads", "1", "--context", "32", "--steps", "1", "--rounds", "1"]


@pytest.mark.slow
def test_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert prediction.main(["--scale", "0.05", "--rounds", "1", "--steps", "1", "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for case in prediction.cases(0.05):
        (row,) = [line for line in lines if line.startswith(case.name)]
        measured, predicted = float(row.split()[-7]), float(row.split()[-5])
        assert measured > 0 and predicted > 0


def test_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert optimizer_share.main([*TINY, "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for mode in optimizer_share.MODES:
        (row,) = [line for line in lines if line.startswith(mode)]
        assert row.count("%") == 3
