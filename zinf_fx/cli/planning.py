"""Options of the commands that plan a TARGET, and the plans that they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from zinf_fx.cli.target import build, running
from zinf_fx.config import Config, shortened
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.explain import Planning, plan_model
from zinf_fx.plan.files.file import load_plan
from zinf_fx.plan.hardware import Hardware


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options of Config that were given. Raises: ConfigError."""
    given = {name: read(text) for name, read in _READ.items() if (text := getattr(options, name)) is not None}
    return given | ({"residency": False} if options.no_residency else {})


def plans_of_target(
    options: argparse.Namespace, timed: bool = False, hardware: Callable[[], Hardware] | None = None
) -> Planning:
    """The plans of a TARGET: from a plan file, or as `plans_of_model` makes them. Raises: ZinfError."""
    if not is_plan_file(options.target):
        return plans_of_model(options, timed, hardware)
    defaults = {"inference": False, **_PLANNED}
    if given := [
        *fields_of(options),
        *(name for name, default in defaults.items() if getattr(options, name) != default),
    ]:
        named = ", ".join(given)
        raise ConfigError(f"a plan file has its options already: leave {named} out, or give module:factory")
    return Planning([load_plan(options.target)])


def plans_of_model(
    options: argparse.Namespace, timed: bool = False, hardware: Callable[[], Hardware] | None = None
) -> Planning:
    """The plans of what a TARGET's factory returns. Raises: ZinfError.

    Args:
        timed: with the seconds of their operators, for which these have to be at hand, on this machine.
        hardware: describes what "auto" decides for, and what choices are weighed for; default this machine.
    """
    fields = fields_of(options)
    Config.of(None, fields)  # bad options are refused before a model is built
    built = build(options.target)
    with planning_target(options) as ranks:
        return plan_model(*built, timed=timed, hardware=hardware and hardware(), **ranks, **fields)


def check_output(options: argparse.Namespace) -> None:
    """Raises: ConfigError when the file to write is one that the command reads, or can't be written, before anything is
    planned for it."""
    output = Path(options.output)
    for read in (options.target, options.target.rpartition(":")[0], options.hardware):
        if read and output.exists() and Path(read).exists() and output.samefile(read):
            raise ConfigError(f"output={options.output} is the file that {options.command} reads: write to another one")
    if not output.parent.is_dir():
        raise ConfigError(f"output={options.output} can't be written: there is no directory {output.parent}")
    if output.is_dir():
        raise ConfigError(f"output={options.output} is a directory: give the name of a file in it")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError(f"output={options.output} can't be written: permission is denied")


def is_plan_file(target: str) -> bool:
    """Whether a TARGET names a file, rather than module:factory."""
    path = Path(target)
    if target.endswith(".py"):  # of which the factory was forgotten
        return False
    is_file = path.exists() and not path.is_dir()
    return is_file or (target.endswith(".json") and ":" not in target)


@contextmanager
def planning_target(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A block that plans the TARGET for the ranks, the optimizer's states and the device that it gets.

    Raises: ZinfError for whatever can't be planned.
    """
    doing = f"planning {options.target} on its example inputs"
    with running(doing), torch.no_grad() if options.inference else nullcontext():
        yield {name: getattr(options, name) for name in _PLANNED}


def _placement(text: str) -> str | dict[str, object]:
    if "=" not in text:
        return text
    placement: dict[str, object] = {}
    for state, _, tier in (part.partition("=") for part in text.split(",")):
        if state in placement:
            raise ConfigError(f"placement={shortened(text)} says twice where {state} live")
        if ":" in tier:
            rules = (rule.rpartition(":") for rule in tier.split(";"))
            placement[state] = [(pattern, tier_of) for pattern, _, tier_of in rules]
        else:
            placement[state] = int(tier) if state == "stage" and tier in ("0", "1", "2", "3") else tier
    return placement


def _frozen(text: str) -> str | list[tuple[str, str | None]]:
    if ":" not in text:
        return text
    rules = (rule.rpartition(":") for rule in text.split(";"))
    return [(pattern, None if form == "none" else form) for pattern, _, form in rules]


def _prefetch(text: str) -> tuple[int, ...] | None:
    if text == "none":
        return None
    try:
        return tuple(int(distance) for distance in text.split(","))
    except ValueError:
        raise ConfigError(f"prefetch={text!r} is not accepted; give three distances such as 1,2,3, or none") from None


def _number_or_word(text: str) -> int | str:
    """The value of an option that accepts words, too: `Config` knows which."""
    return int(text) if text.isdecimal() and len(text) < 19 else text


# Of what is planned besides the options of Config, with what each is where it isn't given.
_PLANNED = {"world_size": 1, "replicas": 1, "state_dtype": None, "master_dtype": None, "device": None}

# What makes an option's value of its text.
_READ: dict[str, Callable[[str], object]] = {
    "placement": _placement,
    "prefetch": _prefetch,
    "device_memory": str,
    "host_memory": str,
    "tile": lambda text: None if text == "none" else text,
    "pack": lambda text: None if text == "none" else text,
    "frozen_dtype": _frozen,
    "compute": str,
    "micro_batches": _number_or_word,
    "micro_batch_group": _number_or_word,
    "activations": _number_or_word,
}
