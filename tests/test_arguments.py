"""What public functions are given by mistake, and what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_fx
from zinf_fx.arguments import did_you_mean
from zinf_fx.cli.arguments import parser
from zinf_fx.errors import ConfigError, OptimizerError
from zinf_fx.plan import hardware

NET = nn.Linear(4, 4)

TAKE_A_MODEL: dict[str, Callable[[object, str], object]] = {
    "offload": lambda model, path: zinf_fx.offload(model, placement="host"),
    "stats": lambda model, path: zinf_fx.stats(model),
    "record": lambda model, path: zinf_fx.record(model).__enter__(),
    "explain": lambda model, path: zinf_fx.explain(model, torch.ones(2, 4)),
    "export_plan": lambda model, path: zinf_fx.export_plan(model, (torch.ones(2, 4),)),
    "attach_base": lambda model, path: zinf_fx.attach_base(model, path),
    "load_safetensors": lambda model, path: zinf_fx.load_safetensors(model, path),
    "export_safetensors": lambda model, path: zinf_fx.export_safetensors(model, path),
    "CheckpointManager": lambda model, path: zinf_fx.CheckpointManager(path, model),
}


@pytest.mark.parametrize("function", TAKE_A_MODEL)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([NET, NET], r"found a list: call it for each, or give torch\.nn\.ModuleList"),
        (list(NET.parameters()), r"found a list: give a torch\.nn\.Module"),
        (NET.state_dict(), r"found a OrderedDict: give a torch\.nn\.Module"),
        (nn.Linear, r"found the class Linear: give a model, such as Linear\(\.\.\.\)"),
        ("model.pt", r"found the path 'model\.pt': give the model"),
        (None, r"found a NoneType: give a torch\.nn\.Module"),
    ],
)
def test_what_is_no_model(function: str, given: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{function}\(\) takes a model, {message}"):
        TAKE_A_MODEL[function](given, str(tmp_path))
    assert all(type(parameter) is nn.Parameter for parameter in NET.parameters()) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("attach_base", lambda: zinf_fx.attach_base(NET, 3)),
        ("load_safetensors", lambda: zinf_fx.load_safetensors(NET, None)),
        ("export_safetensors", lambda: zinf_fx.export_safetensors(NET, NET)),
        ("save_checkpoint", lambda: zinf_fx.save_checkpoint(NET, "runs")),
        ("load_checkpoint", lambda: zinf_fx.load_checkpoint(NET, "runs")),
        ("CheckpointManager", lambda: zinf_fx.CheckpointManager(NET, "runs")),
        ("load_plan", lambda: zinf_fx.load_plan(3)),
    ],
)
def test_what_is_no_path(function: str, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=rf"{function}\(\) takes a path, found a \w+: give a str or a pathlib\.Path"):
        call()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ds_config.json", r"found str 'ds_config\.json': files with options aren't read; give options by name"),
        (Path("options.toml"), r"found PosixPath 'options\.toml': files with options aren't read"),
        ({"placement": "host"}, r"found dict: give its entries by name, as \*\*options"),
        ({"zero_optimization": {"stage": 3}}, "found dict: its entries are no options of zinf_fx"),
        (NET, "found Linear: give one, or options by name"),
    ],
)
def test_what_is_no_config(config: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zinf_fx.offload(nn.Linear(4, 4), config)
    with pytest.raises(ConfigError, match=message), zinf_fx.offloading(config):
        pass
    with pytest.raises(ConfigError, match=message):
        zinf_fx.explain(NET, torch.ones(2, 4), config=config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zinf_fx.export_plan(NET, None), "example_inputs is a NoneType: give a tuple"),
        (lambda: zinf_fx.export_plan(NET, "x"), "example_inputs is a str: give a tuple"),
        (lambda: zinf_fx.export_plan(NET, (torch.ones(2, 4),), hardware="a100"), "hardware is a str: give a descr"),
        (
            lambda: torch.compile(NET, backend="zinf", options=zinf_fx.Config(placement="host"))(torch.ones(2, 4)),
            "options is a Config: give a dict",
        ),
        (lambda: zinf_fx.CheckpointManager("runs", NET, every_steps="10"), "every_steps='10' is not accepted"),
    ],
)
def test_other_mistakes(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def _config(**options: object) -> Callable[[], object]:
    return lambda: zinf_fx.Config.of(None, options)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (_config(plasement="nvme"), "placement"),
        (_config(devicememory="1GiB"), "device_memory"),
        (_config(microbatches=2), "micro_batches"),
        (_config(placement="infinity_nvme"), "infinity-nvme"),
        (_config(placement="zero3"), "zero-3"),
        (_config(placement={"parameters": "NVMe"}), "nvme"),
        (_config(placement={"optimiser": "nvme"}), "optimizer"),
        (_config(placement={"gradients": [("*", "hosts")]}), "host"),
        (_config(activations="recomputed"), "recompute"),
        (_config(compute="induktor"), "inductor"),
        (_config(frozen_dtype="nf-4"), "nf4"),
        (lambda: hardware.load("rtx4090"), "rtx-4090"),
        (lambda: hardware.load("this_machine"), "this-machine"),
        (lambda: zinf_fx.optim.AdamW(nn.Linear(2, 2).parameters(), state_dtype="8bits"), "8bit"),
        (lambda: zinf_fx.explain(NET, torch.ones(2, 4), state_dtype="8-bit"), "8bit"),
    ],
)
def test_what_was_meant_is_asked(call: Callable[[], object], meant: str) -> None:
    with pytest.raises((ConfigError, OptimizerError), match=rf"\. Did you mean '{meant}'\?$"):
        call()


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ("simulat x", "Did you mean 'simulate'?\n"),
        ("show_schedule x", "Did you mean 'show-schedule'?\n"),
        ("checkpoint verfy x", "Did you mean 'verify'?\n"),
        ("show-schedule x --format jsn", "Did you mean 'json'?\n"),
        ("show-schedule x --placment nvme", "unrecognized arguments: --placment nvme. Did you mean '--placement'?\n"),
        ("simulate x --hardwre=a100", "--hardwre=a100. Did you mean '--hardware'?\n"),
        ("simulate x --device_memory 1GiB", "--device_memory 1GiB. Did you mean '--device-memory'?\n"),
        ("estimate --verbosely", "unrecognized arguments: --verbosely\n"),
    ],
)
def test_what_was_meant_is_asked_on_the_command_line(arguments: str, asked: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit:
        parser().parse_args(arguments.split())
    assert exit.value.code == 2 and asked in capsys.readouterr().err


def test_nothing_is_asked_where_nothing_is_near() -> None:
    assert did_you_mean("zebra", ["host", "nvme"]) == did_you_mean(3, ["3"]) == ""
