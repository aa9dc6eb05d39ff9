"""`torch.compile(model, backend="zinf", options={...})`.

[Note: relative paths]
The backend sees the options that `torch.compile` is given when the first graph is compiled. A program may have gone to
another directory by then, and again before the next graph. Relative paths are meant from the working directory when
they were given: of a model, when it was compiled; of a function, and with `module.compile()`, nothing is known before
the first graph. What `torch.compile` made of the backend gives absolute ones from then on; a dict of the program's own
stays as it is, and may be given again in another directory.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.source import AttrSource, SubclassAttrListSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Guard, GuardsSet, TracingContext
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

import zinf_fx.frontend.module_hooks  # registers hooks on modules with stored parameters
import zinf_fx.optim  # noqa: F401  (registers what stored tensors need in any optimizer)
from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.config import PRESETS, Config
from zinf_fx.environment import path_from
from zinf_fx.errors import ConfigError, ZinfError
from zinf_fx.frontend.auto_placement import by_rule_here, sizes_of
from zinf_fx.frontend.capture import Capture
from zinf_fx.frontend.decisions import at_first_call, decided_division
from zinf_fx.frontend.given_plan import check_offloaded, options_with, plans_given
from zinf_fx.frontend.graph_inputs import abstract_inputs, input_names, tables_in
from zinf_fx.frontend.micro_batches import mark_batch
from zinf_fx.frontend.offload import decided, offload_parameters
from zinf_fx.frontend.parameters import (
    check_not_contradicted,
    check_rules,
    check_stage,
    is_ordinary,
    kept_in_their_format,
    options_of_states,
    placed,
    placement_of_all,
    stored_among,
    warn_of_nothing_quantised,
    warn_of_staying,
)
from zinf_fx.lines import line_of
from zinf_fx.placement import PlacementRules
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.quantisation import tables_of
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import check_not_sharded, found_by_first, with_ranks
from zinf_fx.sizes import in_words

log = logging.getLogger("zinf_fx")

_PATHS = ("store", "plan")


def zinf(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, object] | None = None, **unknown: object
) -> Callable[..., Any]:
    """The backend. Parameters that are not stored yet leave for their tier once the first graph that uses them is
    compiled.

    Options are the fields of `Config`, and `plan`: a file that `Plan.save` wrote, a `Plan`, or a list of these. Then
    graphs are planned as it says, and refused, before anything is changed, if it is for other ones.

    Raises: ConfigError for options that are unknown, or contradict how the model was offloaded; PlanError for a plan of
    another model, PlanFileError for a file that is none. Whoever called the compiled function gets these as they are.
    """
    with _refusing(module):
        return _compiled_graph(module, inputs, options, unknown)


def _compiled_graph(
    module: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, object] | None, unknown: Mapping[str, object]
) -> Callable[..., Any]:
    if unknown:
        raise ConfigError(
            f"backend 'zinf' takes options only, found {', '.join(f'{k}={v!r}' for k, v in unknown.items())}: leave it "
            "out, or give None where a library has a value of its own (mode=None, say)"
        )
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options is a {type(options).__name__}: give a dict, such as {{'placement': 'nvme'}}")
    options = _keep_absolute(_backend_that_compiles(), options or {}, _working_directory())
    plans = plans_given(options.get("plan"))
    options = options_with(plans, {name: value for name, value in options.items() if name != "plan"})
    requested = Config.of(None, options)
    _drop_implied_guards(module, inputs)
    _hold_shapes(module, inputs)
    plain = [value for value in inputs if is_ordinary(value)]
    stored = stored_among(zip(input_names(module), inputs, strict=True))
    in_force = _config_in_force(stored, options, requested, plans) if stored else requested
    if not _in_ddp(requested) and plain:
        _check_ranks_are_given(in_force, plain)
        # Like those that are stored, but for where.
        config = with_ranks(Config.of(in_force, {"placement": requested.placement}), plain)
        division: Mapping[str, object] = {}
        if config.placement == "auto":
            find = partial(at_first_call, module, inputs, config, plain)
            placement, division = found_by_first(config, plain, find, "the placement")
            config = placed(config, placement)
        check_stage(config)
        many = Ranks.of(config).size > 1  # whose gradients are to be reduced
        stays = config.placement == PRESETS["device"] and config.activations != "offload"
        all_stay = requested.placement == "auto" and stays
        if many or not all_stay or config.frozen_dtype is not None:  # in which what is frozen takes less room there
            return _offloaded(module, inputs, config, plans, division)
    # A graph without parameters concerns no other rank, which may have no such graph.
    groups = None if stored else Groups()
    division = decided_division(module, inputs, in_force, groups)
    return Capture(module, inputs, in_force, plans, groups=groups, division=division).compile()


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
    stored: Mapping[str, StoredTensor], options: dict[str, object], requested: Config, plans: Sequence[Plan]
) -> Config:
    """The options of the stored parameters, by name, with those given to torch.compile in their place."""
    check_offloaded(plans, stored)
    of_states = options_of_states(stored)
    check_not_contradicted(requested, options.keys() & of_states, stored, "give it once, where the model is offloaded")
    own = next(iter(stored.values())).base.config
    return Config.of(own, {name: value for name, value in options.items() if name not in of_states})


def _offloaded(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    config: Config,
    plans: Sequence[Plan],
    division: Mapping[str, object],
) -> Callable[..., Any]:
    """The graph, compiled for stored parameters, and then its ordinary parameters stored, keeping their identity.
    `division`: the options of how its batch is divided, if these were decided with the placement.

    In this order nothing has left when the graph is refused. Dynamo makes its guards after the backend returns, so they
    are for stored parameters, and the first call computes what later ones do.
    """
    abstract = abstract_inputs(module, inputs, config)
    division = division or decided_division(module, abstract, config, seen=inputs)
    compiled = Capture(module, abstract, config, plans, seen=inputs, division=division).compile()
    names = input_names(module)
    warn_of_staying(dict(zip(names, inputs, strict=True)))
    leaving: dict[str, torch.nn.Parameter] = {}
    for number, (name, value) in enumerate(zip(names, inputs, strict=True)):
        if is_ordinary(value):
            leaving[f"{name} (input {number})" if name in leaving else name] = value
    offload_parameters(leaving, config, tables_in(module, inputs))
    return compiled


@register_module_module_registration_hook
def _compiled(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    """A module that `torch.compile` wraps, seen as a whole: Dynamo shows a backend the graphs that it captured, and
    nothing of the code that it left to Python. Functions, and `module.compile()`, make no such wrapper."""
    if name == "_orig_mod" and isinstance(parent, OptimizedModule):
        before = partial(_about_to_be_called, _working_directory())
        parent.register_forward_pre_hook(before, with_kwargs=True)
        parent.register_forward_hook(_first_called)


def _about_to_be_called(start: str, optimized: OptimizedModule, arguments: Any, keywords: Any) -> None:
    """Before the first call of a compiled model: check what no graph of it can tell, that rules of placement are for
    this model, and say which sizes are the batch's. `start`: the directory in which it was compiled.

    Raises: ConfigError.
    """
    if torch.compiler.is_compiling():  # as a part of another module, whose names the rules are for
        return
    options = _keep_absolute(_backend_of(optimized), _options_of(optimized) or {}, start)
    if options.get("micro_batches", 1) != 1 and getattr(optimized.dynamo_ctx, "_dynamic", None):
        mark_batch([arguments, keywords])
    rules = {name: options[name] for name in ("placement", "frozen_dtype") if name in options}
    if isinstance(rules.get("placement"), (Mapping, PlacementRules)) or isinstance(rules.get("frozen_dtype"), list):
        check_rules(Config.of(None, rules), _parameters_of(optimized._orig_mod), optimized._orig_mod)
    _remove(optimized._forward_pre_hooks, _about_to_be_called)


def _parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return by_plain_name(model, model.named_parameters())


def _options_of(optimized: torch.nn.Module) -> Mapping[str, Any] | None:
    """The options of a model that this backend compiles; None: another one does."""
    backend = _backend_of(optimized)
    if getattr(backend, "compiler_fn", backend) is not zinf:
        return None
    options = getattr(backend, "kwargs", {}).get("options")
    return options if isinstance(options, Mapping) else {}  # others are refused when a graph is compiled


def _backend_of(optimized: torch.nn.Module) -> object:
    """What `torch.compile` made of a model's backend."""
    callback = getattr(optimized.dynamo_ctx, "callback", None)
    return None if callback is None else innermost_backend(callback)


def _backend_that_compiles() -> object:
    """What `torch.compile` made of the backend that Dynamo calls now; None: Dynamo calls none."""
    if TracingContext.try_get() is None:
        return None
    compiler = InstructionTranslator.current_tx().output.compiler_fn
    return None if compiler is None else innermost_backend(compiler)


def _remove(hooks: dict[int, Callable[..., Any]], removed: Callable[..., Any]) -> None:
    for number, hook in list(hooks.items()):
        if getattr(hook, "func", hook) is removed:
            del hooks[number]


def _first_called(optimized: OptimizedModule, arguments: Any, result: Any) -> None:
    if torch.compiler.is_compiling():  # as a part of another module, which has a first call of its own
        return
    _remove(optimized._forward_hooks, _first_called)
    if (options := _options_of(optimized)) is not None:
        _store_the_rest(optimized._orig_mod, options)
        if options.get("frozen_dtype") is not None:
            model = optimized._orig_mod
            config = Config.of(None, {"frozen_dtype": options["frozen_dtype"]})
            warn_of_nothing_quantised(config, model.parameters(), tables_of(model.modules()))


def _store_the_rest(model: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """After the first call of a compiled model: store what no graph of it uses, as the same options say.

    Dynamo hands over no graph of recurrent layers, of the ninth model of a class with other shapes (its recompile
    limit), and of what the call didn't reach. Such code gathers each stored parameter where it uses it.
    """
    present = _parameters_of(model)
    rest = {
        name: parameter
        for name, parameter in present.items()
        if is_ordinary(parameter) and not is_lazy(parameter) and not parameter.is_meta
    }
    if not rest:
        return
    options = dict(options)
    plans = plans_given(options.pop("plan", None))
    config = Config.of(None, options_with(plans, options))
    if _in_ddp(config, model):
        return
    ranks, parameters = Ranks.of(config), list(rest.values())
    tables = kept_in_their_format(config, rest, tables_of(model.modules()))
    if config.placement == "auto" and ranks.size == 1:
        sizes = sizes_of(parameters, config, ranks.groups, tables)
        alone = by_rule_here(config, parameters, ranks.groups, sizes, "no captured graph uses them")
        if alone.nothing_moves and config.frozen_dtype is None:
            return
    nbytes = in_words(sum(parameter.nbytes for parameter in parameters))
    stored = stored_among(present.items())
    if stored:
        like = next(iter(stored.values())).base.config
        placement = placement_of_all(stored) if config.placement == "auto" else config.placement
        asked = {name: getattr(config, name) for name in ("frozen_dtype",) if name in options}
        offload_parameters(rest, Config.of(placed(like, placement), asked), tables)
        log.info(
            "%d parameters, %s, that no captured graph uses are stored too: %s", len(rest), nbytes, ", ".join(rest)
        )
        return
    check_not_sharded(model)
    warn_of_staying(present)
    offload_parameters(rest, decided(config, parameters, tables=tables), tables)
    log.warning(
        "Dynamo captured nothing of %s that uses a parameter. Its %d parameters, %s, are stored, and each operation "
        "gathers those it uses, without a plan. TORCH_LOGS=graph_breaks,recompiles shows why: recurrent layers are "
        "never captured, and of one class of models only torch._dynamo.config.recompile_limit with different shapes",
        type(model).__name__,
        len(rest),
        nbytes,
    )


def _in_ddp(requested: Config, model: torch.nn.Module | None = None) -> bool:
    """Whether `model`, or what is running, is trained by DistributedDataParallel, so that nothing may leave.

    Raises: ConfigError where a placement was asked for all the same.
    """
    wrapper = model if isinstance(model, DistributedDataParallel) else DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return False
    parameters = [parameter for parameter in wrapper.parameters() if parameter.requires_grad and is_ordinary(parameter)]
    if not parameters:
        return False
    nbytes = in_words(sum(parameter.nbytes for parameter in parameters))
    message = (
        f"the model is wrapped in DistributedDataParallel, which reduces the gradients of {len(parameters)} "
        f"parameters, {nbytes}, and needs them in memory: compile the model itself, zinf reduces over all ranks"
    )
    if requested.placement != "auto":
        raise ConfigError(f"{message}. Nothing was moved; asked for was placement={requested.placement}")
    warnings.warn(f"{message}. Nothing is moved", stacklevel=2)
    return True


def _working_directory() -> str:
    """Where the program is; an empty text where the directory is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _keep_absolute(backend: Any, options: Mapping[str, object], start: str) -> dict[str, object]:
    """A copy of options in which all paths are absolute: see [Note: relative paths]. If `backend` is what
    `torch.compile` made of this one for these options, it gives that copy from now on.

    Raises: ConfigError for relative paths, where `start`, the directory from which they are meant, is gone.
    """

    def begin() -> str:
        if start:
            return start
        raise ConfigError(
            f"paths among the options {dict(options)} are relative, and the working directory is gone: name them from "
            "the root"
        )

    def absolute(given: object) -> object:
        if isinstance(given, (list, tuple)):
            return [absolute(member) for member in given]
        if isinstance(given, (str, os.PathLike)) and os.fspath(given):  # an empty one is refused where it is read
            return os.fspath(path_from(begin, given))
        return given

    kept = {name: absolute(value) if name in _PATHS else value for name, value in options.items()}
    arguments = getattr(backend, "kwargs", {})
    if arguments.get("options") is options:
        backend.kwargs = {**arguments, "options": kept}
    return kept


def _drop_implied_guards(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Drop the guards on what stored tensors among the inputs of Dynamo's graph `module` are made of. Every tensor of
    this type has a token, which is one number on the CPU, and guards on the type, and on the metadata, are left.

    In a backend, before it returns: then Dynamo makes its checks of the guards that there are.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    stored = {
        node._dynamo_source for node, value in zip(placeholders, inputs, strict=True) if isinstance(value, StoredTensor)
    }
    context = TracingContext.get().guards_context

    def is_implied(guard: Guard) -> bool:
        source = guard.originating_source
        if isinstance(source, AttrSource):
            return source.member == "token" and source.base in stored
        return isinstance(source, SubclassAttrListSource) and source.base in stored

    if stored:
        guards = context.dynamo_guards
        context.dynamo_guards = GuardsSet(type(guards.inner)(guard for guard in guards if not is_implied(guard)))


def _hold_shapes(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have Dynamo make another graph of `module` for stored tensors of other shapes, as it does for parameters in
    memory: a plan moves so many bytes. In a backend, before it returns."""
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        seen = node.meta.get("example_value")
        if isinstance(value, StoredTensor) and isinstance(seen, torch.Tensor):
            for size in seen.shape:
                int(size)  # which makes a guard of one that is variable


class _Refusal(BackendCompilerFailed):
    """Carries an error of ours through Dynamo, which would wrap any other exception, to the compiled function's caller.

    There, Dynamo raises what `remove_dynamo_frames` returns. Until then it is what a failing backend raises, so that
    Dynamo keeps nothing of the attempt, and the next call compiles again.
    """

    def remove_dynamo_frames(self) -> Exception:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.inner_exception


@contextmanager
def _refusing(module: fx.GraphModule) -> Iterator[None]:
    """A block that compiles a graph, and whose errors of ours say which it is."""
    try:
        yield
    except ZinfError as error:
        if place := _place(module):
            error.add_note(f"This was said of the graph that begins here:\n{place}")
        if TracingContext.try_get() is None:  # not called by Dynamo
            raise
        raise _Refusal(_named_zinf, error, None) from error


def _named_zinf() -> None:
    """Gives the backend's name to Dynamo's log."""


_named_zinf.__name__ = "zinf"


def _place(module: fx.GraphModule) -> str:
    """The line of the model's code that the first operation of a graph is from; empty: it isn't known."""
    operations = (node for node in module.graph.nodes if node.op != "placeholder" and node.stack_trace)
    return next(map(line_of, operations), "")
