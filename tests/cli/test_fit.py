"""Whether what is simulated fits the hardware that it is simulated on."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from two_layers import one_layer

import zinf_fx
from zinf_fx.cli import main
from zinf_fx.plan import hardware
from zinf_fx.plan.memory.use import peak_host_bytes
from zinf_fx.plan.plan import Plan

TARGET = str(Path(__file__).parent / "two_layers.py") + ":one_layer"


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Plan]]:
    """Return a plan of everything in host memory, and one of everything on disk."""
    made = {}
    for placement in ("host", "nvme"):
        path = tmp_path_factory.mktemp("plans") / f"{placement}.json"
        plan = zinf_fx.export_plan(*one_layer(), placement=placement, hardware=hardware.load("rtx-4090"))
        plan.save(path)
        made[placement] = path, plan
    return made


@pytest.fixture
def machine(tmp_path: Path):
    """Describe a desktop with other memories."""

    def described(device: str = "24GiB", host: str = "64GiB", nvme: str = "2TB", unified: bool = False) -> str:
        text = files(hardware).joinpath("rtx-4090.toml").read_text()
        for section, old, new in (("device", "24GiB", device), ("host", "64GiB", host), ("nvme", "2TB", nvme)):
            before, header, behind = text.partition(f"[{section}]")
            text = before + header + behind.replace(f'capacity = "{old}"', f'capacity = "{new}"', 1)
        path = tmp_path / "machine.toml"
        path.write_text(f"unified = {str(unified).lower()}\n{text}")
        return str(path)

    return described


@pytest.mark.parametrize(
    ("placement", "memories", "too_small"),
    [
        ("host", {}, []),
        ("nvme", {}, []),
        ("host", {"host": "1MiB"}, ["host"]),
        ("nvme", {"host": "64KiB"}, ["host"]),
        ("host", {"device": "1MiB"}, ["device"]),
        ("nvme", {"nvme": "1MiB"}, ["nvme"]),
        ("nvme", {"device": "1KiB", "host": "1KiB", "nvme": "1KiB"}, ["device", "host", "nvme"]),
        ("host", {"device": "1MiB", "host": "64GiB", "unified": True}, []),
        ("host", {"device": "1MiB", "host": "1MiB", "unified": True}, ["device"]),
    ],
)
def test_a_simulated_step_fits_or_not(
    plans: dict, machine, placement: str, memories: dict, too_small: list[str], capsys: pytest.CaptureFixture
):
    path, plan = plans[placement]
    asked = ["simulate", str(path), "--hardware", machine(**memories)]
    assert main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [tier for tier, memory in printed["memory"].items() if not memory["fits"]] == too_small
    assert printed["fits"] is (not too_small)
    values = max(operator.values for graph in plan.graphs for operator in graph.operators)
    assert printed["memory"]["device"]["values"] == values > 0
    assert printed["memory"]["device"]["needed"] > values
    unified = memories.get("unified", False)
    assert ("host" in printed["memory"]) is not unified
    if not unified:
        assert printed["memory"]["host"]["needed"] == peak_host_bytes(plan)
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert ("It fits." in text) is (not too_small)
    for tier in too_small[:1]:
        assert "It doesn't fit: it needs " in text and f" of {tier} memory" in text
    assert text.count("too much") == len(too_small)


def test_ranks_share_the_memory_of_their_node(tmp_path: Path, capsys: pytest.CaptureFixture):
    path, capacity = tmp_path / "plan.json", hardware.load("dgx-2").host.capacity
    zinf_fx.export_plan(*one_layer(), placement="host", world_size=16).save(path)
    assert main(["simulate", str(path), "--hardware", "dgx-2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["host"]["capacity"] == capacity // 16


def test_a_sweep_says_which_batches_fit(plans: dict, machine, capsys: pytest.CaptureFixture):
    asked = ["simulate", str(plans["nvme"][0]), "--hardware", machine(), "--sweep", "batch=4,400000"]
    assert main([*asked, "--json"]) == 0
    few, many = json.loads(capsys.readouterr().out)
    assert few["fits"] and not many["fits"] and not many["memory"]["device"]["fits"]
    assert main(asked) == 0
    *_, few, many = capsys.readouterr().out.splitlines()
    assert few.endswith(" yes") and many.endswith("not device")


def test_an_exported_plan_takes_the_time_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture):
    given, name = ["--placement", "nvme", "--host-memory", "1MiB", "--world-size", "16"], "dgx-2"
    assert main(["export-plan", TARGET, "-o", str(tmp_path / "plan.json"), "--hardware", name, *given]) == 0
    capsys.readouterr()
    figures = []
    for target in ([str(tmp_path / "plan.json")], [TARGET, *given]):
        assert main(["simulate", *target, "--hardware", name, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert figures[0] == figures[1]
