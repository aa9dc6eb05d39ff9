"""`torch.compile(model, backend="zinf", options={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

import zinf_fx.optim
import zinf_fx.runtime.replacement  # noqa: F401  (registers what takes the place of stored parameters)
from zinf_fx.capture import Capture, input_names
from zinf_fx.config import PRESETS, Config
from zinf_fx.errors import ConfigError
from zinf_fx.given_plan import check_offloaded, options_with, plans_given
from zinf_fx.placement import at_first_call
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.abstract import abstract_inputs
from zinf_fx.runtime.local_parameter import stored_parameter
from zinf_fx.runtime.offload import decided, is_ordinary, offload_parameters
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.stored_tensor import StoredTensor

# Options that the stored states of a model were made with: they can't be others for one of its graphs.
_OF_STATES = (
    "placement",
    "store",
    "process_group",
    "mesh",
    "partition",
    "gradient_reduction",
    "reduce_dtype",
    "collective_timeout",
)


def zinf(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, object] | None = None, **unknown: object
) -> Callable[..., Any]:
    """The backend. Parameters that are not stored yet leave for their tier once the first graph that uses them is
    compiled.

    Options are the fields of `Config`, and `plan`: a file that `Plan.save` wrote, a `Plan`, or a list of these. Then
    graphs are planned as it says, and refused, before anything is changed, if it is for other ones.

    Raises: ConfigError for options that are unknown, or contradict how the model was offloaded; PlanError for a plan of
    another model, PlanFileError for a file that is none.
    """
    if unknown:
        raise ConfigError(f"backend 'zinf' takes options only, found {', '.join(map(repr, unknown))}")
    options = dict(options or {})
    plans = plans_given(options.pop("plan", None))
    options = options_with(plans, options)
    requested = Config.of(None, options)
    plain = [value for value in inputs if is_ordinary(value)]
    if plain:
        _check_ranks_are_given(requested, plain)
        config = decided(requested, plain, lambda ranked: at_first_call(module, inputs, ranked, plain))
        many = Ranks.of(config).size > 1  # whose gradients are to be reduced
        if many or requested.placement != "auto" or config.placement != PRESETS["device"]:
            return _offloaded(module, inputs, config, plans)
    stored = next((p for p in map(stored_parameter, inputs) if p is not None), None)
    config = requested if stored is None else _config_in_force(stored, options, requested, plans)
    # A graph without parameters concerns no other rank, which may have no such graph.
    return Capture(module, inputs, config, plans, groups=Groups() if stored is None else None).compile()


def _check_ranks_are_given(requested: Config, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises: ConfigError for DTensor parameters without a process group: other graphs of the model may have none, and
    would take all ranks for those that hold equal parts."""
    given = requested.process_group is not None or requested.mesh is not None
    if not given and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ConfigError(
            "parameters of the model are DTensors, and one graph of it doesn't tell which ranks train all of them with "
            "equal parts: zinf_fx.offload() the model before compiling it, or give the option process_group"
        )


def _config_in_force(
    stored: StoredTensor, options: dict[str, object], requested: Config, plans: Sequence[Plan]
) -> Config:
    """The options of the stored parameters, of which `stored` is one, with those given to torch.compile in their
    place."""
    config = stored.base.config
    check_offloaded(plans, config)
    # Shards of what many ranks train consist of tiles.
    of_states = (*_OF_STATES, "tile") if stored.storage.ranks.shards > 1 else _OF_STATES
    for name in of_states:
        given = getattr(requested, name)
        if name in options and given not in ("auto", getattr(config, name)):
            raise ConfigError(
                f"options give {name}={options[name]!r}, but the model was offloaded with {getattr(config, name)}: "
                "give it once, where the model is offloaded"
            )
    return Config.of(config, {k: v for k, v in options.items() if k not in of_states})


def _offloaded(
    module: fx.GraphModule, inputs: Sequence[Any], config: Config, plans: Sequence[Plan]
) -> Callable[..., Any]:
    """The graph, compiled for stored parameters, and then its ordinary parameters stored, keeping their identity.

    In this order nothing has left when the graph is refused. Dynamo makes its guards after the backend returns, so they
    are for stored parameters, and the first call computes what later ones do.
    """
    names = input_names(module)
    capture = Capture(module, abstract_inputs(inputs, config, names), config, plans, seen=inputs)
    compiled = capture.compile()
    leaving: dict[str, torch.nn.Parameter] = {}
    for number, (name, value) in enumerate(zip(names, inputs, strict=True)):
        if is_ordinary(value):
            leaving[f"{name} (input {number})" if name in leaving else name] = value
    offload_parameters(leaving, config)
    capture.reserve(inputs)
    return compiled
