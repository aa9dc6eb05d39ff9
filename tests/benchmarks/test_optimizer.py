"""The benchmark of the streamed optimizer runs on few bytes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import zinf_fx
from zinf_fx.runtime.tensor.storage import new_storages

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import optimizer as benchmark
from engine_alone import EngineAlone, recorded

COUNT = 50_000


def printed(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> str:
    assert benchmark.main(["--store", str(store), "--parameters", str(COUNT), "--rounds", "1", *arguments]) == 0
    return capsys.readouterr().out


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    all_rows = json.loads(printed(capsys, tmp_path, "--json"))["rows"]
    rows = [row for row in all_rows if not row["optimizer"].startswith("DeepSpeed")]
    assert [(row["dtype"], "NVMe" in row["optimizer"]) for row in rows] == [
        ("bfloat16", True), ("bfloat16", False), ("float32", True), ("float32", False),
    ]  # fmt: skip
    # Gradient, master and two moments are read, the weights and all but the gradient written; then without a master.
    for row, (read, written) in zip(rows[::2], ((14, 14), (16, 12)), strict=True):
        assert read <= row["read_per_parameter"] < read + 1 and written <= row["written_per_parameter"] < written + 1
        assert row["ratio_to_limit"] == row["limit_seconds"] / row["seconds"]
        assert row["parameters_per_second"] == COUNT / row["seconds"]
    assert not list(tmp_path.iterdir())


def test_table_and_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = printed(capsys, tmp_path, "--dtypes", "float32")
    assert "zinf_fx.optim.AdamW, all on NVMe" in table and "limit" in table
    assert ("DeepSpeed is not installed" in table) == (importlib.util.find_spec("deepspeed") is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_alone_moves_the_same_bytes_and_changes_no_states(tmp_path: Path, dtype: torch.dtype):
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(n, dtype=dtype)) for n in (30_000, 7, 50_000))
    zinf_fx.offload(model, store=tmp_path, placement="nvme", chunk="64KiB")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False)
    for parameter in model:
        parameter.grad = zinf_fx.StoredTensor.of(new_storages([parameter.stored], "nvme")[0], parameter.shape, "cpu")
        parameter.grad.normal_()
    tiers = model[0].stored.tiers
    optimizer.step()
    with recorded(tiers) as recording:
        optimizer.step()
    before = {name: value.full_tensor() for name, value in optimizer.state[model[2]].items() if name != "step"}
    engine = EngineAlone(tiers.store, recording.requests, recording.peak)
    moved_before = tiers.store.counters()
    engine.run()
    after = tiers.store.counters()
    read, written = after.bytes_read - moved_before.bytes_read, after.bytes_written - moved_before.bytes_written
    assert read == sum(-(-r.nbytes // 4096) * 4096 for r in recording.requests if not r.write) > 0
    assert written == sum(-(-r.nbytes // 4096) * 4096 for r in recording.requests if r.write) > 0
    assert recording.peak <= 4 * 16384 * 20  # chunks, elements, bytes of each
    for name, value in before.items():
        assert torch.equal(optimizer.state[model[2]][name].full_tensor(), value), name


def test_parameters_of_any_count():
    for count in (1, 2048 * 2048, 2048 * 2049 + 17, 5_000_000):
        assert sum(p.numel() for p in benchmark.parameters_like_a_model(count, torch.bfloat16)) == count
