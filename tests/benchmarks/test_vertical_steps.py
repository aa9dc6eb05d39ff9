"""benchmarks/vertical.py runs with a small model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import deepspeed_nvme
import vertical

TINY = ["--layers", "1", "--hidden", "64", "--heads", "2", "--context", "16", "--rounds", "1", "--no-simulate"]
ZINF_AND_MEMORY = ["--ways", "vertical", "horizontal", "in memory"]


@pytest.mark.slow
def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vertical.main([*TINY, *ZINF_AND_MEMORY, "--counts", "3", "--store", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["way"] for row in rows] == ["vertical", "horizontal", "in memory"]
    in_vertical, in_horizontal, memory = rows
    # What moves moves once, or three times.
    assert in_vertical["bytes_per_parameter"] < in_horizontal["bytes_per_parameter"]
    assert memory["bytes_per_parameter"] is None and memory["to_memory"] == in_horizontal["to_horizontal"] == 1
    lines = vertical.table(rows).splitlines()
    assert [line.split()[:2] for line in lines[-3:]] == [["3", "vertical"], ["3", "horizontal"], ["3", "in"]]


@pytest.mark.skipif(not deepspeed_nvme.installed(), reason="DeepSpeed is not installed")
def test_deepspeed_takes_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--ways", "vertical", "DeepSpeed", "--counts", "2", "--store", str(tmp_path), "--json"]
    assert vertical.main([*TINY, *chosen]) == 0
    ours, other = json.loads(capsys.readouterr().out)["rows"]
    assert ours["to_deepspeed"] == other["seconds"] / ours["seconds"] and other["to_deepspeed"] == 1
    assert "to_memory" not in ours and other["seconds"] > 0
    assert not list(tmp_path.glob("deepspeed-*"))


def test_what_deepspeed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(Path(deepspeed_nvme.__file__).parent)!r})\n"
        "from deepspeed_nvme import asked, configuration\n"
        "connection, request = asked()\n"
        "connection.send('ready')\n"
        "configured = configuration(request['store'], True, request['options'], request['count'], 9)\n"
        "while steps := connection.recv():\n"
        "    if request['count'] == 5: sys.exit('no libaio')\n"
        "    print('loud')\n"
        "    connection.send((steps, (request, configured)))\n"
    )
    monkeypatch.setattr(vertical, "DEEPSPEED", program)
    args = vertical.parser().parse_args([*TINY, "--micro-batch", "2"])
    with contextlib.closing(vertical.DeepSpeed(args, 3, "/store")) as training:
        assert training.seconds(7) == 7
        request, configured = training.bytes_per_parameter
    assert request["model"] == asdict(vertical.config_of(args)) and not request["model"]["tied"]
    assert (request["count"], request["micro_batch"], request["options"]) == (3, 2, vertical.OPTIONS)
    assert request["live"] == args.live < 1e9 and configured["zero_optimization"]["stage3_max_reuse_distance"] == 9
    assert configured["zero_optimization"]["offload_param"]["max_in_cpu"] == 9  # by default 1e9: none on NVMe
    assert configured["gradient_accumulation_steps"] == 3 and configured["bf16"]["enabled"]
    assert configured["zero_optimization"]["stage"] == 3
    for name in ("offload_param", "offload_optimizer"):
        offloaded = configured["zero_optimization"][name]
        assert (offloaded["device"], offloaded["nvme_path"]) == ("nvme", "/store")
    with (
        contextlib.closing(vertical.DeepSpeed(args, 5, "/store")) as failing,
        pytest.raises(RuntimeError, match="ended with status 1:\nno libaio"),
    ):
        failing.seconds(1)


def test_without_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_nvme, "installed", lambda: False)
    with pytest.raises(SystemExit):
        vertical.main(["--ways", "vertical", "DeepSpeed"])
    assert "--ways DeepSpeed: it is not installed here" in capsys.readouterr().err
    monkeypatch.setattr(
        vertical, "measure", lambda args, store: [{"micro_batches": 1, "way": way} for way in args.ways]
    )
    monkeypatch.setattr(vertical, "table", str)
    assert vertical.main(TINY) == 0
    printed = capsys.readouterr().out
    assert "'in memory'" in printed and "'DeepSpeed'" not in printed
    assert printed.endswith("\nDeepSpeed is not installed, and left out\n")


def test_a_prediction_is_of_the_machine_before_and_after_a_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    predictions = iter((1.0, 3.0, 10.0, 30.0))

    def simulated(args: argparse.Namespace, way: str, count: int, store: str) -> float:
        happened.append(f"{way}, simulated")
        return next(predictions)

    class Training:
        bytes_per_parameter = None

        def __init__(self, args: argparse.Namespace, way: str, count: int, store: str) -> None:
            self.way = way

        def seconds(self, steps: int) -> float:
            happened.append(self.way)
            return 4.0

    monkeypatch.setattr(vertical, "simulated", simulated)
    monkeypatch.setattr(vertical, "Training", Training)
    chosen = [*ZINF_AND_MEMORY, "--simulate", "--counts", "2", "--store", str(tmp_path), "--json"]
    assert vertical.main([*TINY, *chosen]) == 0
    in_vertical, in_horizontal, memory = json.loads(capsys.readouterr().out)["rows"]
    assert happened == [
        "vertical, simulated", "vertical", "vertical, simulated",
        "horizontal, simulated", "horizontal", "horizontal, simulated",
        "in memory",
    ]  # fmt: skip
    assert (in_vertical["simulated"], in_horizontal["simulated"]) == (2, 20) and "simulated" not in memory
    assert (in_vertical["simulated_to_measured"], in_horizontal["simulated_to_measured"]) == (0.5, 5)


def test_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        vertical.main(["--counts", "4", "0"])
    assert "--counts must be at least 1, not 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        vertical.main(["--prefetch", "3", "2", "1"])
    assert "prefetch=(3, 2, 1): a tile is fetched, then uploaded" in capsys.readouterr().err
