"""benchmarks/inductor.py prints the tables that it measures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import inductor

TINY = ["--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--rounds", "1", "--error-steps", "2"]


@pytest.mark.slow
def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inductor.main([*TINY, "--depths", "1", "--placements", "infinity-nvme", "--store", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    errors = [line for line in lines if line[:2] in (["float32", "inductor"], ["bfloat16", "inductor"])]
    assert len(errors) == 2 and all(line[-1] == "yes" and float(line[3]) < 0.01 for line in errors)
    (compiled,) = [line for line in lines if line[:2] == ["infinity-nvme", "1"]]
    assert int(compiled[5]) > 0 and int(compiled[6]) == 0  # graphs that the first process compiles, and the second
    (step,) = [line for line in lines if line[:2] == ["infinity-nvme,", "inductor"]]
    assert float(step[2]) > 0


def test_errors_are_relative_to_the_largest_element() -> None:
    results, expected = [torch.tensor([1.0, 3.0])], [torch.tensor([2.0, 4.0])]
    assert inductor.largest_error(results, expected) == 0.25


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--heads", "7"], "must be a multiple of --heads (7)"),
    ],
)
def test_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        inductor.main(flags)
    assert message in capsys.readouterr().err
