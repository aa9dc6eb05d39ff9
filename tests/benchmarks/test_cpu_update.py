"""The benchmark of updates runs on few parameters, with and without other libraries."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import update as benchmark
import update_peers
from update_peers import Peer

COUNT = 40_000


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(benchmark, "COPIED", 1 << 20)
    monkeypatch.setattr(sys, "argv", ["update.py", "--parameters", str(COUNT), "--rounds", "1", *arguments])
    benchmark.main()
    return capsys.readouterr().out


def use(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (benchmark, update_peers):
        monkeypatch.setattr(module, "PEERS", peers)


def test_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    use([], monkeypatch)
    rows = json.loads(printed(capsys, monkeypatch, "--threads", "1", "2", "--json"))["rows"]
    assert [row["threads"] for row in rows] == [1] * (len(rows) // 2) + [2] * (len(rows) // 2)
    nbytes = {row["way"]: row["bytes_per_parameter"] for row in rows}
    assert nbytes[benchmark.PYTORCH] == nbytes["fp32"] == nbytes["bf16, fp32 master"] == 28
    assert 14 < nbytes["bf16, split master, 8-bit moments"] < 14.5
    for row in rows:
        assert row["bytes_per_second"] == pytest.approx(row["bytes_per_parameter"] * row["parameters_per_second"])
        assert (row["ratio_of_zinf_fx"] is None) == (row["way"] != benchmark.PYTORCH)


PEERS = [
    Peer("torch", "torch.optim", "AdamW", torch.bfloat16, "bf16", "bf16, split master, bf16 moments", {"fused": True}),
    Peer("torch", "torch.optim", "NoSuchOptimizer", torch.float32, "fp32", "fp32"),
    Peer("no_such_library", "no_such_library", "AdamW", torch.float32, "fp32", "fp32"),
]
"""One that runs, one that raises an error, and one that isn't installed."""


def test_peers_have_rows_where_they_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    use(PEERS, monkeypatch)
    said = json.loads(printed(capsys, monkeypatch, "--threads", "1", "--json"))
    rows = {row["way"]: row for row in said["rows"]}
    row = rows["torch AdamW, bf16, bf16 moments"]
    assert row["bytes_per_parameter"] == 14  # two of the gradient; parameters and moments are read and written
    beside = rows["bf16, split master, bf16 moments"]
    assert row["beside"] == beside["way"]
    assert row["ratio_of_zinf_fx"] == pytest.approx(row["all_seconds"][0] / beside["all_seconds"][0])
    assert said["versions"] == [f"torch {version('torch')}"] and said["not_installed"] == ["no_such_library"]
    assert list(said["failures"]) == ["torch NoSuchOptimizer, fp32, fp32 moments"]

    table = printed(capsys, monkeypatch, "--threads", "1")
    assert "torch AdamW, bf16, bf16 moments" in table and "no_such_library: not installed, and left out" in table
    assert "torch NoSuchOptimizer, fp32, fp32 moments doesn't run here, and is left out: AttributeError: " in table


class Parts(torch.optim.SGD):
    """An optimizer whose step can't be compiled, with a state of several tensors and one that maps codes."""

    def step(self) -> None:
        torch.compile(refused, backend=refused, fullgraph=True)()
        for parameter in self.param_groups[0]["params"]:
            numel, number = parameter.numel(), torch.tensor(0.0)
            codes = torch.zeros(numel, dtype=torch.uint8)
            state = {"state1": codes, "qmap1": torch.zeros(256), "step": number, "parts": Several(numel)}
            self.state[parameter] = state


class Several:
    """What a tensor subclass says of its tensors."""

    def __init__(self, numel: int) -> None:
        self.codes, self.qmap = torch.zeros(numel, dtype=torch.uint8), torch.zeros(256)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "qmap"], None


def refused(*_: object) -> None:
    if torch.compiler.is_compiling() or _:
        raise RuntimeError("the compiler refuses this")


def test_what_fails_to_compile_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.optim, "Parts", Parts, raising=False)
    monkeypatch.setattr(update_peers, "OPTIONS", {"lr": 0.1})
    monkeypatch.setattr(update_peers, "MATRIX", 300)
    peer = Peer("torch", "torch.optim", "Parts", torch.float32, "8-bit", None, compiles=True)
    name, step, nbytes = update_peers.prepare(peer, 1000)
    assert name == "torch Parts, fp32, 8-bit moments, eager"
    assert nbytes == 2 * (4 + 1 + 1) + 4
    step()
