"""The simulator agrees with ZeRO-Infinity's table 4 and section 7.4, on the paper's own cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zinf_fx.plan.hardware import load

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from dgx2 import RUNS, figures, plan_of

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "dgx2.py"


def rows(*names: str) -> dict[str, dict]:
    command = [sys.executable, BENCHMARK, "--json", "--runs", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return {row["run"]: row for row in json.loads(done.stdout)}


@pytest.mark.slow
def test_table_4():
    by_size = rows("5T", "10T", "20T")
    for row in by_size.values():
        least, most, actual = row["printed"]
        assert abs(row["least"] / least - 1) < 0.1 and abs(row["most"] / most - 1) < 0.1
        assert row["waits_for"] == "link"
        # Seconds that add up are less than shares of different wholes that do: a step is faster than section 7.7 says.
        assert row["off"] > row["least"] and row["on"] > row["most"]
        assert row["off"] < actual * 1.05 and row["on"] > actual
    assert by_size["5T"]["waited"] < by_size["10T"]["waited"] < by_size["20T"]["waited"]  # the smaller the batch
    for name in ("5T", "10T"):
        assert abs(by_size[name]["on"] / by_size[name]["printed"][1] - 1) < 0.1


@pytest.mark.slow
def test_over_forty_on_one_node():
    assert all(row["average"] > row["over"] for row in rows("10B", "50B", "100B").values())


@pytest.mark.slow
def test_a_step_of_more_layers_is_that_of_fewer_extended():
    run = replace(RUNS[3], hidden=4)
    hardware = load("dgx-2").with_ranks(512)
    two, four, seven = (figures(plan_of(run, layers), run, hardware) for layers in (2, 4, 7))
    extended = two.extended(four, 2.5)
    assert extended.flops == pytest.approx(seven.flops)
    assert extended.seconds == pytest.approx(seven.seconds, rel=0.01)
