"""The placement of each parameter of a model: by the rules that the options have, or as it is stored already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.placement import Placement, PlacementRules, in_common
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import LocalParameter, stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def placed(config: Config, placement: Placement | PlacementRules | None) -> Config:
    """`config`, with `placement` in the place of its own, if there is one."""
    return config if placement is None else Config.of(config, {"placement": placement})


def configs_of(config: Config, parameters: Mapping[str, torch.Tensor]) -> dict[str, Config]:
    """By name, the options of each of some parameters, with the placement that is for it; equal ones are one object.

    Raises: ConfigError for a parameter that the rules say nothing of, or that many ranks can't have there.
    """
    if not isinstance(config.placement, PlacementRules):
        return dict.fromkeys(parameters, config)
    made: dict[Placement, Config] = {}
    found = {}
    for name, parameter in parameters.items():
        placement = config.placement.of(name, parameter)
        if placement not in made:
            made[placement] = placed(config, placement)
            check_stage(made[placement])
        found[name] = made[placement]
    return found


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


def check_rules(config: Config, parameters: Mapping[str, torch.Tensor]) -> None:
    """Check that rules are for the model that has these parameters, and no others. Raises: ConfigError."""
    if isinstance(config.placement, PlacementRules):
        config.placement.check_model(parameters)


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
