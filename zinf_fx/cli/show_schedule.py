"""`zinf-fx show-schedule TARGET`: the plan of a model, or of a plan file, without running it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zinf_fx.cli.arguments import DEFAULT_HARDWARE
from zinf_fx.cli.machine import described
from zinf_fx.cli.planning import check_output, plans_of_target
from zinf_fx.config import shortened
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.explain import Planning
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.show.chrome import planned_process, to_chrome
from zinf_fx.plan.show.curve import ASCII, BLOCKS
from zinf_fx.plan.show.dot import to_dot
from zinf_fx.plan.show.html import to_html
from zinf_fx.plan.show.json import to_json
from zinf_fx.plan.show.table import WIDTH
from zinf_fx.plan.simulation.simulate import simulate_plan

_IN_PARTS = ("table", "dot")


def run(options: argparse.Namespace) -> None:
    """Print the plan. Raises: ZinfError for whatever of the input can't be used."""
    operators = _operators(options.operators)
    if operators is not None and options.format not in _IN_PARTS:
        raise ConfigError(
            f"operators={options.operators!r} is for {' and '.join(_IN_PARTS)}: {options.format} shows all"
        )
    if options.output is not None:
        check_output(options)
    hardware = described(options.hardware or DEFAULT_HARDWARE)
    target = plans_of_target(options, hardware=hardware if options.hardware else None)
    if operators is not None:
        _check_any(options.operators, operators, target.plans)
    text = _text(options, target, operators, hardware)
    if options.output is None:
        print(text, end="")
        return
    try:
        Path(options.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.output} can't be written: {error}") from error


def _text(
    options: argparse.Namespace, target: Planning, operators: range | None, hardware: Callable[[], Hardware]
) -> str:
    if options.format == "json":
        return to_json(target.plans, target.decision, target.divisions) + "\n"
    if options.format == "table":
        terminal = sys.stdout.isatty() and options.output is None
        width = shutil.get_terminal_size((WIDTH, 24)).columns if terminal else WIDTH
        glyphs = BLOCKS if terminal and not options.ascii else ASCII
        return target.text(width=width, operators=operators, glyphs=glyphs)
    plan = target.only(f"--format {options.format}")
    if options.format == "dot":
        return to_dot(plan, operators)
    machine = hardware().with_ranks(plan.world_size)
    simulation = simulate_plan(plan, machine)
    if options.format == "chrome":
        return to_chrome(planned_process(plan, simulation, machine)) + "\n"
    return to_html(plan, simulation, machine, f"Plan of {Path(options.target).name}")


def _operators(text: str | None) -> range | None:
    if text is None:
        return None
    first, colon, end = text.partition(":")
    if not colon or not all(part == "" or (part.isdecimal() and len(part) < 19) for part in (first, end)):
        raise ConfigError(f"operators={shortened(text)} is not a range: give A:B, such as 20:40, :40 or 20:")
    wanted = range(int(first or 0), int(end) if end else sys.maxsize)
    if not wanted:
        raise ConfigError(f"operators={text!r} is empty: A:B prints operators A to B - 1, so A must be less than B")
    return wanted


def _check_any(text: str, wanted: range, plans: Sequence[Plan]) -> None:
    """Raises: ConfigError when no graph has an operator of the range."""
    last = max((len(graph.operators) - 1 for plan in plans for graph in plan.graphs), default=0)
    if wanted.start > last:
        raise ConfigError(f"operators={text!r} has none of the plan's, which are 0 to {last}")
