"""benchmarks/greedysnake.py runs with small models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zinf_fx.plan.hardware import load
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import greedysnake
from greedysnake import Run, plan_of, simulated, with_drives

SMALL = Run("small", 10, 512, 4, 1.5)
OPTIONS = ["--micro-batches", "3", "--context", "16", "--drives", "1", "4"]


@pytest.mark.slow
def test_moving_once_takes_less_than_a_loop_and_a_step_extends_to_any_depth() -> None:
    single, four = simulated(SMALL, "nvme", 1, greedysnake.parser().parse_args(OPTIONS))
    assert single["ratio"] > 1.2 and single["loop_waits"].startswith("disk")
    assert four["vertical"] < single["vertical"] and four["loop"] < single["loop"]
    plan = plan_of(SMALL, SMALL.layers, "nvme", 1, 1, 16)
    whole = simulate_plan(plan, with_drives(load("a100"), 1), accumulate=3)
    assert single["loop"] == pytest.approx(whole.seconds, rel=0.02)


def test_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        greedysnake.main(["--drives", "4", "0"])
    assert "--drives must be at least 1" in capsys.readouterr().err
