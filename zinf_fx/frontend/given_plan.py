"""The backend's option `plan`: which plans were given, which options follow from them, and whether they are for the
model at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, PlanError
from zinf_fx.frontend.parameters import placed
from zinf_fx.passes.ir.fingerprint import check_same
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.codec import shared_options
from zinf_fx.plan.files.file import load_plan
from zinf_fx.plan.plan import Fingerprint, Plan
from zinf_fx.plan.schedule import GraphKind
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# What decides where bytes lie from the offload on: it can't be another one when the graph is compiled.
_OF_THE_OFFLOAD = ("placement", "host_memory", "chunk")


def plans_given(option: object) -> list[Plan]:
    """The plans of the option: a `Plan`, a file's path, or several of these, such as one for training and one for
    evaluation. None: there are none.

    Raises: PlanFileError; ConfigError for anything else, and for plans with different options.
    """
    given = option if isinstance(option, (list, tuple)) else [] if option is None else [option]
    plans = []
    for source in given:
        if not isinstance(source, (Plan, str, os.PathLike)):
            raise ConfigError(
                f"plan={source!r} is not accepted; accepted: a zinf_fx.Plan, a file's path, or a list of these"
            )
        plans.append(source if isinstance(source, Plan) else load_plan(source))
    for plan in plans:
        if plan.fingerprint is None:
            raise ConfigError("the plan given has no fingerprint of a model: make it with zinf_fx.export_plan")
        if differing := _first_difference(plans[0].config, plan.config):
            raise ConfigError(f"the plans given differ in {differing}: one job has one set of options")
    return plans


def options_with(plans: Sequence[Plan], options: Mapping[str, object]) -> dict[str, object]:
    """`options`, and in the place of those not given the plan's. Raises: ConfigError where they contradict it."""
    if not plans:
        return dict(options)
    planned = plans[0].config
    requested = Config.of(planned, options)
    names = shared_options()
    if isinstance(requested.placement, PlacementRules):  # what they choose is compared with the plan's tiles
        names.remove("placement")
    if differing := _first_difference(planned, requested, names):
        raise ConfigError(f"an option contradicts the plan: {differing}. Leave it out, or export a plan with it")
    return {**{name: getattr(planned, name) for name in shared_options()}, **options}


def check_offloaded(plans: Sequence[Plan], stored: Mapping[str, StoredTensor]) -> None:
    """Check the options that stored parameters, by name, have since their offload. Raises: PlanError naming the first
    that differs from the plan's."""
    if not plans or not stored:
        return
    config = plans[0].config
    assert config.placement != "auto"
    pairs = ((config.placement.of(name, parameter), parameter.base.config) for name, parameter in stored.items())
    for planned, own in dict.fromkeys(pairs):
        if differing := _first_difference(placed(config, planned), own, _OF_THE_OFFLOAD):
            raise PlanError(
                f"the plan is for a model that was offloaded with other options: {differing}. "
                "zinf_fx.offload(model, plan.config, store=...) takes those of a plan"
            )


def plan_for(plans: Sequence[Plan], fingerprint: Fingerprint, kind: GraphKind, groups: Groups) -> Plan:
    """The plan among those given that is for the captured graph, run by `groups` of ranks.

    Raises: PlanError naming the first difference of the first one.
    """
    of_kind = [plan for plan in plans if any(graph.kind == kind for graph in plan.graphs)]
    if not of_kind:
        what = "trained" if kind == "forward" else "called without gradients"
        raise PlanError(
            f"the model is {what}, and no plan given is for that: export one for such a call, and give both"
        )
    differences = []
    for plan in of_kind:
        try:
            with about_given(plan):
                made_for = Groups(plan.replicas, plan.world_size // plan.replicas)
                if made_for != groups:
                    raise PlanError(f"it was made for {made_for}, and here are {groups}")
                assert plan.fingerprint is not None
                check_same(plan.fingerprint, fingerprint)
            return plan
        except PlanError as error:
            differences.append(error)
    raise differences[0]


@contextmanager
def about_given(plan: Plan) -> Iterator[None]:
    """Say of a PlanError inside that it is about a given plan."""
    try:
        yield
    except PlanError as error:
        raise PlanError(
            f"the plan given ({', '.join(graph.kind for graph in plan.graphs)}) is not for this model as it is called: "
            f"{error}. Export a plan for it, or leave the option 'plan' out"
        ) from error


def _first_difference(plan: Config, config: Config, names: Sequence[str] | None = None) -> str | None:
    for name in names or shared_options():
        theirs, ours = getattr(plan, name), getattr(config, name)
        if theirs != ours and isinstance(theirs, Placement) and isinstance(ours, Placement):
            for field in fields(theirs):
                if (there := getattr(theirs, field.name)) != (here := getattr(ours, field.name)):
                    return f"placement of {field.name} is {there!r} in the plan, and {here!r} here"
        if theirs != ours:
            return f"{name} is {theirs!r} in the plan, and {ours!r} here"
    return None
