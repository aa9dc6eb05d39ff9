"""The benchmark of steps that the disk bounds runs on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import disk_bound

TINY = ["--layers", "1", "--hidden", "64", "--heads", "2", "--context", "16", "--rounds", "1", "--steps", "1"]


@pytest.mark.slow
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert disk_bound.main([*TINY, "--store", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mode"] for row in rows] == ["default", "step_in_backward"]
    for row in rows:
        read, written = row["planned"]
        assert 0 < row["moved"][0] <= read and 0 < row["moved"][1] <= written
        (round_,) = row["rounds"]
        assert round_["limit"] == max(round_["engine"], round_["memory"]) and row["ratio"] > 0
        for times in row["where"].values():
            assert times["computes"] + times["updates"] + times["waits"] <= times["all"] + 1e-6
            assert -1e-6 <= times["idle"] <= times["all"] + 1e-6


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert disk_bound.main([*TINY, "--store", str(tmp_path), "--modes", "default"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("default ")]
    assert len(rows) == 4 and [row[1] for row in rows[1:]] == ["forward", "backward", "step"]


def test_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        disk_bound.main(["--heads", "7"])
    assert "--hidden (1024) must be a multiple of --heads (7)" in capsys.readouterr().err
