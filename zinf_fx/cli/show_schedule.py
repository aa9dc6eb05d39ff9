"""`zinf-fx show-schedule TARGET`: the plan of a model, without running it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from zinf_fx.cli.target import HELP, TargetError, build
from zinf_fx.config import ACTIVATIONS, PRESETS, Config
from zinf_fx.curve import ASCII, BLOCKS
from zinf_fx.errors import ConfigError, ZinfError
from zinf_fx.explain import describe, plans_of
from zinf_fx.plan.json import to_json
from zinf_fx.plan.schedule import Plan
from zinf_fx.plan.table import WIDTH


def add_to(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "show-schedule",
        help="what computes and what moves, operator by operator",
        description="Prints the plan of a model: what each operator computes, and which tiles are waited for, "
        "all-gathered, uploaded, fetched and released meanwhile. Charts below each table show its memory from "
        "operator to operator: the tiles and gradients in flight, on the device and still in host memory, against "
        "--device-memory, and what the host arena holds, against --host-memory. Needs no store, and no memory for the "
        "model.",
    )
    parser.add_argument("target", metavar="TARGET", help=HELP)
    parser.add_argument("--placement", help=f"auto (default), {', '.join(PRESETS)}, or parameters=nvme,gradients=host")
    parser.add_argument("--prefetch", metavar="A,U,F", help="operators ahead: all-gather, upload, fetch; or none")
    parser.add_argument("--device-memory", metavar="SIZE", help="budget of the device, such as 4GiB")
    parser.add_argument("--host-memory", metavar="SIZE", help="budget of the host tier, such as 16GiB")
    parser.add_argument("--tile", metavar="SIZE", help="largest tile, such as 64MiB; auto (default), or none")
    parser.add_argument(
        "--activations",
        metavar="POLICY",
        help=f"{', '.join(ACTIVATIONS)}, or a number of layers between two checkpoints (default: keep)",
    )
    parser.add_argument("--no-residency", action="store_true", help="move tiles for every use, whatever room there is")
    parser.add_argument("--operators", metavar="A:B", help="print operators A to B - 1 only")
    parser.add_argument("--inference", action="store_true", help="plan a call under torch.no_grad()")
    parser.add_argument("--ascii", action="store_true", help="charts without block characters, as outside terminals")
    parser.add_argument("--json", action="store_true", help="print the plan's data, and memory per operator, as JSON")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the plan. Raises: ZinfError for whatever of the input can't be used."""
    fields = _fields(options)
    requested = Config.of(None, fields)  # bad options are refused before a model is built
    operators = _operators(options.operators)
    model, inputs = build(options.target)
    with torch.no_grad() if options.inference else nullcontext():
        try:
            plans = plans_of(model, inputs, **fields)
        except ZinfError:
            raise
        except Exception as error:
            found = str(error).strip().splitlines() or [""]
            raise TargetError(
                f"planning {options.target} on its example inputs raised {type(error).__name__}: {found[0]}"
            ) from error
    if operators is not None:
        _check_any(options.operators, operators, plans)
    if options.json:
        print(to_json(plans))
    else:
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size((WIDTH, 24)).columns if terminal else WIDTH
        glyphs = BLOCKS if terminal and not options.ascii else ASCII
        print(describe(model, plans, requested, width=width, operators=operators, glyphs=glyphs), end="")


def _fields(options: argparse.Namespace) -> dict[str, object]:
    """The options of Config that were given."""
    given: dict[str, object] = {}
    if options.placement is not None:
        given["placement"] = _mapping(options.placement) if "=" in options.placement else options.placement
    if options.prefetch is not None:
        given["prefetch"] = _prefetch(options.prefetch)
    for name in ("device_memory", "host_memory"):
        if (size := getattr(options, name)) is not None:
            given[name] = size
    if options.tile is not None:
        given["tile"] = None if options.tile == "none" else options.tile
    if options.activations is not None:
        given["activations"] = int(options.activations) if options.activations.isdecimal() else options.activations
    if options.no_residency:
        given["residency"] = False
    return given


def _mapping(text: str) -> dict[str, str]:
    return {state: tier for state, _, tier in (part.partition("=") for part in text.split(","))}


def _prefetch(text: str) -> tuple[int, ...] | None:
    if text == "none":
        return None
    try:
        return tuple(int(distance) for distance in text.split(","))
    except ValueError:
        raise ConfigError(f"prefetch={text!r} is not accepted; give three distances such as 1,2,3, or none") from None


def _operators(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, end = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise ConfigError(f"operators={text!r} is not a range: give A:B, such as 20:40, :40 or 20:")
    wanted = range(int(first or 0), int(end) if end else sys.maxsize)
    if not wanted:
        raise ConfigError(f"operators={text!r} is empty: A:B prints operators A to B - 1, so A must be less than B")
    return wanted


def _check_any(text: str, wanted: range, plans: Sequence[Plan]) -> None:
    """Raises: ConfigError when no graph has an operator of the range."""
    last = max((len(graph.operators) - 1 for plan in plans for graph in plan.graphs), default=0)
    if wanted.start > last:
        raise ConfigError(f"operators={text!r} has none of the plan's, which are 0 to {last}")
