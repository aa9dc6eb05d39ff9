"""The benchmark of the engine beside fio, on few bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zinf_fx.runtime import fio

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "io.py"


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--directory", directory, "--size", "8MiB", "--rounds", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_ratios_to_the_best_of_fio(tmp_path: Path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["results"]
    ours = [row for row in rows if row["who"].startswith("zinf_fx")]
    theirs = [row for row in rows if row["who"].startswith("fio")]
    assert len(ours) == 2 and theirs
    for direction in ("read", "write"):
        assert max(row[f"{direction} / best fio"] for row in theirs) == 1.0
        assert all(row[f"{direction} / best fio"] > 0 for row in rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(fio.installed(), reason="fio is installed")
def test_without_fio_there_is_nothing_to_compare_with(tmp_path: Path):
    done = run(tmp_path)
    assert done.returncode == 2 and "not installed" in done.stderr
