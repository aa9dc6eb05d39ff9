"""The benchmark of predictions and that of the optimizer's share run, and print what they measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import linear_layers
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


@pytest.mark.slow
def test_predicted_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(linear_layers, "WIDTH", 256)
    given = ["--updates", "65536", "--threads", "1", "2", "--rounds", "1", "--steps", "1", "--store", str(tmp_path)]
    assert prediction.main([*given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["threads"], row["states"]) for row in rows] == [(n, form) for n in (1, 2) for form in prediction.FORMS]
    assert all(row["measured"] > 0 and row["predicted"] > 0 and row["parameters"] == 65536 for row in rows)


def test_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert optimizer_share.main([*TINY, "--store", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for mode in optimizer_share.MODES:
        (row,) = [line for line in lines if line.startswith(mode)]
        assert row.count("%") == 3
