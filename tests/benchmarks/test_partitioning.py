"""The benchmark of partitioning runs on few bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "partitioning.py"


@pytest.mark.slow
def test_rows(tmp_path: Path):
    stores = [tmp_path / "one", tmp_path / "two"]
    for store in stores:
        store.mkdir()
    command = [
        sys.executable,
        BENCHMARK,
        "--stores",
        *stores,
        "--ranks",
        "2",
        "--parameters",
        "4",
        "--mib",
        "1",
        "--small",
        "8",
    ]
    done = subprocess.run([*command, "--rounds", "1", "--json"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["ranks"] == 2 and row["shards"] > 0 and row["ratio"] > 0
    assert abs(row["ratio"] - row["shards"] / row["owners"]) < 1e-9 * row["ratio"]
    assert row["packs"] > 0 and abs(row["gain"] - row["alone"] / row["packs"]) < 1e-9 * row["gain"]
    assert not any(path for store in stores for path in store.iterdir())
