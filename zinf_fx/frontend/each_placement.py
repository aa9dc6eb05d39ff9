"""The placement of each parameter of a model: by the rules that the options have, or as it is stored already."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

import torch

from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.config import Config, FrozenDtype, RankOptions
from zinf_fx.errors import ConfigError
from zinf_fx.placement import Placement, PlacementRules, in_common
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import LocalParameter, stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Options that the stored states of a model were made with: they can't be others for one of its graphs.
_OF_STATES = ("placement", "store", *RankOptions.__annotations__)


def placed(config: Config, placement: Placement | PlacementRules | None) -> Config:
    """`config`, with `placement` in the place of its own, if there is one."""
    return config if placement is None else Config.of(config, {"placement": placement})


def configs_of(config: Config, parameters: Mapping[str, torch.Tensor]) -> dict[str, Config]:
    """By name, the options of each of some parameters, with the placement and the format that are for it; equal ones
    are one object.

    Raises: ConfigError for a parameter that the rules say nothing of, or that many ranks can't have there.
    """
    if not isinstance(config.placement, PlacementRules) and not isinstance(config.frozen_dtype, tuple):
        return dict.fromkeys(parameters, config)
    made: dict[tuple[Placement | str, FrozenDtype | None], Config] = {}
    found = {}
    for name, parameter in parameters.items():
        placement = config.placement if config.placement == "auto" else config.placement.of(name, parameter)
        own = placement, config.frozen_dtype_of(name)
        if own not in made:
            made[own] = Config.of(config, dict(zip(("placement", "frozen_dtype"), own, strict=True)))
            check_stage(made[own])
        found[name] = made[own]
    return found


def left_as_they_are(config: Config, parameters: Mapping[str, torch.Tensor], tables: Collection[int]) -> set[int]:
    """The ids of parameters that no format is meant for: `tables`, which are looked up by rows, and those, by name, for
    which patterns have none. Raises: ConfigError."""
    if not isinstance(config.frozen_dtype, tuple):
        return {*tables}
    return {*tables, *(id(one) for name, one in parameters.items() if config.frozen_dtype_of(name) is None)}


def check_stage(config: Config) -> None:
    """Raises: ConfigError for parameters on NVMe that every rank is to have all of."""
    placement = config.placement
    if placement == "auto" or placement.stage == 3 or Ranks.of(config).size == 1:
        return
    if isinstance(placement, Placement) and placement.parameters == "nvme":
        raise ConfigError(
            f"stage {placement.stage} keeps every parameter on every rank, and the placement has parameters on nvme: "
            "stage 3 partitions them (or place them on 'host' or 'device')"
        )


def check_rules(config: Config, parameters: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Check that rules are for the model that has these parameters, and no others. Raises: ConfigError."""
    tied = by_plain_name(model, model.named_parameters(remove_duplicate=False))
    config.check_names(parameters, tied)


def options_of_states(stored: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    """The options that stored parameters, by name, were made with, and that can't be others for a graph of theirs."""
    # Shards of what many ranks train consist of tiles.
    return (*_OF_STATES, "tile") if next(iter(stored.values())).storage.share.ranks.shards > 1 else _OF_STATES


def options_given(config: Config | None, fields: Mapping[str, object]) -> set[str]:
    """The names of the options that a caller chose: those given by name, and a `config`'s that differ from the
    defaults."""
    default, own = Config(), Config.of(config, {})
    names = (field.name for field in dataclasses.fields(Config))
    return {*fields, *(name for name in names if getattr(own, name) != getattr(default, name))}


def check_not_contradicted(
    requested: Config, given: Collection[str], stored: Mapping[str, StoredTensor], hint: str
) -> None:
    """Raises: ConfigError where a `given` option is another one than that which a stored parameter was offloaded with,
    and `hint` says what to do."""
    for name, one in stored.items():
        for option in sorted(given):
            asked, found = getattr(requested, option), getattr(one.base.config, option)
            asked = requested.frozen_dtype_of(name) if option == "frozen_dtype" else asked
            if contradicted_by(requested, name, one) if option == "placement" else asked not in ("auto", found):
                raise ConfigError(
                    f"{option}={asked} was asked for, but parameter '{name}' was offloaded with {found}: {hint}"
                )


def contradicted_by(requested: Config, name: str, stored: StoredTensor) -> Placement | None:
    """The placement of a stored parameter of this name, if it isn't the one that is requested."""
    found, asked = stored.base.config.placement, requested.placement
    if not isinstance(stored, (torch.nn.Parameter, LocalParameter)):  # such as a gradient, which is like its parameter
        return None
    if isinstance(asked, PlacementRules):
        return None if asked.may_have_chosen(name, stored, found) else found
    return None if asked in ("auto", found) else found


def placement_of_all(
    stored: Mapping[str, StoredTensor], asked: Placement | PlacementRules | None = None
) -> Placement | PlacementRules | None:
    """What places all stored tensors, by name, as they are placed, or as `asked` says; None: there are none."""
    if not stored:
        return asked
    own = {name: one.base.config.placement for name, one in stored.items()}
    return in_common(own if asked is None else {name: asked.of(name, one) for name, one in stored.items()})


def stored_among(named: Iterable[tuple[str, object]]) -> dict[str, StoredTensor]:
    """By name, what stands for those that are stored: see `stored_parameter`."""
    return {name: stored for name, one in named if (stored := stored_parameter(one)) is not None}
