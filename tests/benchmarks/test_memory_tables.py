from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import memory

TINY = ["--layers", "1", "--hidden", "64", "--heads", "1", "--context", "64", "--warmup", "1", "--steps", "1"]


@pytest.mark.slow
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {name: memory.POLICIES[name] for name in ("kept", "to NVMe")}
    monkeypatch.setattr(memory, "POLICIES", chosen)
    monkeypatch.setattr(memory, "FACTORS", (1, 4))
    assert memory.main([*TINY, "--store", str(tmp_path), "--budget", "1MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kept, moved = (next(line.split() for line in lines if line.startswith(name)) for name in chosen)
    assert kept[-1] == moved[-1] == "yes", "the same losses"
    sizes = [int(line.split()[1]) for line in lines[-2:]]
    assert 0 < sizes[0] < sizes[1], "tiles make room for larger layers"
