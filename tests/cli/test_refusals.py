"""What commands refuse, before anything is built, planned or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from two_layers import one_layer

import zinf_fx
from zinf_fx.cli import main

MODEL = """
def model():
    raise SystemError("the model was built")
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py:model"


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    zinf_fx.export_plan(*one_layer(), placement="nvme").save(path)
    return path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "TARGET", "--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["show-schedule", "TARGET", "--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["export-plan", "TARGET", "-o", "plan.json", "--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["estimate", "TARGET", "--hardware", "abacus"], "hardware 'abacus' is unknown"),
        (["simulate", "TARGET", "--hardware", "gone.toml"], "hardware file gone.toml can't be read"),
        (["simulate", "TARGET", "--accumulate", "0"], "accumulate='0' is not a whole number"),
        (["simulate", "TARGET", "--save-every", "-1"], "save-every="),
        (["simulate", "TARGET", "--keep", "none"], "keep='none' is not a whole number"),
        (["simulate", "TARGET", "--sweep", "batch=x"], "sweep='batch=x' is not accepted"),
        (["export-plan", "TARGET", "-o", "gone/plan.json"], "there is no directory gone"),
        (["show-schedule", "TARGET", "-o", "gone/plan.txt"], "there is no directory gone"),
        (["export-plan", "TARGET", "-o", "."], "is a directory: give the name of a file in it"),
        (["export-plan", "TARGET", "-o", "model.py"], "is the file that export-plan reads"),
        (["show-schedule", "TARGET", "-o", "./model.py"], "is the file that show-schedule reads"),
        (["show-schedule", "TARGET", "--operators", "3"], "is not a range"),
    ],
)
def test_options_are_refused_before_a_model_is_built(
    target: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(Path(target).parent)
    assert main([target if argument == "TARGET" else argument for argument in arguments]) == 2
    assert message in capsys.readouterr().err
    assert Path("model.py").read_text() == MODEL and os.listdir() == ["model.py"]


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("form", ["table", "html"])
def test_a_plan_is_not_written_over_by_its_picture(
    plan_text: str, tmp_path: Path, link, form: str, capsys: pytest.CaptureFixture
):
    plan, output = tmp_path / "plan.json", tmp_path / "picture"
    plan.write_text(plan_text)
    if link is None:
        output = plan
    else:
        link(plan, output)
    assert main(["show-schedule", str(plan), "--format", form, "-o", str(output)]) == 2
    assert "is the file that show-schedule reads: write to another one" in capsys.readouterr().err
    assert plan.read_text() == plan_text


def test_a_description_of_hardware_is_not_written_over(target: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    machine = tmp_path / "machine.toml"
    machine.write_text("name = 'mine'")
    assert main(["show-schedule", target, "--hardware", str(machine), "-o", str(machine)]) == 2
    assert "is the file that show-schedule reads" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_at_once(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # whoever runs the tests may write anywhere
    assert main(["export-plan", target, "-o", str(Path(target).parent / "plan.json")]) == 2
    assert "can't be written: permission is denied" in capsys.readouterr().err
