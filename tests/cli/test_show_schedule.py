"""`zinf-fx show-schedule`: the schedule itself, targets, options, and errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from gate import slow

from zinf_fx.cli import main

ROOT = Path(__file__).parents[2]
GPT = f"{ROOT / 'examples' / 'gpt.py'}:small"
TWO_LAYERS = f"{Path(__file__).parent / 'two_layers.py'}:gpt"
BY_PARAMETER = [TWO_LAYERS, "--placement", "infinity-nvme", "--pack", "none"]
HEAD = -1

TARGETS = """
import torch
from torch import nn

number = 3

def small():
    return nn.Linear(4, 4), (torch.zeros(2, 4),)

def keywords():
    return nn.Linear(4, 4), {"input": torch.zeros(2, 4)}

def needs_values():
    model = nn.Linear(4, int(torch.ones(4).sum()))
    return model, (torch.zeros(2, 4),)

def fails():
    raise ValueError("no luck\\nat all")

def just_a_model():
    return nn.Linear(4, 4)

def just_a_tensor():
    return nn.Linear(4, 4), torch.zeros(2, 4)

def no_model():
    return 1, ()

def wrong_inputs():
    return nn.Linear(4, 4), (torch.zeros(2, 5),)
"""


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    path = tmp_path / "targets.py"
    path.write_text(TARGETS)
    (tmp_path / "broken.py").write_text("import there_is_no_such_module")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    return path


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["show-schedule", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# The schedule


@pytest.mark.parametrize(
    ("option", "distances"),
    [
        slow([], {"allgather": 1, "upload": 2, "fetch": 3}),
        (["--prefetch", "0,2,5"], {"allgather": 0, "upload": 2, "fetch": 5}),
    ],
)
def test_while_an_operator_computes_the_next_ones_are_on_their_way(
    capsys: pytest.CaptureFixture[str], option: list[str], distances: dict[str, int]
):
    """Operator i computes; the all-gather of i + 1, the upload of i + 2 and the fetch of i + 3 are started."""
    (plan,) = data(capsys, *BY_PARAMETER, "--no-residency", *option)
    forward, backward = (Starts(graph) for graph in plan["graphs"])
    assert forward.count >= 8 and backward.count >= 8
    for kind, distance in distances.items():
        for i in range(forward.count):
            assert forward.started(kind, i) == forward.needed_at(i + distance), (kind, i)
            # The last operators of forward are followed by the first of backward.
            assert forward.started(kind, i, for_backward=True) == backward.needed_at(i + distance - forward.count), (
                kind,
                i,
            )
        for i in range(backward.count):
            assert backward.started(kind, i) == backward.needed_at(i + distance), (kind, i)
        for graph in (forward, backward):  # the ends: the prologue starts what the first operators need
            before = [graph.needed_at(operator) for operator in range(distance)]
            assert graph.started(kind, HEAD) == set().union(*before), kind
            assert set().union(*(graph.started(kind, i) for i in range(HEAD, graph.count))) == graph.names


def test_gradients_leave_behind_the_operator_that_computes_them(capsys: pytest.CaptureFixture[str]):
    """The reduce-scatter of operator i runs while i + 1 computes, and the offload while i + 2 does."""
    (plan,) = data(capsys, *BY_PARAMETER)
    events, count = plan["graphs"][1]["events"], len(plan["graphs"][1]["operators"])
    scattered = {e["tile"]: e["operator"] for e in events if e["kind"] == "reduce_scatter"}
    offloaded = {e["tile"]: e["operator"] for e in events if e["kind"] == "offload"}
    assert len(scattered) == len(plan["graphs"][1]["tiles"])
    assert offloaded == {tile: min(operator + 2, count - 1) for tile, operator in scattered.items()}


class Starts:
    """When a graph's transfers start, by tile name."""

    def __init__(self, graph: dict[str, Any]) -> None:
        self.count = len(graph["operators"])
        self._events = graph["events"]
        self._name = [tile["name"] for tile in graph["tiles"]]
        self._first = {self._name[e["tile"]]: e["operator"] for e in self._events if e["kind"] == "wait"}
        self.names = set(self._first)

    def needed_at(self, operator: int) -> set[str]:
        """Return the tiles that this operator is the first to wait for."""
        return {name for name, first in self._first.items() if first == operator}

    def started(self, kind: str, operator: int, for_backward: bool = False) -> set[str]:
        events = [
            e for e in self._events if (e["kind"], e["operator"], e["for_backward"]) == (kind, operator, for_backward)
        ]
        return {self._name[e["tile"]] for e in events}


def test_golden_of_the_gpt_example(golden, capsys: pytest.CaptureFixture[str]):
    assert main(["show-schedule", GPT, "--placement", "infinity-nvme", "--pack", "32KiB"]) == 0
    golden("show_schedule_gpt_small.txt", capsys.readouterr().out)


# Options


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]):
    options = ("--prefetch", "none", "--device-memory", "8MiB", "--host-memory", "1GiB", "--inference")
    (plan,) = data(capsys, TWO_LAYERS, "--placement", "parameters=nvme,gradients=host", *options)
    assert [graph["kind"] for graph in plan["graphs"]] == ["inference"]
    config = plan["config"]
    assert (config["prefetch"], config["device_memory"], config["host_memory"]) == (None, 8 << 20, 1 << 30)
    tiers = dict(parameters="nvme", gradients="host", optimizer="device", activations="device")
    assert config["placement"] == {**tiers, "stage": 3}
    assert {tile["dtype"] for tile in plan["graphs"][0]["tiles"]} == {"float32"}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plan") / "plan.json")
    assert main(["export-plan", TWO_LAYERS, "--placement", "host", "-o", path]) == 0
    return path


def test_a_range_of_operators(plan_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["show-schedule", plan_file, "--operators", "3:5"]) == 0
    text = capsys.readouterr().out
    assert text.count("shown are 3 to 4") == 2
    assert re.findall(r"^ ?(\d+)  ", text, flags=re.MULTILINE) == ["3", "4", "3", "4"]


@pytest.mark.parametrize("text", ["10:", "30:40"])
def test_a_range_behind_the_last_operator_is_refused(plan_file: str, capsys: pytest.CaptureFixture[str], text: str):
    assert main(["show-schedule", plan_file, "--operators", text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"operators='{text}' has none of the plan's, which are 0 to 9" in err


def test_charts_are_blocks_in_a_terminal_only(
    capsys: pytest.CaptureFixture[str], targets: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ["show-schedule", f"{targets}:small", "--placement", "nvme"]
    main(command)
    elsewhere = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    main(command)
    blocks = capsys.readouterr().out
    main([*command, "--ascii"])
    plain = capsys.readouterr().out
    assert elsewhere.isascii() and plain.isascii() and "forward, host arena" in plain
    assert "│████" in blocks and max(map(len, blocks.splitlines())) <= 110


def test_auto_is_decided_and_said(capsys: pytest.CaptureFixture[str], targets: Path):
    assert main(["show-schedule", f"{targets}:small"]) == 0
    assert capsys.readouterr().out.startswith("placement auto, for this machine, at nominal rates: everything fits")


# Targets


def test_modules_files_and_keywords(capsys: pytest.CaptureFixture[str], targets: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(targets.parent)
    by_name = data(capsys, "targets:small", "--placement", "host")
    assert by_name == data(capsys, "targets.py:small", "--placement", "host")
    assert by_name == data(capsys, "./targets.py:keywords", "--placement", "host")


def test_a_factory_that_needs_values_is_called_again_with_them(capsys: pytest.CaptureFixture[str], targets: Path):
    assert main(["show-schedule", f"{targets}:needs_values", "--placement", "nvme"]) == 0
    out, err = capsys.readouterr()
    assert "needs_values can't be built on the meta device" in err and err.count("\n") == 1
    assert "FORWARD" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["targets"], "is not of the form module:factory"),
        (["targets.py:"], "is not of the form module:factory"),
        ([":small"], "is not of the form module:factory"),
        (["gone.py:small"], "there is no file 'gone.py'"),
        (["gone.there:small"], "there is no module 'gone.there'"),
        (["broken:small"], "importing 'broken' raised ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        (["exits.py:small"], "importing 'exits.py' raised SystemExit: 3"),
        (["targets.py:smal"], "'targets.py' has no 'smal'; its functions: small, keywords"),
        (["targets.py:number"], "'number' in 'targets.py' is a int, not a function"),
        (["targets.py:fails"], "targets.py:fails raised ValueError: no luck"),
        (["targets.py:just_a_model"], "returned a Linear: it must return (model, example_inputs)"),
        (["targets.py:just_a_tensor"], "returned a Tensor as the example inputs"),
        (["targets.py:no_model"], "returned a int as the model"),
        (["targets.py:wrong_inputs", "--placement", "host"], "on its example inputs raised"),
        (["targets.py:small", "--placement", "disk"], "placement='disk' is unknown; accepted: 'auto'"),
        (["targets.py:small", "--placement", "weights=host"], "unknown state 'weights'"),
        (["targets.py:small", "--prefetch", "soon"], "prefetch='soon' is not accepted"),
        (
            ["targets.py:small", "--micro-batches", "2", "--micro-batch-group", "x"],
            "micro_batch_group='x' is not accepted; accepted: 'auto', a",
        ),
        (["targets.py:small", "--micro-batch-group", "auto"], "give micro_batches too"),
        (["targets.py:small", "--micro-batches", "many"], "micro_batches='many' is not accepted; accepted: 'auto', a"),
        (["targets.py:small", "--prefetch", "3,2,1"], "must not fall"),
        (["targets.py:small", "--device-memory", "lots"], "device_memory='lots' is not a size"),
        (["targets.py:small", "--operators", "3"], "operators='3' is not a range"),
        (["targets.py:small", "--operators", "-3:5"], "operators='-3:5' is not a range"),
        (["targets.py:small", "--operators", "5:2"], "operators='5:2' is empty"),
        (["targets.py:small", "--operators", "2:2"], "operators='2:2' is empty"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    targets: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    monkeypatch.chdir(targets.parent)
    target, *options = arguments
    options = [f"{options[0]}={options[1]}", *options[2:]] if options else []
    assert main(["show-schedule", target, *options]) == 2
    out, err = capsys.readouterr()
    error = err.splitlines()[-1]
    assert out == "" and error.startswith("zinf-fx: error: ") and message in error, err
    assert "Traceback" not in err and len(err.splitlines()) <= 2  # the note about the meta device may precede it


def test_a_refused_budget_is_printed_as_the_table_that_it_is(capsys: pytest.CaptureFixture[str], targets: Path):
    """The option that it names is enough."""
    command = ["show-schedule", f"{targets}:small", "--placement", "host", "--device-memory"]
    assert main([*command, "8B"]) == 2
    lines = capsys.readouterr().err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("zinf-fx: error: "))
    assert "and the budget is 8B: raise device_memory" in lines[first]
    assert lines[first + 2].split() == ["what", "needs"]
    assert ["device_memory", "8", "B"] in [line.split() for line in lines]
    option = lines[lines.index("To fit:") + 1].strip()
    assert re.fullmatch(r'device_memory="\d+B"', option)
    assert main([*command, option.split('"')[1]]) == 0
