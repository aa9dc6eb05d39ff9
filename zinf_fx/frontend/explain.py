"""Plans of models that don't run: `explain`, `export_plan`, and what they are made of.

A model is planned through a twin: the same modules, whose parameters are stored tensors without bytes. The twin is
captured as `torch.compile(model, backend="zinf")` would capture the model, but what is compiled computes nothing. So
planning needs no store, no values and next to no memory, and a model on the meta device is enough.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, get_args

import torch
from torch import fx
from torch.utils._pytree import tree_map, tree_map_only

from zinf_fx.adam import MasterForm, StateForm
from zinf_fx.arguments import check_model, did_you_mean
from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.config import LARGEST, Config, Options, shortened
from zinf_fx.cycles import no_search_for_cycles
from zinf_fx.errors import ConfigError, PlanError, StoredTensorError, ZinfError
from zinf_fx.frontend.offload import decided
from zinf_fx.frontend.parameters import (
    abstract_parameter,
    check_not_contradicted,
    check_rules,
    configs_of,
    kept_in_their_format,
    options_given,
    options_of_states,
    placement_of_all,
    stays,
    stored_among,
)
from zinf_fx.placement import PlacementRules, PlannedDevice
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.packs import planning_for
from zinf_fx.plan.placement.decision import Decision
from zinf_fx.plan.placement.division import Division
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.sharding import Groups
from zinf_fx.plan.show.table import render
from zinf_fx.plan.simulation.event_graph import Compute
from zinf_fx.quantisation import tables_of
from zinf_fx.runtime.tensor.local_parameter import stored_in
from zinf_fx.runtime.tensor.tensor_parallel import with_ranks

if TYPE_CHECKING:
    from zinf_fx.frontend.decisions import Divisions, PlannedGraph

F = TypeVar("F", bound=str)


class PlanningOptions(Options, total=False):
    """The options of `explain` and `export_plan`: see `plan_model`."""

    device: PlannedDevice | None
    state_dtype: torch.dtype | StateForm | None
    master_dtype: torch.dtype | MasterForm | None


def explain(
    model: torch.nn.Module,
    *example_inputs: Any,
    config: Config | None = None,
    world_size: int = 1,
    replicas: int = 1,
    **fields: Unpack[PlanningOptions],
) -> str:
    """The plan of `model(*example_inputs)` as text: a table per graph, and a summary.

    Forward and backward, or inference alone under `torch.no_grad()`, for `world_size` ranks, in `replicas` groups.
    Options (`state_dtype` among them) and errors are those of `plan_model`.
    """
    return plan_model(model, example_inputs, config, world_size=world_size, replicas=replicas, **fields).text()


def export_plan(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config | None = None,
    world_size: int = 1,
    replicas: int = 1,
    hardware: Hardware | None = None,
    **fields: Unpack[PlanningOptions],
) -> Plan:
    """The plan of `model(*example_inputs)` (a mapping: keyword arguments), to be saved and used elsewhere:
    `Plan.save(path)`, then `torch.compile(model, backend="zinf", options={"plan": path})`.

    Needs no store, GPU or weights: the model may be on the meta device, and is neither changed nor run. Forward and
    backward, or inference alone under `torch.no_grad()`. What is on the meta device is planned for the CPU, or for the
    `device` or `hardware` that is given.

    Args:
        config, fields: the options to plan with, as for `zinf_fx.offload`; `state_dtype` and `master_dtype`, as of the
            optimizer; and `device`, "cpu" or "cuda", which computes and need not be here.
        world_size: ranks that train together.
        replicas: groups that they divide into, each of which has all model states, as with a two-dimensional mesh.
        hardware: what is planned for, and what `placement="auto"` decides for; default this machine, at nominal rates.
            Other choices (`activations="auto"`) are weighed with its rates; default those that are measured here, where
            the store is there if they depend on it, and else nominal ones.

    Raises: ConfigError for bad options; BudgetError when a budget is too small; PlanError when the model can't be
    captured as one graph that uses parameters; StoredTensorError for a parameter that can't be stored.
    """
    check_model(model, "export_plan")
    return plan_model(model, example_inputs, config, world_size, replicas, hardware=hardware, **fields).only(
        "a plan file"
    )


@dataclass(frozen=True)
class Planning:
    """The plans of a model, one per graph that uses parameters.

    `decision`: what was decided where its placement is "auto", and `divisions` where its micro-batches are, of each
    graph that can be divided. `seconds`: of each plan's operators on this machine, where they were measured.
    """

    plans: list[Plan]
    decision: Decision | None = None
    divisions: list[Division] = field(default_factory=list)
    seconds: list[Compute] = field(default_factory=list)

    @property
    def decision_texts(self) -> list[str]:
        """All that was decided, for people."""
        return [str(choice) for choice in (self.decision, *self.divisions) if choice is not None]

    def only(self, what: str) -> Plan:
        """The one plan. Raises: PlanError when there are none, or several, which says `what` is for one."""
        if not self.plans:
            raise PlanError("no captured graph of the model uses a parameter: there is nothing to plan")
        if len(self.plans) > 1:
            raise PlanError(
                f"the model is captured as {len(self.plans)} graphs, and {what} is for one: remove the graph breaks "
                "(TORCH_LOGS=graph_breaks shows where they are)"
            )
        return self.plans[0]

    def text(self, **layout: Any) -> str:
        """For people. `layout`: arguments of `plan.show.table.render`."""
        if not self.plans:
            return "No captured graph of the model uses a parameter, so nothing is moved.\n"
        parts = self.decision_texts
        leaves = any(plan.config.activations == "offload" for plan in self.plans)
        if self.decision is not None and self.decision.nothing_moves and not leaves:
            parts.append("The model would run as ordinary PyTorch. Ask for another placement to see one.")
        count = len(self.plans)
        if count > 1:
            parts.append(f"The model is captured as {count} graphs (graph breaks); each has a plan of its own.")
        for number, plan in enumerate(self.plans, start=1):
            title = f"GRAPH {number} OF {count}\n\n" if count > 1 else ""
            parts.append(title + render(plan, **layout))
        return "\n\n".join(parts)


def plan_model(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config | None = None,
    world_size: int = 1,
    replicas: int = 1,
    timed: bool = False,
    hardware: Hardware | None = None,
    state_dtype: torch.dtype | StateForm | None = None,
    master_dtype: torch.dtype | MasterForm | None = None,
    device: PlannedDevice | None = None,
    **fields: Unpack[Options],
) -> Planning:
    """The plans of `model(*example_inputs)` (a mapping: keyword arguments) for `world_size` ranks. What is partitioned
    is so within each of `replicas` groups, as with a two-dimensional mesh.

    The model may be ordinary, offloaded, compiled, or on the meta device; it is neither changed nor run. An offloaded
    model keeps the options that its states were made with, and the other ones apply. Example inputs on the meta device
    stand for zeros. Grad mode decides between training and inference, as for a real call. `timed`: measure the
    operators on this machine, for which every distinct one is run, and its regions are compiled where that is asked
    for. `hardware`: what "auto" decides for, and the rates that it weighs choices with; default this machine, at rates
    that are nominal, and measured ones for activations. `state_dtype`: what Adam's moments are to be kept in, and
    `master_dtype` masters of bf16 parameters; default as the optimizer that the parameters have keeps them, if any.
    `device`: what computes, which need not be here: "cuda" has memory of its own, to which everything is copied, and
    "cpu" computes in host memory. Default: what `hardware` has, if that is given, else the device of the parameters; of
    those on the meta device, the CPU. Operators are captured as for the device of the parameters.

    Raises: ConfigError for bad options, ones that contradict how the model was offloaded, and regions that are to be
    timed without a compiler; StoredTensorError for a parameter that can't be stored; PlanError when a budget is too
    small, or the model can't be captured; and what the model itself raises.
    """
    check_model(model, "explain")
    # The compiler takes seconds to import.
    from zinf_fx.frontend.decisions import decided_for

    model = getattr(model, "_orig_mod", model)
    if not isinstance(world_size, int) or not 1 <= world_size <= LARGEST:
        raise ConfigError(f"world_size={shortened(world_size)} is not a number of ranks: give 1 or more")
    if not isinstance(replicas, int) or replicas < 1 or world_size % replicas:
        raise ConfigError(f"replicas={replicas!r} is not a number of equal groups that {world_size} ranks divide into")
    if isinstance(example_inputs, torch.Tensor):
        raise ConfigError(
            f"example_inputs is a tensor of shape {tuple(example_inputs.shape)}, not a sequence of inputs: give (x,)"
        )
    if not isinstance(example_inputs, (Sequence, Mapping)) or isinstance(example_inputs, str):
        raise ConfigError(f"example_inputs is a {type(example_inputs).__name__}: give a tuple, or a mapping of names")
    if hardware is not None and not isinstance(hardware, Hardware):
        raise ConfigError(
            f"hardware is a {type(hardware).__name__}: give a description, such as zinf_fx.plan.hardware.load('a100')"
        )
    form = _form("state_dtype", state_dtype, get_args(StateForm))
    master = _form("master_dtype", master_dtype, get_args(MasterForm))
    in_force = _config_in_force(model, config, fields)
    decides = in_force.placement == "auto"
    rates = None
    if hardware is not None:
        tier = "nvme" if decides else in_force.activation_tier
        rates = Rates.of(hardware, _dtype_of_most(model, hardware), tier)
    groups = Groups.of(world_size, replicas, 3 if decides else in_force.stage)
    # Where it isn't decided yet, any placement serves for capturing the graphs.
    placed = Config.of(in_force, {"placement": "nvme"}) if decides else in_force
    with no_search_for_cycles(), planning_for(_planned_memory(device, hardware, decides)):
        graphs = captured_graphs(model, example_inputs, placed, groups, rates, form, master)
        decision = None
        if decides:
            parameters = [parameter for parameter in model.parameters() if not stays(parameter)]
            named = by_plain_name(model, model.named_parameters())
            tables = kept_in_their_format(in_force, named, tables_of(model.modules()))
            decision, planned = decided_for(graphs, parameters, in_force, groups, hardware, tables)
        else:
            planned = [graph.planned(hardware=hardware) for graph in graphs]
        planned = [graph for graph in planned if graph.moves]
        seconds = list(_timed(planned)) if timed else []
    divisions = [graph.division for graph in planned if graph.division is not None]
    return Planning(
        [graph.plan for graph in planned if graph.plan is not None],
        decision,
        divisions,
        seconds,
    )


def _planned_memory(device: PlannedDevice | None, hardware: Hardware | None, decides: bool) -> bool | None:
    """Return whether a plan is for a device with memory of its own; None: for that of the parameters. `decides`: the
    placement is decided for the hardware. Raises: ConfigError."""
    if device not in (None, *get_args(PlannedDevice)):
        raise ConfigError(f"device={shortened(device)} is not accepted; give 'cpu' or 'cuda'")
    if hardware is None:
        if device == "cuda" and decides:
            raise ConfigError(
                "device='cuda' with placement='auto' lacks the machine that this decides for: give its description as "
                "hardware (--hardware), or a placement"
            )
        return None if device is None else device == "cuda"
    if device is not None and hardware.unified != (device == "cpu"):
        memory = "one memory for device and host" if hardware.unified else "devices with memory of their own"
        raise ConfigError(
            f"device='{device}' contradicts hardware '{hardware.name}', which has {memory}: leave one out"
        )
    return not hardware.unified


def captured_graphs(
    model: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    config: Config,
    groups: Groups,
    rates: Rates | None = None,
    state_dtype: StateForm | None = None,
    master_dtype: MasterForm | None = None,
) -> list[Divisions]:
    """The graphs of `model(*example_inputs)`, each of which can be planned with any placement that partitions states
    over the same groups of ranks as that of `config` does. Arguments and errors are those of `plan_model`."""
    # The compiler takes seconds to import.
    from torch._dynamo.exc import BackendCompilerFailed

    planner = _Planner(config, rates, groups)
    twin = _twin_of(model, config)
    for stored in (part for parameter in twin.parameters() for part in stored_in(parameter)):
        gradient = stored.stored.gradient
        gradient.state_dtype = state_dtype or gradient.state_dtype
        gradient.master_dtype = (master_dtype if stored.dtype == torch.bfloat16 else None) or gradient.master_dtype
    inputs = tree_map_only(torch.Tensor, _off_meta, example_inputs)
    arguments = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    try:
        planner.compiled_call()(twin, *arguments)
    except BackendCompilerFailed as failure:
        raise failure.inner_exception from None
    except StoredTensorError as error:
        raise PlanError(
            "the model can't be planned without values: code that Dynamo doesn't capture uses a parameter "
            "(TORCH_LOGS=graph_breaks,recompiles shows where)"
        ) from error
    return planner.graphs


def _dtype_of_most(model: torch.nn.Module, hardware: Hardware) -> str:
    """What most elements of a model's parameters are, of the dtypes that the hardware has a peak for: codes of a frozen
    parameter, for one, are no numbers to compute with."""
    elements: Counter[str] = Counter()
    for parameter in model.parameters():
        elements[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(hardware.peak, key=elements.__getitem__, default="float32")


def _timed(planned: Iterable[PlannedGraph]) -> Iterator[Compute]:
    """Seconds of each plan's operators on this machine."""
    from zinf_fx.passes.ir.timing import OperatorTimer

    timer = OperatorTimer()
    for capture in planned:
        assert capture.plan is not None
        taken = {kind: timer.operators(graph, regions) for kind, (graph, regions) in capture.runnable().items()}
        yield {
            (graph.kind, operator.index): taken[graph.kind].get(operator.index, 0.0)
            for graph in capture.plan.graphs
            for operator in graph.operators
        }


def _config_in_force(model: torch.nn.Module, config: Config | None, fields: Mapping[str, object]) -> Config:
    """The options that the backend would plan with; the placement may be "auto" still."""
    requested = Config.of(config, fields)
    parameters = list(model.parameters())
    stored = stored_among(by_plain_name(model, model.named_parameters()).items())
    if not stored:
        return with_ranks(requested, parameters) if requested.placement == "auto" else decided(requested, parameters)
    of_states = options_of_states(stored)
    hint = "plan an ordinary model, or one on the meta device, to see what other options make of it"
    check_not_contradicted(requested, options_given(config, fields) & {*of_states}, stored, hint)
    of_plan = {name: value for name, value in fields.items() if name not in of_states}
    placement = requested.placement if isinstance(requested.placement, PlacementRules) else placement_of_all(stored)
    own = next(iter(stored.values())).base.config
    states = {name: getattr(own, name) for name in of_states}
    return Config.of(config or own, {**of_plan, **states, "placement": placement})


def _twin_of(model: torch.nn.Module, config: Config) -> torch.nn.Module:
    """A copy of `model` for planning. Tied parameters stay tied, and nothing of it is on the meta device."""
    memo: dict[int, Any] = {}
    parameters, tables = by_plain_name(model, model.named_parameters()), tables_of(model.modules())
    check_rules(config, parameters, model)
    configs = configs_of(config, parameters)
    for name, parameter in parameters.items():
        memo[id(parameter)] = abstract_parameter(parameter, f"parameter '{name}'", configs[name], tables)
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
    return _zeros_like(tensor, torch.device("cpu"))() if tensor.is_meta else tensor


def _zeros_like(tensor: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """Makes zeros of a tensor's shape, which require a gradient if it does, and keeps nothing of the tensor."""
    shape, stride = ([int(size) for size in sizes] for sizes in (tensor.shape, tensor.stride()))
    dtype, requires_grad = tensor.dtype, tensor.requires_grad

    def make() -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_().requires_grad_(requires_grad)

    return make


def _call(model: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    return model(*args, **kwargs)


@dataclass
class _Planner:
    """A Dynamo backend that captures each graph, and compiles it to something that computes nothing."""

    config: Config
    rates: Rates | None = None
    groups: Groups = field(default_factory=Groups)
    graphs: list[Divisions] = field(default_factory=list)

    def compiled_call(self) -> Callable[..., Any]:
        """`_call`, compiled by this backend apart from all that Dynamo has compiled for the user.

        Dynamo keeps what it compiles with the code object of the outermost frame, so each planner has one of its own.
        After a graph break the frames are those of the model's class: there, isolation keeps this backend's results
        apart, and static shapes keep it from making the user's next compilation dynamic. A batch that is divided has
        to be told from other sizes.
        """
        call = FunctionType(_call.__code__.replace(), _call.__globals__)
        isolation: dict[str, Any] = {"isolate_recompiles": True} if CAN_ISOLATE else {}
        return torch.compile(call, backend=self, dynamic=self.config.micro_batches != 1, **isolation)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from zinf_fx.frontend.decisions import Divisions

        graph = Divisions(module, inputs, self.config, self.groups, self.rates)
        graph.capture()  # which Dynamo may call for again where this fails
        self.graphs.append(graph)
        (output,) = module.graph.find_nodes(op="output")
        results = tree_map(_stand_in, output.args[0])
        return lambda *arguments: tree_map_only(FunctionType, lambda make: make(), results)


def _form(option: str, given: object, accepted: Sequence[F]) -> F | None:
    """What plans have for an option of optimizers. Raises: ConfigError."""
    text = str(given).removeprefix("torch.")
    form = next((known for known in accepted if known == text), None)
    if form is None and given is not None:
        meant = did_you_mean(text, accepted)
        raise ConfigError(f"{option}={given!r} is not accepted; accepted: {', '.join(map(repr, accepted))}{meant}")
    return form


# Not up to torch 2.11.
CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _stand_in(result: Any) -> Any:
    """What makes zeros in the place of a graph's result: the graphs that follow a graph break are captured as they
    would be in training."""
    value = result.meta.get("example_value", result.meta.get("val")) if isinstance(result, fx.Node) else result
    return _zeros_like(value, value.device) if isinstance(value, torch.Tensor) else value
