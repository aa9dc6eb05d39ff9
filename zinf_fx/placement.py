"""Where model states live between uses: those of one parameter, and by rules, those of all parameters of a model."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

from zinf_fx.arguments import did_you_mean, shortened
from zinf_fx.errors import ConfigError

if TYPE_CHECKING:  # it takes seconds to import
    import torch

T = TypeVar("T")

Tier = Literal["device", "host", "nvme"]
TIERS: tuple[Tier, ...] = get_args(Tier)
Stage = Literal[0, 1, 2, 3]

PlannedDevice = Literal["cpu", "cuda"]
"""What a plan is for, which need not be here: "cpu" computes in host memory, and "cuda" in memory of its own."""

Patterns = tuple[tuple[str, Tier], ...]
"""Patterns of qualified names, as `fnmatch` has them, each with a tier: the first that matches a name decides."""

Chooser = Callable[[str, "torch.Tensor"], Tier]
"""A function of a parameter's qualified name and of the parameter, which gives its tier."""

# Names of parameters in an error.
_NAMES_SHOWN = 12


@dataclass(frozen=True)
class Placement:
    """The tier each kind of model state lives on between uses, and what is partitioned (ZeRO-Infinity, table 2).

    Attributes:
        stage: the stage of ZeRO, for many ranks. 1: optimizer states are partitioned; 2: gradients, too; 3: parameters,
            too; 0: every rank has everything, as in data parallelism.
    """

    parameters: Tier = "device"
    gradients: Tier = "device"
    optimizer: Tier = "device"
    activations: Tier = "device"
    stage: Stage = 3

    @property
    def on_nvme(self) -> bool:
        """Whether any model state lives there."""
        return "nvme" in (self.parameters, self.gradients, self.optimizer)

    def of(self, name: str, parameter: torch.Tensor) -> Placement:
        """The placement of one parameter, which is this for each."""
        return self


@dataclass(frozen=True)
class PlacementRules:
    """A placement that differs from parameter to parameter.

    Attributes:
        parameters, gradients, optimizer: a tier for all parameters, or what chooses one for each.
        activations, stage: as of `Placement`, for all.
        frozen: the tier of parameters that don't train when they leave; None: as `parameters` says.
    """

    parameters: Tier | Patterns | Chooser = "device"
    gradients: Tier | Patterns | Chooser = "device"
    optimizer: Tier | Patterns | Chooser = "device"
    activations: Tier = "device"
    stage: Stage = 3
    frozen: Tier | None = None

    @property
    def on_nvme(self) -> bool:
        """Whether any model state may live there."""
        return any("nvme" in self.tiers(state) for state in CHOSEN)

    def tiers(self, state: str) -> Collection[Tier]:
        """The tiers on which this state of some parameter may live."""
        rule: Tier | Patterns | Chooser = getattr(self, state)
        tiers: Collection[Tier] = (
            [tier for _, tier in rule] if isinstance(rule, tuple) else TIERS if callable(rule) else [rule]
        )
        return [*tiers, self.frozen] if state == "parameters" and self.frozen is not None else tiers

    def of(self, name: str, parameter: torch.Tensor) -> Placement:
        """The placement of one parameter. Raises: ConfigError where no pattern matches its name."""
        chosen: dict[str, Tier] = {state: self._tier(state, name, parameter) for state in CHOSEN}
        if self.frozen is not None and not parameter.requires_grad:
            chosen["parameters"] = self.frozen
        return Placement(**chosen, activations=self.activations, stage=self.stage)

    def may_have_chosen(self, name: str, parameter: torch.Tensor, placement: Placement) -> bool:
        """Whether a parameter that is stored may have got its placement by these rules: one that trains now may have
        been frozen then, and a function have chosen another tier. What is frozen has a tier for itself alone."""
        if (placement.activations, placement.stage) != (self.activations, self.stage):
            return False
        for state in CHOSEN if parameter.requires_grad else CHOSEN[:1]:
            rule = getattr(self, state)
            accepted = TIERS if callable(rule) else (self._tier(state, name, parameter),)
            if getattr(placement, state) not in accepted and not (
                state == "parameters" and placement.parameters == self.frozen
            ):
                return False
        return True

    def check_model(self, names: Collection[str]) -> None:
        """Check that the patterns are for a model of which all parameters have these names.

        Raises: ConfigError for a name that no pattern matches, and for a pattern that matches no name.
        """
        for state in CHOSEN:
            rule = getattr(self, state)
            if not isinstance(rule, str) and not callable(rule):
                check_patterns(f"placement of {state}", rule, names)

    def _tier(self, state: str, name: str, parameter: torch.Tensor) -> Tier:
        rule: Tier | Patterns | Chooser = getattr(self, state)
        if isinstance(rule, tuple):
            return first_match(f"placement of {state}", rule, name)
        if not callable(rule):
            return rule
        tier = rule(name, parameter)
        if tier not in TIERS:
            raise ConfigError(
                f"placement of {state}: the function gives {tier!r} for parameter '{name}'; accepted: "
                f"{', '.join(TIERS)}"
            )
        return tier


CHOSEN = ("parameters", "gradients", "optimizer")
"""The states whose tier may differ from parameter to parameter."""


def in_common(placements: Mapping[str, Placement]) -> Placement | PlacementRules:
    """What places all these parameters, by name, as they are: for those whose tier is not the most common one, a
    pattern that is their name."""
    first, *differing = dict.fromkeys(placements.values())
    if not differing:
        return first

    def rule(state: str) -> Tier | Patterns:
        tiers = {name: getattr(placement, state) for name, placement in placements.items()}
        (common, count), *_ = Counter(tiers.values()).most_common(1)
        if count == len(tiers):
            return common
        exceptions = ((glob.escape(name), tier) for name, tier in sorted(tiers.items()) if tier != common)
        return (*exceptions, ("*", common))

    return PlacementRules(rule("parameters"), rule("gradients"), rule("optimizer"), first.activations, first.stage)


def parsed_placement(value: Mapping[str, object]) -> Placement | PlacementRules:
    """A placement from a mapping of states to what is said of them. Raises: ConfigError."""
    states = {option.name: None for kind in (Placement, PlacementRules) for option in fields(kind)}
    said: dict[str, Any] = {}
    for state, given in value.items():
        if state not in states:
            meant = did_you_mean(state, states)
            raise ConfigError(f"placement has an unknown state {state!r}; accepted: {', '.join(states)}{meant}")
        said[state] = given
        if state == "stage":
            if type(given) is not int or given not in get_args(Stage):
                raise ConfigError(f"placement has stage {given!r}; accepted: {', '.join(map(str, get_args(Stage)))}")
        elif state in CHOSEN and not isinstance(given, str):
            said[state] = _parsed_rule(state, given)
        elif given not in TIERS and not (state == "frozen" and given is None):
            rules = ", patterns with tiers, or a function of name and parameter" if state in CHOSEN else ""
            meant = did_you_mean(given, TIERS)
            raise ConfigError(f"placement of {state} is {given!r}; accepted: {', '.join(TIERS)}{rules}{meant}")
    by_rules = said.get("frozen") is not None or any(not isinstance(said.get(state, ""), str) for state in CHOSEN)
    if said.get("frozen") is not None and not isinstance(said.get("parameters", ""), str):
        raise ConfigError("placement has a tier for frozen parameters, and rules for all: say it in the rules")
    if not by_rules:
        said.pop("frozen", None)
    return PlacementRules(**said) if by_rules else Placement(**said)


def _parsed_rule(state: str, given: object) -> Patterns | Chooser:
    if callable(given):
        return cast("Chooser", given)  # what it gives is checked for each parameter
    wanted = (
        f"{', '.join(TIERS)}, a list of patterns with tiers such as [('*lora*', 'device'), ('*', 'nvme')], or a "
        "function of name and parameter"
    )
    return parsed_patterns(f"placement of {state}", given, TIERS, wanted)


def parsed_patterns(what: str, given: object, accepted: Sequence[T], wanted: str) -> tuple[tuple[str, T], ...]:
    """Patterns of names, each with one of the accepted values. `what` has them, and `wanted` says what it takes.

    Raises: ConfigError for anything else.
    """
    pairs = given if isinstance(given, (list, tuple)) else ()
    if not pairs or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"{what} is {shortened(given)}; accepted: {wanted}")
    for pattern, value in pairs:
        if not isinstance(pattern, str):
            raise ConfigError(f"{what} has the pattern {shortened(pattern)}, which is no text")
        if value not in accepted:
            meant = did_you_mean(value, [name for name in accepted if isinstance(name, str)])
            raise ConfigError(
                f"{what} has {shortened(value)} for {pattern!r}; accepted: {', '.join(map(repr, accepted))}{meant}"
            )
    return tuple((pattern, value) for pattern, value in pairs)


def check_patterns(
    what: str,
    patterns: Sequence[tuple[str, object]],
    names: Collection[str],
    value: str = "tier",
    tied_names: Collection[str] = (),
) -> None:
    """Check that patterns are for a model of which all parameters have these names, and `tied_names`, where they are
    tied. `what` has the patterns; `value`: what they give, in a word.

    Raises: ConfigError for a name that no pattern matches, and for a pattern that matches no name.
    """
    for name in names:
        first_match(what, patterns, name, names, value)
    for pattern, _ in patterns:
        if not any(fnmatchcase(name, pattern) for name in (*names, *tied_names)):
            raise ConfigError(
                f"{what} has the pattern {pattern!r}, which matches no parameter of the model. {_shown(names)}"
            )


def first_match(
    what: str, patterns: Sequence[tuple[str, T]], name: str, names: Collection[str] = (), value: str = "tier"
) -> T:
    """What stands beside the first pattern that matches a name. Raises: ConfigError where none does."""
    for pattern, given in patterns:
        if fnmatchcase(name, pattern):
            return given
    tried = ", ".join(repr(pattern) for pattern, _ in patterns)
    raise ConfigError(
        f"{what} says nothing of parameter '{name}', which none of its patterns {tried} matches: add "
        f"('*', {value}) as the last one, for all others. {_shown(names)}".rstrip()
    )


def _shown(names: Collection[str]) -> str:
    """A sentence about what parameters there are, if any are known."""
    if not names:
        return ""
    shown = [f"'{name}'" for name in list(names)[:_NAMES_SHOWN]]
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"The parameters are {', '.join(shown)}{more}"
