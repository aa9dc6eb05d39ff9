"""Options of the commands that plan a TARGET, and the plans that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from zinf_fx.cli.target import Built, TargetError, build, said_once
from zinf_fx.config import Config, shortened
from zinf_fx.errors import ConfigError, PlanError, ZinfError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.files.file import load_plan
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.placement.decision import Decision
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.event_graph import Compute

Result = TypeVar("Result")


@dataclass(frozen=True)
class Planned:
    """The plans of a TARGET, one per captured graph.

    `decision`: what was decided where the placement is "auto". `seconds`: of each plan's operators on this machine,
    where they were measured.
    """

    plans: list[Plan]
    decision: Decision | None = None
    seconds: list[Compute] = field(default_factory=list)

    def only(self, what: str) -> Plan:
        """The one plan. Raises: PlanError when there are none, or several."""
        if len(self.plans) != 1:
            raise PlanError(
                f"{what} is for one plan, and the model has {len(self.plans)}: "
                + ("no captured graph uses a parameter" if not self.plans else "remove the graph breaks")
            )
        return self.plans[0]


def fields_of(options: argparse.Namespace) -> dict[str, object]:
    """The options of Config that were given. Raises: ConfigError."""
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
        given["activations"] = _activations(options.activations)
    if options.no_residency:
        given["residency"] = False
    return given


def plans_of_target(
    options: argparse.Namespace, timed: bool = False, hardware: Callable[[], Hardware] | None = None
) -> Planned:
    """The plans of a TARGET: from a plan file, or made of what a factory returns. Raises: ZinfError.

    Args:
        timed: with the seconds of their operators, for which these have to be at hand, on this machine.
        hardware: describes what "auto" decides for; default this machine, at nominal rates.
    """
    fields = fields_of(options)
    requested = Config.of(None, fields)  # bad options are refused before a model is built
    if is_plan_file(options.target):
        others = {
            "inference": options.inference,
            "world_size": options.world_size != 1,
            "replicas": options.replicas != 1,
        }
        if given := ", ".join([*fields, *(name for name, is_given in others.items() if is_given)]):
            raise ConfigError(f"a plan file has its options already: leave {given} out, or give module:factory")
        plan = load_plan(options.target)
        return Planned([plan])
    built = build(options.target)
    seconds: list[Compute] = []
    others: dict[str, object] = {"world_size": options.world_size, "replicas": options.replicas}
    if requested.placement == "auto" and hardware is not None:
        others["hardware"] = hardware()
    plan = partial(plan_model, seconds=seconds if timed else None, **others, **fields)
    planning = planned(options, built, plan)
    return Planned(planning.plans, planning.decision, seconds)


def is_plan_file(target: str) -> bool:
    """Whether a TARGET names a file, rather than module:factory."""
    path = Path(target)
    if target.endswith(".py"):  # of which the factory was forgotten
        return False
    is_file = path.exists() and not path.is_dir()
    return is_file or (target.endswith(".json") and ":" not in target)


def planned(options: argparse.Namespace, built: Built, plan: Callable[..., Result]) -> Result:
    """What `plan` makes of a model and its example inputs. Raises: ZinfError for whatever can't be planned."""
    model, inputs = built
    with said_once(), torch.no_grad() if options.inference else nullcontext():
        try:
            return plan(model, inputs)
        except ZinfError:
            raise
        except Exception as error:
            found = str(error).strip().splitlines() or [""]
            raise TargetError(
                f"planning {options.target} on its example inputs raised {type(error).__name__}: {found[0]}"
            ) from error


def _mapping(text: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for state, _, tier in (part.partition("=") for part in text.split(",")):
        if state in found:
            raise ConfigError(f"placement={shortened(text)} says twice where {state} live")
        found[state] = int(tier) if state == "stage" and tier in ("0", "1", "2", "3") else tier
    return found


def _activations(text: str) -> str | int:
    """A policy, or a number of layers."""
    return int(text) if text.isdecimal() and len(text) < 19 else text


def _prefetch(text: str) -> tuple[int, ...] | None:
    if text == "none":
        return None
    try:
        return tuple(int(distance) for distance in text.split(","))
    except ValueError:
        raise ConfigError(f"prefetch={text!r} is not accepted; give three distances such as 1,2,3, or none") from None
