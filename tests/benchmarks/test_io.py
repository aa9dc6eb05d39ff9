"""The benchmark of the engine runs beside fio, on few bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zinf_fx.machine import fio

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "io.py"


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    once = ("--size", "8MiB", "--rounds", "1", "--final-rounds", "1")
    command = [sys.executable, SCRIPT, "--directory", directory, *once, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_ratios_to_the_best_of_fio(tmp_path: Path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert sum(row["who"].startswith("zinf_fx") for row in result["heats"]) == 2
    for direction in ("read", "write"):
        heats = {row["who"]: row[f"{direction} GiB/s"] for row in result["heats"]}
        *ours, fio_best = (row for row in result["finals"] if row["direction"] == direction)
        assert fio_best["who"] == max((who for who in heats if who.startswith("fio")), key=heats.__getitem__)
        assert fio_best["ratio to fio"] == 1.0
        assert [row["ratio to fio"] for row in ours] == [row["GiB/s"] / fio_best["GiB/s"] for row in ours]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(fio.installed(), reason="fio is installed")
def test_without_fio_there_is_nothing_to_compare_with(tmp_path: Path):
    done = run(tmp_path)
    assert done.returncode == 2 and "not installed" in done.stderr
