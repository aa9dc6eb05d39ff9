"""benchmarks/gpu.py, as far as it goes without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu

TINY = ["--device", "cpu", "--model", "llama-tiny", "--batch", "2", "--context", "16", "--steps", "2", "--warmup", "0"]


@pytest.fixture(autouse=True)
def precision_as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow
def test_rows_have_the_same_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["--ways", "device", "zero-offload", "infinity-nvme"]
    assert gpu.main([*TINY, *ways, "--no-simulate", "--json", "--store", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["way"] for row in rows] == ways[1:]
    assert len({row["loss"] for row in rows}) == 1
    assert all(0 < row["forward"] + row["backward"] < row["step"] for row in rows)


def test_the_table_has_ratios_where_plain_pytorch_runs_too() -> None:
    args = gpu.parser().parse_args([*TINY, "--optimizer", "none"])
    rows = [
        gpu.Row(gpu.IN_MEMORY, 1000, 9.0, 1.0, 2.0, 4.0, 4.0, 0, 2.5),
        gpu.Row("device", 1000, 9.0, 2.0, 2.5, 6.0, 5.0, 0, 2.5),
    ]
    first, second = gpu.table(rows, args).splitlines()[-2:]
    assert first.split()[5:9] == ["1.000"] * 4
    assert second.split()[5:9] == ["2.000", "1.250", "1.500", "1.250"]
    assert gpu.table(rows[1:], args).splitlines()[-1].split()[5] == "6"  # tokens per second


@pytest.mark.slow
def test_states_of_a_share_of_the_parameters_are_on_nvme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first ones, in the order of their names: the losses are those of one tier."""
    options = ["--ways", "zero-offload", "--optimizer", "in-backward", "--no-simulate", "--json"]
    losses = set()
    for share in ("0.5", "0"):
        assert gpu.main([*TINY, *options, "--store", str(tmp_path), "--states-on-nvme", share]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        losses.add(row["loss"])
    assert len(losses) == 1


def test_the_states_on_nvme_are_those_of_the_first_parameters() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4)))
    placement = gpu.with_states_on_nvme(gpu.PRESETS["zero-offload"], model, 0.5)
    tiers = [placement["optimizer"](name, parameter) for name, parameter in model.named_parameters()]
    assert tiers == ["nvme", "nvme", "host", "host"]
    assert placement["parameters"] == "device" and placement["gradients"] == "host"


def test_a_share_above_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*TINY, "--states-on-nvme", "1.5"])
    assert "--states-on-nvme 1.5 is not a share" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "there is no CUDA device" in capsys.readouterr().err
