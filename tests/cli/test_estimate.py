"""`zinf-fx estimate`: golden texts, models, hardware, JSON, and errors in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from gate import named

from zinf_fx.cli import main
from zinf_fx.plan import hardware

GPT = f"{Path(__file__).parents[2] / 'examples' / 'gpt.py'}:small"
PARAMETERS = 12 * 64**2
TRILLION = ["--layers", "128", "--hidden", "25600", "--heads", "256", "--batch", "7", "--sequence", "1024"]
SMALL = ["--layers", "1", "--hidden", "64", "--heads", "4", "--batch", "1", "--sequence", "32"]

TARGETS = """
import torch
from torch import nn

def frozen():
    return nn.Linear(4, 4).requires_grad_(False), (torch.zeros(2, 4),)

def wrong_inputs():
    return nn.Linear(4, 4), (torch.zeros(2, 5),)
"""


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(len(line) <= 80 for line in out.splitlines()), "wider than 80 columns"
    return out


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["estimate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates have one placement, which uses all tiers: of what is printed, it is enough."""
    monkeypatch.setattr("zinf_fx.frontend.estimate.PLACEMENTS", ("infinity-nvme",))


# Output


@pytest.mark.slow
def test_golden_of_a_trillion_parameters_on_a_dgx_2(golden, capsys: pytest.CaptureFixture[str]):
    golden("estimate_trillion.txt", text(capsys, *TRILLION))


@pytest.mark.parametrize("name", named(hardware.names(), {"dgx-2", "rtx-4090"}))
def test_a_model_on_every_description(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr("zinf_fx.frontend.estimate.PLACEMENTS", ("dp",))
    out = text(capsys, *SMALL, "--hardware", name)
    assert "The first to fit is dp" in out and "Nothing is written with dp." in out


def test_a_model_that_fits_nowhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zinf_fx.frontend.estimate.PLACEMENTS", ("dp", "nvme"))
    tiny = [*SMALL, "--layers", "2", "--hardware", "rtx-4090", "--device-memory", "64KiB", "--nvme", "1MiB"]
    out = text(capsys, *tiny)
    assert out.endswith("\n\nNo placement fits: nvme needs 1.5 MiB of NVMe in each node, not 1.0 MiB.\n")
    assert "TFLOP/s per device" not in out and "BANDWIDTH" not in out
    out = text(capsys, *tiny, "--host-memory", "1MiB")
    assert " of host memory in each node, not 1.0 MiB,\nand 1.5 MiB of NVMe in" in out


@pytest.mark.usefixtures("one")
def test_wanted_efficiencies_and_placements(capsys: pytest.CaptureFixture[str]):
    out = text(capsys, *SMALL, "--placement", "infinity-nvme", "--efficiency", "0.25", "0.75", "0.995")
    assert "BANDWIDTH with infinity-nvme" in out and "25 %" in out and "75 %" in out and "99.5 %" in out


@pytest.mark.usefixtures("one")
def test_checkpoints_on_disk(capsys: pytest.CaptureFixture[str]):
    options = [*SMALL, "--placement", "infinity-nvme", "--save-every", "7.5", "--keep", "2"]
    assert "CHECKPOINTS ON DISK, every 7.5 minutes, 2 kept\n" in text(capsys, *options)
    saves = data(capsys, *options)["saves"]
    by_dtype = {"parameters": {"float16": 2 * PARAMETERS}, "states": {"float32": 12 * PARAMETERS}}
    assert saves["of_one"] == {**by_dtype, "in_store": 14 * PARAMETERS}
    assert (saves["every"], saves["kept"]) == (450, 2)
    copied, by_generations = saves["copied"], saves["by_generations"]
    assert (copied["written"], copied["on_disk"]) == (14 * PARAMETERS, 3 * 14 * PARAMETERS)
    assert (by_generations["written"], by_generations["on_disk"]) == (0, 2 * 14 * PARAMETERS)
    assert copied["days"] == pytest.approx(56e15 / (14 * PARAMETERS * 192))


# The model


@pytest.mark.usefixtures("one")
def test_a_target(capsys: pytest.CaptureFixture[str]):
    printed = data(capsys, GPT, "--hardware", "dgx-a100", "--placement", "infinity-nvme")
    assert printed["workload"]["parameters"] == 842_496 and printed["workload"]["dtype"] == "float32"
    assert printed["states"] == {"parameters": 4 * 842_496, "gradients": 4 * 842_496, "optimizer": 8 * 842_496}
    assert printed["chosen"] == "infinity-nvme"
    assert printed["workload"]["recomputes"] is False


@pytest.mark.usefixtures("one")
def test_options_of_the_model(capsys: pytest.CaptureFixture[str]):
    two_layers = [*SMALL, "--layers", "2"]
    plain = data(capsys, *two_layers)
    options = ("--checkpoint-interval", "2", "--dtype", "float32", "--optimizer-bytes", "16")
    printed = data(capsys, *two_layers, *options)
    assert plain["workload"]["dtype"] == "float16"  # the DGX-2's
    assert (printed["workload"]["dtype"], printed["states"]["optimizer"]) == ("float32", 2 * 16 * PARAMETERS)
    # Two layers are one segment, and the last one is never computed again.
    assert printed["predictions"][0]["work"] > 0.8 * plain["predictions"][0]["work"]
    assert printed["predictions"][0]["saved_for_backward"] > 2 * plain["predictions"][0]["saved_for_backward"]


# The hardware


@pytest.mark.usefixtures("one")
def test_options_of_the_hardware(capsys: pytest.CaptureFixture[str]):
    sizes = ("--nodes=2", "--gpus-per-node=3", "--device-memory=1GiB", "--host-memory=2GiB", "--nvme=3TB")
    rates = ("--nvme-bandwidth=4GB/s,5GB/s", "--host-bandwidth=6GB", "--link-bandwidth=7GB/s", "--peak=8.5")
    machine = data(capsys, *SMALL, *sizes, *rates, "--endurance=1.5PB")["hardware"]
    assert (machine["nodes"], machine["ranks_per_node"]) == (2, 3)
    assert [machine[tier]["capacity"] for tier in ("device", "host", "nvme")] == [1 << 30, 2 << 30, 3 * 10**12]
    assert (machine["nvme"]["read"], machine["nvme"]["write"], machine["nvme"]["endurance"]) == (4e9, 5e9, 15 * 10**14)
    assert machine["upload"]["bandwidth"] == machine["download"]["bandwidth"] == 6e9
    assert machine["in_node"]["bandwidth"] == machine["between_nodes"]["bandwidth"] == 7e9
    assert (machine["peak"]["float16"], machine["achievable"]) == (8.5e12, 1.0)


@pytest.mark.usefixtures("one")
def test_hardware_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(
        files(hardware).joinpath("dgx-2.toml").read_text().replace('name = "NVIDIA DGX-2"', 'name = "My box"')
    )
    assert "\nMy box: 1 node x 16 devices" in text(capsys, *SMALL, "--hardware", str(path))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Return the directories that were measured; nothing is, in truth."""
    directories = []

    def measure(*stores: Path) -> hardware.Hardware:
        assert all(store.is_dir() for store in stores)
        directories.extend(stores)
        return replace(hardware.load("rtx-4090"), name="measured here")

    monkeypatch.setattr("zinf_fx.cli.machine.measure_machine", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZINF_STORE", raising=False)
    return directories


@pytest.mark.usefixtures("one")
def test_this_machine(
    capsys: pytest.CaptureFixture[str], measured: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert main(["estimate", *SMALL, "--hardware", "this-machine"]) == 0
    out, err = capsys.readouterr()
    assert "\nmeasured here: 1 node x 1 device" in out
    assert err == "zinf-fx: measuring this machine, which takes some seconds\n"
    assert main(["estimate", *SMALL, "--hardware", "this-machine", "--store", str(tmp_path)]) == 0
    assert measured == [tmp_path / "cache" / "zinf_fx", tmp_path]
    monkeypatch.setenv("ZINF_STORE", f"{tmp_path}:{tmp_path / 'cache'}")
    assert main(["estimate", *SMALL, "--hardware", "this-machine"]) == 0
    assert measured[2:] == [tmp_path, tmp_path / "cache"]


@pytest.mark.usefixtures("one")
def test_more_of_this_machine_needs_a_link(capsys: pytest.CaptureFixture[str], measured: list[Path]):
    options = [*SMALL, "--hardware", "this-machine", "--nodes", "2"]
    assert main(["estimate", *options]) == 2 and measured == []
    assert "this-machine with other nodes or devices needs --link-bandwidth" in capsys.readouterr().err
    assert main(["estimate", *options, "--link-bandwidth", "1GB/s"]) == 0
    assert "measured here: 2 nodes x 1 device" in capsys.readouterr().out


# JSON


@pytest.mark.usefixtures("one")
def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]):
    printed = data(capsys, *SMALL, "--efficiency", "0.5", "--placement", "infinity-nvme")
    assert printed["chosen"] == "infinity-nvme"
    (chosen,) = [prediction for prediction in printed["predictions"] if prediction["preset"] == "infinity-nvme"]
    assert chosen["fits"] and chosen["exceeded"] == [] and chosen["activations"] == "device" and chosen["tiles"] == 1
    assert chosen["flops_serial"] * chosen["serial"] == pytest.approx(chosen["work"])
    assert chosen["serial"] == pytest.approx(sum(chosen["seconds"].values()))
    assert chosen["disk_written"] >= 14 * PARAMETERS  # in blocks
    assert {tuple(need["bandwidths"]) for need in printed["needs"]} == {("0.5",)}


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "no model: give a TARGET, or dimensions (--layers, --hidden, --heads, --batch, --sequence missing)",
        ),
        (SMALL[:-2], "no model: give a TARGET, or dimensions (--sequence missing)"),
        ([*SMALL, "--layers", "0"], "layers='0' is not a whole number of at least 1"),
        ([*SMALL, "--layers=-3"], "layers='-3' is not a whole number of at least 1"),
        ([*SMALL, "--hidden", "25K"], "hidden='25K' is not a whole number of at least 1"),
        ([*SMALL, "--hidden", "9" * 400], "hidden='999"),
        ([*SMALL, "--nodes", "9" * 5000], "nodes='999"),
        ([*SMALL, "--host-memory", "9" * 400], "host-memory='999"),
        ([*SMALL, "--link-bandwidth", "0.0000001"], "link-bandwidth='0.0000001' is not a bandwidth"),
        ([*SMALL, "--peak", "1e-320"], "peak='1e-320' is not a positive number"),
        ([*SMALL, "--heads", "3"], "is no multiple of heads=3"),
        ([*SMALL, "--layers", "2", "--checkpoint-interval", "3"], "checkpoint-interval=3 is more than the 2 layers"),
        ([*SMALL, "--optimizer-bytes", "many"], "optimizer-bytes='many' is not a whole number of at least 1"),
        ([*SMALL, "--efficiency", "half"], "efficiency='half' is not a positive number"),
        ([*SMALL, "--efficiency", "90"], "efficiency=90 is not accepted: give numbers above 0 and below 1"),
        ([*SMALL, "--placement", "zero-9"], "placement='zero-9' is unknown; accepted: 'dp', 'zero-1'"),
        ([*SMALL, "--hardware", "dgx-9"], "hardware 'dgx-9' is unknown; accepted: a100, dgx-2, dgx-a100"),
        ([*SMALL, "--hardware", "gone.toml"], "hardware file gone.toml can't be read"),
        ([*SMALL, "--store", "/tmp"], "store='/tmp' is only for --hardware this-machine"),
        ([*SMALL, "--dtype", "bfloat16"], "NVIDIA DGX-2 has no peak for bfloat16; it has: float16, float32"),
        ([*SMALL, "--nodes", "two"], "nodes='two' is not a whole number of at least 1"),
        ([*SMALL, "--device-memory", "lots"], "device-memory='lots' is not a size"),
        ([*SMALL, "--nvme-bandwidth", "3GB/s,fast"], "nvme-bandwidth='fast' is not a bandwidth"),
        ([*SMALL, "--peak", "-3"], "peak='-3' is not a positive number"),
        (["targets.py:frozen"], "targets.py:frozen trains nothing"),
        (["targets.py:wrong_inputs"], "planning targets.py:wrong_inputs on its example inputs raised"),
        (["targets.py:gone"], "'targets.py' has no 'gone'; its functions: frozen, wrong_inputs"),
        (
            ["targets.py:frozen", "--layers", "2"],
            "the target targets.py:frozen has its own dimensions: leave out layers",
        ),
        (["targets.py:frozen", "--dtype", "float32"], "has its own dimensions: leave out dtype"),
        ([*SMALL, "--optimizer-bytes", "4", "--state-dtype", "8bit"], "has all states, and state-dtype was given"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
):
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("zinf-fx: error: ") and message in err and err.count("\n") == 1, err
