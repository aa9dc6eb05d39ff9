"""Planning takes time in proportion to depth, and of a trillion parameters 2 GiB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "planning.py"


def measured(*options: str) -> list[dict]:
    command = [sys.executable, BENCHMARK, "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_rows():
    (row,) = measured("--layers", "1", "--hidden", "320", "--ranks", "32")
    assert row["operators"] > 4 and row["peak"] > row["file"] > 0
    assert row["parameters"] == 12 * 320**2 + 13 * 320 + (256 + 1024 + 2) * 320


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trillion_parameters_in_two_gib_and_in_time_that_grows_with_depth_alone():
    _, some, all_layers = measured("--layers", "8", "48", "128")
    assert all_layers["parameters"] > 1e12
    assert all_layers["peak"] < 2 << 30
    # Seconds of a shared machine are compared with each other only; what isn't linear in depth would be 2.2 and more.
    assert all_layers["per_layer"] < 1.6 * some["per_layer"]
