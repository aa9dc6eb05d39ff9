"""benchmarks/vertical.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import vertical

TINY = ["--layers", "1", "--hidden", "64", "--heads", "2", "--context", "16", "--rounds", "1", "--no-simulate"]


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vertical.main([*TINY, "--counts", "3", "--store", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["way"] for row in rows] == ["vertical", "horizontal", "in memory"]
    one, each, memory = rows
    assert one["bytes_per_parameter"] < each["bytes_per_parameter"]  # what moves moves once, or three times
    assert memory["bytes_per_parameter"] is None and memory["to_memory"] == each["to_horizontal"] == 1
    lines = vertical.table(rows).splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [["3", "vertical"], ["3", "horizontal"], ["3", "in"]]


def test_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vertical.main(["--counts", "4", "0"])
    assert "--counts must be at least 1, not 0" in capsys.readouterr().err
