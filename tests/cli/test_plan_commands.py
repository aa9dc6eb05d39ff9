"""`zinf-fx export-plan`, and what is said of plan files: `show-schedule` and `simulate`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import zinf_fx
from zinf_fx.cli import main
from zinf_fx.errors import PlanError
from zinf_fx.frontend.explain import Planning, plan_model
from zinf_fx.plan import hardware
from zinf_fx.sizes import in_words

TARGET = str(Path(__file__).parent / "two_layers.py") + ":gpt"

OPTIONS = ["--placement", "nvme", "--prefetch", "0,1,2", "--pack", "32KiB"]  # all of the model would be one pack


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main(["export-plan", TARGET, "-o", str(path), *OPTIONS, "--hardware", "dgx-a100"]) == 0
    return path


def test_placements_by_pattern(capsys: pytest.CaptureFixture[str]):
    given = "parameters=*norm*:device;*:nvme,gradients=host,optimizer=blocks.0.*:device;*:nvme"
    assert main(["show-schedule", TARGET, "--placement", given]) == 0
    out = capsys.readouterr().out
    assert "on device, gradients on host, optimizer on device: blocks.0.attention_norm.weight and 3 more" in out
    assert "on nvme, gradients on host, optimizer on nvme: tokens.weight and " in out
    assert main(["show-schedule", TARGET, "--placement", "parameters=*narm*:device;*:nvme"]) == 2
    assert "'*narm*', which matches no parameter of the model" in capsys.readouterr().err


def test_export_plan_writes_what_the_options_say(plan_file: Path):
    plan = zinf_fx.load_plan(plan_file)
    assert plan.config.prefetch == (0, 1, 2) and plan.config.placement.parameters == "nvme"
    assert [graph.kind for graph in plan.graphs] == ["forward", "backward"]


def test_a_plan_file_is_shown_as_its_model_is(plan_file: Path, capsys: pytest.CaptureFixture):
    shown = []
    for target in ([TARGET, *OPTIONS, "--hardware", "dgx-a100"], [str(plan_file)]):
        assert main(["show-schedule", *target, "--operators", "1:3"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "tokens: embedding" not in shown[0]


def test_this_machine_takes_the_seconds_measured_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr("zinf_fx.cli.machine.measure_machine", lambda store: hardware.load("rtx-4090"))
    monkeypatch.setattr("zinf_fx.passes.ir.timing._measured", lambda *operator: 4.0)
    assert main(["simulate", TARGET, "--placement", "device", "--hardware", "this-machine", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert main(["simulate", TARGET, "--placement", "device", "--json"]) == 0
    assert slow["seconds"] > 30 > json.loads(capsys.readouterr().out)["seconds"]


@pytest.mark.parametrize(
    ("kind", "begins"), [("json", "["), ("dot", "digraph"), ("chrome", "{"), ("html", "<!doctype")]
)
def test_every_format(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, kind: str, begins: str):
    assert main(["show-schedule", str(plan_file), "--format", kind]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(begins)
    assert main(["show-schedule", str(plan_file), "--format", kind, "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text() == printed


def test_simulate_prints_figures_and_a_sweep(plan_file: Path, capsys: pytest.CaptureFixture):
    assert main(["simulate", str(plan_file)]) == 0
    text = capsys.readouterr().out
    assert "on RTX 4090 desktop, batch 4, simulated" in text and "TFLOP/s per device" in text and "disk" in text
    assert " operators take as long as launching their kernels" in text
    assert main(["simulate", str(plan_file), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert max(event["end"] for event in simulated["timeline"]) == simulated["seconds"]
    assert main(["simulate", str(plan_file), "--json", "--save-every", "60", "--keep", "1"]) == 0
    saves = json.loads(capsys.readouterr().out)["saves"]
    nbytes = sum(saves["of_one"]["parameters"].values()) + sum(saves["of_one"]["states"].values())
    assert (saves["every"], saves["kept"], saves["copied"]["on_disk"]) == (3600, 1, 2 * nbytes)
    assert saves["copied"]["seconds"] == pytest.approx(nbytes / 6.9e9)
    assert f"CHECKPOINTS ON DISK, every 30 minutes, 3 kept\nof {in_words(nbytes)}: " in text
    assert main(["simulate", str(plan_file), "--json", "--sweep", "batch=4,8,64"]) == 0
    swept = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in swept] == [4, 8, 64]
    assert swept[0]["seconds"] == simulated["seconds"] and swept[2]["flops"] == 16 * simulated["flops"]
    assert swept[0]["flops_per_second"] < swept[2]["flops_per_second"]


ROTARY = """
import torch
from torch import nn

class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.ones(3, 8), persistent=False)

    def forward(self, x):
        return (self.layer(x) * self.frequencies).flatten(0, 1)

def rotary():
    return Rotary(), (torch.zeros(4, 3, 8),)
"""


def test_a_sweep_over_batches_of_a_model_with_buffers(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Neither its rotary frequencies nor the gradient of its result is as long as the batch."""
    (tmp_path / "rotary.py").write_text(ROTARY)
    target = [f"{tmp_path}/rotary.py:rotary", "--placement", "nvme"]
    assert main(["simulate", *target, "--json", "--sweep", "batch=4,8"]) == 0
    four, eight = json.loads(capsys.readouterr().out)
    assert eight["flops"] == 2 * four["flops"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["export-plan", TARGET, "-o", "plan.json", "--world-size", "0"],
            "world_size=0 is not a number of ranks",
        ),
        (["show-schedule", TARGET, "--world-size", "4", "--replicas", "3"], "4 ranks divide into"),
        (["export-plan", TARGET, "-o", "/dev/null/plan.json", "--placement", "nvme"], "can't be written"),
        (["show-schedule", "/dev/null/plan.json"], "can't be read"),
        (["show-schedule", "PLAN", "--placement", "nvme"], "has its options already: leave placement out"),
        (["simulate", "PLAN", "--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["simulate", "PLAN", "--hardware", "dgx-2"], "the plan is for 1 ranks and NVIDIA DGX-2 has 16"),
        (["simulate", "PLAN", "--sweep", "batch=0"], "batch='0' is not a whole number of at least 1"),
        (["simulate", "PLAN", "--sweep", "batch=" + "9" * 5000], "batch='999"),
        (["show-schedule", "PLAN", "--operators", "9" * 5000 + ":"], "operators='999"),
        (["show-schedule", "PLAN", "--format", "html", "--operators", "1:3"], "is for table and dot: html shows all"),
        (["show-schedule", TARGET, "--activations", "9" * 5000], "activations='999"),
        (["show-schedule", TARGET, "--world-size", "9" * 400], "world_size=a number beyond 2^63 is not"),
        (["show-schedule", TARGET, "--placement", "gradients=host,gradients=nvme"], "says twice where gradients live"),
        (["show-schedule", TARGET.removesuffix(":gpt")], "is not of the form module:factory"),
        (
            ["export-plan", TARGET, "-o", "plan.json", "--hardware", "dgx-2", "--device-memory", "1KiB"],
            "finds none that",
        ),
        (["simulate", "PLAN", "--sweep", "layers=2"], "sweep='layers=2' is not accepted"),
    ],
)
def test_refusals(plan_file: Path, capsys: pytest.CaptureFixture, arguments: list[str], message: str):
    assert main([str(plan_file) if argument == "PLAN" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error) < 2000  # what was given doesn't flood it, however long


def test_a_placement_may_name_a_stage(capsys: pytest.CaptureFixture):
    options = ["--placement", "optimizer=host,stage=2", "--world-size", "4"]
    assert main(["show-schedule", TARGET, *options]) == 0
    assert "ZeRO stage 2" in capsys.readouterr().out


def test_a_plan_file_may_have_any_name_or_be_a_pipe(plan_file: Path, tmp_path: Path):
    named = tmp_path / "of:today"
    named.write_bytes(plan_file.read_bytes())
    assert main(["simulate", str(named)]) == 0
    out, into = os.pipe()
    writing = threading.Thread(target=lambda: os.fdopen(into, "wb").write(plan_file.read_bytes()))
    writing.start()
    assert main(["simulate", f"/dev/fd/{out}"]) == 0
    writing.join()
    os.close(out)


def test_a_reader_that_has_seen_enough_is_no_error(plan_file: Path):
    command = [sys.executable, "-m", "zinf_fx", "show-schedule", str(plan_file), "--format", "html"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 0 and "Traceback" not in errors


def test_without_overlap_a_step_is_the_sum_of_its_jobs(plan_file: Path, capsys: pytest.CaptureFixture):
    seconds = []
    for option in ([], ["--no-overlap"]):
        assert main(["simulate", str(plan_file), "--hardware", "rtx-4090", "--json", *option]) == 0
        simulated = json.loads(capsys.readouterr().out)
        seconds.append((simulated["seconds"], sum(event["end"] - event["start"] for event in simulated["timeline"])))
    (overlapped, _), (alone, work) = seconds
    assert alone == pytest.approx(work) and overlapped < 0.95 * alone


def test_a_loop_over_micro_batches_is_simulated(plan_file: Path, capsys: pytest.CaptureFixture):
    assert main(["simulate", str(plan_file), "--hardware", "a100", "--accumulate", "3"]) == 0
    assert "3 times before the optimizer's step" in capsys.readouterr().out
    assert main(["simulate", str(plan_file), "--hardware", "a100", "--accumulate", "0"]) == 2
    assert "accumulate" in capsys.readouterr().err


def test_a_plan_of_many_ranks_is_simulated_on_as_many_nodes(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "plan.json"
    assert main(["export-plan", TARGET, "-o", str(path), "--placement", "nvme", "--world-size", "32"]) == 0
    assert main(["simulate", str(path), "--hardware", "dgx-2", "--no-overlap"]) == 0
    assert "2 x NVIDIA DGX-2" in capsys.readouterr().out


ONE_LAYER = str(Path(__file__).parent / "two_layers.py") + ":one_layer"
LIMITED = ["--device-memory", "5500KiB", "--tile", "128KiB", "--hardware", "rtx-4090"]
MADE: dict[str, Planning] = {}


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that plan ONE_LAYER with the same options share what was planned: to find a placement takes seconds."""

    def shared(model: nn.Module, inputs: tuple, *arguments: object, **options: object) -> Planning:
        key = repr((arguments, sorted(options.items())))
        if key not in MADE:
            MADE[key] = plan_model(model, inputs, *arguments, **options)
        return MADE[key]

    monkeypatch.setattr("zinf_fx.cli.planning.plan_model", shared)


@pytest.mark.parametrize("command", ["show-schedule", "simulate", "export-plan"])
@pytest.mark.parametrize("options", [[], ["--activations", "auto"]])
def test_choices_are_weighed_for_the_hardware_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, command: str, options: list[str]
):
    """How many of the optimizer's chunks there is room for, say: the same by every command."""

    def planned_for(*target: object, hardware: hardware.Hardware | None, **options: object) -> None:
        raise PlanError(f"planned for {hardware and hardware.name}")

    monkeypatch.setattr("zinf_fx.cli.planning.plan_model", planned_for)
    options = [*options, *(["-o", str(tmp_path / "plan.json")] if command == "export-plan" else [])]
    assert main([command, TARGET, "--placement", "host", *options, "--hardware", "a100"]) == 2
    assert f"planned for {hardware.load('a100').name}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("planned_once")
def test_what_auto_decided_is_printed_by_every_command(golden, tmp_path: Path, capsys: pytest.CaptureFixture):
    """The golden text leaves out the seconds."""
    path = str(tmp_path / "plan.json")
    printed = []
    for command in (["simulate"], ["export-plan", "-o", path], ["show-schedule", "--operators", "1:2"]):
        assert main([command[0], ONE_LAYER, *command[1:], *LIMITED]) == 0
        reason, table = capsys.readouterr().out.split("\n\n")[:2]
        printed.append(f"{reason}\n\n{table}\n")
    assert printed[0] == printed[1] == printed[2]
    golden("placement_auto.txt", re.sub(r"\b0\.\d{3,}", "0.00####", printed[0]))
    # A plan file has the placement, and nothing is left to decide.
    assert main(["simulate", path]) == 0
    assert "placement auto" not in capsys.readouterr().out


@pytest.mark.usefixtures("planned_once")
def test_json_has_what_auto_decided(capsys: pytest.CaptureFixture):
    assert main(["simulate", ONE_LAYER, "--json", *LIMITED]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert main(["show-schedule", ONE_LAYER, "--json", *LIMITED]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    decision = plan["decision"]
    assert decision == simulated["decision"]
    assert decision["placement"] == plan["config"]["placement"] != decision["rule"]
    taken = [candidate for candidate in decision["candidates"] if candidate["placement"] == decision["placement"]]
    assert [candidate["seconds"] for candidate in taken] == [simulated["seconds"]]
    assert simulated["seconds"] == min(
        candidate["seconds"] for candidate in decision["candidates"] if not candidate["refused"]
    )
    assert main(["show-schedule", ONE_LAYER, "--json", "--placement", "nvme"]) == 0
    assert "decision" not in json.loads(capsys.readouterr().out)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("planned_once")
def test_micro_batches_that_auto_decided_are_printed_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    path, given = tmp_path / "plan.json", ["--placement", "nvme", "--micro-batches", "auto", "--hardware", "a100"]
    printed = []
    for command in (["simulate"], ["export-plan", "-o", str(path)], ["show-schedule", "--operators", "1:2"]):
        assert main([command[0], ONE_LAYER, *command[1:], *given]) == 0
        printed.append(capsys.readouterr().out.split("\n\n")[:2])
    assert printed[0] == printed[1] == printed[2]
    assert printed[0][0].startswith("micro_batches auto, for ") and "taken" in printed[0][1]
    assert main(["show-schedule", ONE_LAYER, "--json", *given]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    (division,) = plan["divisions"]
    assert division["chosen"]["micro_batches"] == plan["config"]["micro_batches"]
    assert [candidate["micro_batches"] for candidate in division["considered"]][:2] == [1, 2]
    assert zinf_fx.load_plan(path).config.micro_batches == plan["config"]["micro_batches"]
    assert main(["simulate", str(path)]) == 0
    assert "micro_batches auto" not in capsys.readouterr().out


LAYERS = """
import torch
from torch import nn

def layers():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)), nn.Flatten(0)), (torch.zeros(4, 512),)
"""


def test_this_machine_has_the_memories_that_auto_may_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """It is measured once; on a CPU there is no host memory besides the device's."""
    calls, machine = [], replace(hardware.load("rtx-4090"), unified=True)
    monkeypatch.setattr("zinf_fx.cli.machine.measure_machine", lambda store: calls.append(store) or machine)
    monkeypatch.setattr("zinf_fx.passes.ir.timing._measured", lambda module, inputs, uses: 1e-6)
    (tmp_path / "layers.py").write_text(LAYERS)
    options = ["--device-memory", "10MiB", "--hardware", "this-machine", "--json"]
    assert main(["simulate", f"{tmp_path}/layers.py:layers", *options]) == 0
    decision = json.loads(capsys.readouterr().out)["decision"]
    assert len(calls) == 1 and decision["hardware"] == "RTX 4090 desktop"
    tiers = {tier for candidate in decision["candidates"] for tier in candidate["placement"].values()}
    assert "nvme" in tiers and "host" not in tiers
