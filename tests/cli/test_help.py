"""`zinf-fx --help`, which is there at once: nothing that it prints takes PyTorch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from zinf_fx.cli.arguments import parser

COMMANDS = ("show-schedule", "export-plan", "simulate", "estimate", "checkpoint", "bench-io", "doctor", "clean")

PRINT_HELP = """
import sys
from zinf_fx.cli import main
for arguments in ([], *([command] for command in sys.argv[1:])):
    try:
        main([*arguments, "--help"])
    except SystemExit as exit:
        assert exit.code == 0
assert "torch" not in sys.modules, "help imports torch"
"""

USE_LATER = """
import sys
import zinf_fx
from zinf_fx.config import Config
assert "lightning" in dir(zinf_fx.integrations) and not hasattr(zinf_fx.integrations, "nothing")
assert "torch" not in sys.modules and zinf_fx.Config() == Config()
assert zinf_fx.integrations.distributed_checkpoint.Stager()
assert zinf_fx.integrations.accelerate.Accelerator and "transformers" not in sys.modules
import torch
import zinf_fx.frontend.backend
assert "zinf_fx.optim" in sys.modules
import zinf_fx.frontend.explain
from zinf_fx.observe.stats import Stats
assert zinf_fx.explain is sys.modules["zinf_fx.frontend.explain"].explain and callable(zinf_fx.stats)
from zinf_fx import *
assert optim is sys.modules["zinf_fx.optim"] and explain is zinf_fx.explain
assert set(zinf_fx.__all__) <= set(dir(zinf_fx)) and not hasattr(zinf_fx, "nothing")
assert "zinf" in torch._dynamo.list_backends(exclude_tags=())
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_of_every_command_takes_no_torch() -> None:
    printed = run(PRINT_HELP, *COMMANDS)
    assert all(f"usage: zinf-fx {command}" in printed for command in COMMANDS)
    assert "COMMAND" in printed and "this-machine" in printed and "infinity-nvme" in printed


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("show-schedule x", "zinf-fx show-schedule [OPTION ...] TARGET"),
        ("checkpoint list x", "zinf-fx checkpoint list"),
    ],
)
def test_an_unknown_option_is_refused_with_the_usage_of_the_command(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        parser().parse_args([*command.split(), "--placment", "nvme"])
    assert raised.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage}"), said
    assert "unrecognized arguments: --placment nvme" in said


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parser().parse_args(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"zinf-fx {version('zinf_fx')}\n"


def test_examples_in_the_help_are_accepted() -> None:
    (commands,) = parser()._subparsers._group_actions
    examples = [line.split() for command in commands.choices.values() for line in command.epilog.splitlines()[1:]]
    assert {words[1] for words in examples} == set(COMMANDS)
    for program, *words in examples:
        assert program == "zinf-fx" and parser().parse_args(words)


def test_public_names_are_there_when_they_are_used() -> None:
    """The functions, where modules have the same names; and with the backend, what optimizers need."""
    run(USE_LATER)
