"""accelerate's own loop runs on one and on two ranks; what it saves can be read by those who don't have zinf_fx."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching_programs import results_of
from rows import Row
from safetensors.torch import load_file


@pytest.mark.row(
    "accelerate",
    "`prepare`, `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`, `save_model`, under `torchrun`, 1 rank",
)
def test_loop(row: Row, tmp_path: Path) -> None:
    results = {how: results_of("with_accelerate.py", 1, how, tmp_path, "save") for how in ("plain", "stored")}
    row.compare(results["stored"], results["plain"])
    plain, stored = (load_file(tmp_path / how / "model" / "model.safetensors") for how in ("plain", "stored"))
    row.compare((stored[name] for name in plain), plain.values())


@pytest.mark.row("accelerate", "`prepare`, `accumulate`, `clip_grad_norm_`, 2 ranks")
def test_two_ranks(row: Row, tmp_path: Path) -> None:
    results = {how: results_of("with_accelerate.py", 2, how, tmp_path, "train") for how in ("plain", "stored")}
    row.compare(results["stored"], results["plain"], to="to `DistributedDataParallel`")


@pytest.mark.row(
    "accelerate", "`zinf_fx.integrations.accelerate.Accelerator`, 2 ranks: `save_state`, `load_state`, `save_model`"
)
def test_two_ranks_save(row: Row, tmp_path: Path) -> None:
    results = {how: results_of("with_accelerate.py", 2, how, tmp_path, "save") for how in ("plain", "stored")}
    row.compare(results["stored"], results["plain"], to="to `DistributedDataParallel`")
    plain, stored = (load_file(tmp_path / how / "model" / "model.safetensors") for how in ("plain", "stored"))
    row.compare((stored[name] for name in plain), plain.values(), to="to `DistributedDataParallel`")
    assert not list((tmp_path / "stored").rglob("optimizer.bin"))


@pytest.mark.row("accelerate", "accelerate's own `save_state`, 2 ranks: the first one alone saves")
def test_one_rank_saves(row: Row, tmp_path: Path) -> None:
    (told,) = results_of("with_accelerate.py", 2, "stored", tmp_path, "save", "theirs", ends=False)
    assert "must ask for it at the same point" in told
    row.add("refused: " + told)
