from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import pretrained


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What two ranks export after a step has the same logits in plain transformers."""
    shape = ["--layers", "1", "--hidden", "256", "--vocabulary", "100", "--steps", "1"]
    assert pretrained.main([*shape, "--dtypes", "bfloat16", "--ranks", "2", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("plain", "zinf"))]
    assert len(rows) == 2 and rows[1].endswith("yes")
