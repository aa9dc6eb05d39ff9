"""Plans of models that don't run: `explain`, and what it is made of.

A model is planned through a twin: the same modules, whose parameters are stored tensors without bytes. The twin is
captured as `torch.compile(model, backend="zinf")` would capture the model, but what is compiled computes nothing. So
planning needs no store, no values and next to no memory, and a model on the meta device is enough.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map, tree_map_only

from zinf_fx.config import LARGEST, PRESETS, Config, shortened
from zinf_fx.errors import ConfigError, PlanError, StoredTensorError, ZinfError
from zinf_fx.plan.event_graph import Compute
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import Plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.plan.table import render
from zinf_fx.runtime.abstract import abstract_parameter
from zinf_fx.runtime.local_parameter import stored_parameter
from zinf_fx.runtime.offload import decided


def explain(
    model: torch.nn.Module,
    *example_inputs: Any,
    config: Config | None = None,
    world_size: int = 1,
    replicas: int = 1,
    **fields: object,
) -> str:
    """The plan of `model(*example_inputs)` as text: a table per graph, and a summary.

    Forward and backward, or inference alone under `torch.no_grad()`, for `world_size` ranks, in `replicas` groups.
    Options and errors are those of `plans_of`.
    """
    plans = plans_of(model, example_inputs, config, world_size=world_size, replicas=replicas, **fields)
    return describe(model, plans, Config.of(config, fields))


def describe(model: torch.nn.Module, plans: Sequence[Plan], requested: Config, **layout: Any) -> str:
    """The text of the plans made for `model` as `requested`. `layout`: arguments of `plan.table.render`."""
    if not plans:
        return "No captured graph of the model uses a parameter, so nothing is moved.\n"
    parts = []
    if requested.placement == "auto" and not any(stored_parameter(p) is not None for p in model.parameters()):
        parts.append("The placement is what 'auto' decided for this model and this machine.")
        if plans[0].config.placement == PRESETS["device"]:
            parts[0] += (
                " Everything fits: the model\nwould run as ordinary PyTorch. Ask for another placement to see one."
            )
    if len(plans) > 1:
        parts.append(f"The model is captured as {len(plans)} graphs (graph breaks); each has a plan of its own.")
    for number, plan in enumerate(plans, start=1):
        title = f"GRAPH {number} OF {len(plans)}\n\n" if len(plans) > 1 else ""
        parts.append(title + render(plan, **layout))
    return "\n\n".join(parts)


def plans_of(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config | None = None,
    rates: Rates | None = None,
    world_size: int = 1,
    replicas: int = 1,
    seconds: list[Compute] | None = None,
    **fields: object,
) -> list[Plan]:
    """The plans of `model(*example_inputs)` (a mapping: keyword arguments) for `world_size` ranks, one per graph that
    uses parameters. What is partitioned is so within each of `replicas` groups, as with a two-dimensional mesh.

    The model may be ordinary, offloaded, compiled, or on the meta device; it is neither changed nor run. An offloaded
    model keeps the placement it has; the other options apply. `rates`: what choices are weighed with; default those of
    this machine, as far as they can be measured. Example inputs on the meta device stand for zeros. Grad
    mode decides between training and inference, as for a real call. `seconds`: where given, gets for each plan those
    that its operators take on this machine; every distinct operator is run for that.

    Raises: ConfigError for bad options, or a placement that contradicts how the model was offloaded;
    StoredTensorError for a parameter that can't be stored; PlanError when a budget is too small, or the model can't be
    captured; and what the model itself raises.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # the compiler takes seconds to import

    model = getattr(model, "_orig_mod", model)
    if not isinstance(world_size, int) or not 1 <= world_size <= LARGEST:
        raise ConfigError(f"world_size={shortened(world_size)} is not a number of ranks: give 1 or more")
    if not isinstance(replicas, int) or replicas < 1 or world_size % replicas:
        raise ConfigError(f"replicas={replicas!r} is not a number of equal groups that {world_size} ranks divide into")
    in_force = _config_in_force(model, config, fields)
    stage = 3 if in_force.placement == "auto" else in_force.placement.stage
    planner = _Planner(in_force, rates, Groups.of(world_size, replicas, stage), seconds)
    twin = _twin_of(model, planner.config)
    inputs = tree_map_only(torch.Tensor, _off_meta, example_inputs)
    arguments = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        with _collecting_less():
            planner.compiled_call()(twin, *arguments)
    except BackendCompilerFailed as failure:
        raise failure.inner_exception from None
    except StoredTensorError as error:
        raise PlanError(
            "the model can't be planned without values: code that Dynamo doesn't capture uses a parameter "
            "(TORCH_LOGS=graph_breaks shows where)"
        ) from error
    return planner.plans


@contextmanager
def _collecting_less() -> Iterator[None]:
    """No search for reference cycles: it would look at the growing graphs again and again, a third of the time for a
    large model."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _config_in_force(model: torch.nn.Module, config: Config | None, fields: Mapping[str, object]) -> Config:
    """The options that the backend would plan with, the placement decided."""
    requested = Config.of(config, fields)
    parameters = list(model.parameters())
    stored = next((p for p in map(stored_parameter, parameters) if p is not None), None)
    if stored is None:
        return decided(requested, parameters)
    own = stored.base.config
    if requested.placement not in ("auto", own.placement):
        raise ConfigError(
            f"placement={requested.placement} was asked for, but the model was offloaded with {own.placement}: "
            "plan an ordinary model, or one on the meta device, to see other placements"
        )
    others = {name: value for name, value in fields.items() if name not in ("placement", "store")}
    return Config.of(config or own, {**others, "placement": own.placement})


def _twin_of(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """A copy of `model` for planning. Tied parameters stay tied, and nothing of it is on the meta device."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = abstract_parameter(parameter, f"parameter '{name}'", config)
    for module in model.modules():
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                memo[id(tensor)] = _off_meta(tensor)
    try:
        return copy.deepcopy(model, memo)
    except ZinfError:
        raise
    except Exception as error:
        raise PlanError(
            f"the model can't be planned, because copy.deepcopy of its modules fails: {type(error).__name__}: {error}"
        ) from error


def _off_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros on the CPU for a tensor on the meta device; any other tensor itself."""
    if not tensor.is_meta:
        return tensor
    zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()
    return zeros.requires_grad_(tensor.requires_grad)


def _call(model: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    return model(*args, **kwargs)


@dataclass
class _Planner:
    """A Dynamo backend that plans each graph and compiles it to something that computes nothing."""

    config: Config
    rates: Rates | None = None
    groups: Groups = field(default_factory=Groups)
    seconds: list[Compute] | None = None
    plans: list[Plan] = field(default_factory=list)

    def compiled_call(self) -> Callable[..., Any]:
        """`_call`, compiled by this backend apart from all that Dynamo has compiled for the user.

        Dynamo keeps what it compiles with the code object of the outermost frame, so each planner has one of its own.
        After a graph break the frames are those of the model's class: there, isolation keeps this backend's results
        apart, and static shapes keep it from making the user's next compilation dynamic.
        """
        call = FunctionType(_call.__code__.replace(), _call.__globals__)
        isolation = {"isolate_recompiles": True} if "isolate_recompiles" in _COMPILE_PARAMETERS else {}
        return torch.compile(call, backend=self, dynamic=False, **isolation)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from zinf_fx.capture import Capture
        from zinf_fx.passes.timing import OperatorTimer

        capture = Capture(module, inputs, self.config, rates=self.rates, groups=self.groups)
        plan = capture.planned()
        if plan is not None and any(graph.tiles for graph in plan.graphs):
            self.plans.append(plan)
            if self.seconds is not None:
                timer = OperatorTimer()
                taken = {kind: timer.operators(graph) for kind, graph in capture.graphs.items()}
                self.seconds.append(
                    {
                        (graph.kind, operator.index): taken[graph.kind].get(operator.index, 0.0)
                        for graph in plan.graphs
                        for operator in graph.operators
                    }
                )
        results = tree_map(_stand_in, next(iter(module.graph.find_nodes(op="output"))).args[0])

        def zeros(*arguments: Any) -> Any:
            return tree_map_only(_StandIn, _StandIn.make, results)

        return zeros


_COMPILE_PARAMETERS = inspect.signature(torch.compile).parameters


@dataclass(frozen=True)
class _StandIn:
    """What a graph's result is replaced by: zeros of its shape, which require a gradient if it does.

    So the graphs that follow a graph break are captured as they would be in training.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> torch.Tensor:
        zeros = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
        return zeros.requires_grad_(self.requires_grad)


def _stand_in(result: Any) -> Any:
    value = result.meta.get("example_value", result.meta.get("val")) if isinstance(result, fx.Node) else result
    if isinstance(value, torch.Tensor):
        return _StandIn(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    return value
