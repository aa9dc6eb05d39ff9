"""The benchmark of updates, on few parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import update as benchmark


def test_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys, "argv", ["update.py", "--parameters", "40000", "--threads", "1", "2", "--rounds", "1", "--json"]
    )
    benchmark.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["threads"] for row in rows] == [1] * (len(rows) // 2) + [2] * (len(rows) // 2)
    nbytes = {row["way"]: row["bytes_per_parameter"] for row in rows}
    assert nbytes[benchmark.PYTORCH] == nbytes["fp32"] == nbytes["bf16, fp32 master"] == 28
    assert 14 < nbytes["bf16, split master, 8-bit moments"] < 14.5
    for row in rows:
        assert row["bytes_per_second"] == pytest.approx(row["bytes_per_parameter"] * row["parameters_per_second"])
