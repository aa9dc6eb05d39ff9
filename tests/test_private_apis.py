"""What zinf_fx uses of PyTorch beyond its documented interface, in one place.

They hold for torch 2.11, 2.13, 2.14 and 2.15. Where one of these tests fails with another version, its message says
which file relies on what changed. Behaviour is tested where it matters, not only that a name exists.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._guards import GuardSource

# Where a private name is, the parameters that are passed to it by name or position, and which file passes them.
FUNCTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "torch._functorch.aot_autograd.aot_module_simplified": (
        (
            "mod",
            "args",
            "fw_compiler",
            "bw_compiler",
            "partition_fn",
            "keep_inference_input_mutations",
            "inference_compiler",
        ),
        "capture.py",
    ),
    "torch._functorch.partitioners.min_cut_rematerialization_partition": (
        ("joint_module", "_joint_inputs", "num_fwd_outputs", "static_lifetime_input_indices"),
        "passes/lowering/partition.py",
    ),
    "torch._inductor.compile_fx.compile_fx_inner": (("gm", "example_inputs"), "runtime/execute/inductor.py"),
    "torch._inductor.decomposition.select_decomp_table": ((), "runtime/execute/inductor.py"),
    "torch._inductor.cpp_builder.get_cpp_compiler": ((), "runtime/execute/inductor.py"),
    "torch.utils._triton.has_triton": ((), "runtime/execute/inductor.py"),
    "torch.fx.experimental.proxy_tensor.make_fx": (("f", "decomposition_table"), "runtime/execute/inductor.py"),
    "torch.library.register_fake": (("op", "lib"), "ops.py"),
    "torch.fx.node.has_side_effect": (("fn",), "ops.py"),
    "torch.nn.modules.module.register_module_parameter_registration_hook": (("hook",), "frontend/offload.py"),
    "torch.nn.modules.module.register_module_module_registration_hook": (("hook",), "frontend/offload.py"),
    "torch.optim.optimizer.register_optimizer_step_pre_hook": (("hook",), "optim/plain.py"),
    "torch.optim.optimizer.register_optimizer_step_post_hook": (("hook",), "optim/plain.py"),
    "torch.autograd.graph.increment_version": (("tensor",), "runtime/tensor/stored_bytes.py, views.py"),
    "torch.utils._pytree.tree_map": (("func", "tree"), "explain.py, passes/ir/timing.py"),
    "torch.utils._pytree.tree_leaves": (("tree",), "passes/ir/timing.py"),
    "torch.utils._pytree.tree_map_only": (("type_or_types_or_pred", "func", "tree"), "runtime/tensor/operations.py"),
    "torch.utils._pytree.tree_iter": (("tree",), "runtime/tensor/operations.py"),
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        ("global_shape", "mesh", "placements"),
        "checkpoint/copying.py",
    ),
}

# Private names without a signature to look at.
NAMES: dict[str, str] = {
    "torch.fx._lazy_graph_module._LazyGraphModule": "passes/ir/rewriting.py: code is written when it is called",
    "torch._inductor.exc.InvalidCxxCompiler": "runtime/execute/inductor.py: there is no compiler",
    "torch._dispatch.python.enable_python_dispatcher": "runtime/execute/inductor.py records operations on open sizes",
    "torch._guards.TracingContext": "runtime/execute/inductor.py has one without strides that others wait for",
    "torch._C._swap_tensor_impl": "runtime/tensor/stored_tensor.py gives a parameter its stored twin's implementation",
    "torch._C._set_throw_on_mutable_data_ptr": "runtime/tensor/stored_tensor.py: nobody gets the address of no memory",
    "torch._dynamo.OptimizedModule": "backend.py waits for the first call of each",
    "torch._dynamo.eval_frame._TorchDynamoContext": "backend.py asks its `_dynamic` whether all sizes are left open",
    "torch._dynamo.eval_frame.innermost_backend": "backend.py asks which backend a module is compiled with",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": "backend.py asks which backend Dynamo calls",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module": "backend.py refuses what DDP trains",
    "torch._C._will_engine_execute_node": "runtime/gradients/leaf.py asks whether backward is to accumulate a gradient",
    "torch._C._current_autograd_node": "runtime/gradients/leaf.py asks which node of the graph runs",
    "torch.Tensor._base": "runtime/gradients/leaf.py finds what computed a tensor that is a view",
    "torch._C._functions.AccumulateGrad": "runtime/gradients/leaf.py finds the leaves behind a node",
    "torch.Tensor._use_count": "frontend/offload.py sees whether autograd has recorded a parameter",
    "torch._C._storage_Use_Count": "frontend/offload.py sees whether other tensors have a parameter's memory",
    "torch._subclasses.fake_tensor.FakeTensor": "runtime/tensor/operations.py tells the copies that end a graph",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "equal_values.py compares graphs while tensors are fake",
    "torch._guards.GuardSource.LOCAL": "graph_inputs.py tells what comes with a call from the model's buffers",
    "torch._dynamo.utils.counters": "cycles.py asks whether Dynamo captured anything",
    "torch._guards.TracingContext.try_get": "backend.py, cycles.py and refusal.py ask whether Dynamo captures",
    "torch._guards.TracingContext.get": "capture.py plans a graph after it was captured, as if while it was",
    "torch._guards.tracing": "capture.py, likewise",
    "torch._guards.GuardsSet": "guards.py leaves some out",
    "torch._dynamo.source.SubclassAttrListSource": "guards.py tells what a guard is on",
    "torch._dynamo.source.AttrSource": "guards.py, likewise",
    "torch._guards.detect_fake_mode": "local_inputs.py makes fakes of inputs that Dynamo doesn't know",
    "torch.distributed.distributed_c10d._get_default_store": "runtime/rendezvous.py: where ranks meet",
    "torch.distributed.ProcessGroupGloo": "runtime/rendezvous.py connects ranks under a name of its own",
    "torch.distributed.distributed_c10d._resolve_process_group": "runtime/tensor/tensor_parallel.py: the group used; "
    "runtime/watchdog.py: the group in which another rank waits",
    "torch.distributed.ProcessGroup._get_sequence_number_for_group": "runtime/watchdog.py: the collectives started",
    "torch.distributed.distributed_c10d.barrier": "runtime/watchdog.py finds calls of this module, by its file",
    "torch.distributed.c10d_logger._exception_logger": "runtime/watchdog.py leaves out the frames of this module",
    "torch.distributed.fsdp._common_utils.FSDP_FLATTENED": "runtime/tensor/stored_tensor.py has an attribute of it",
    "torch.distributed._checkpointable._Checkpointable.__create_write_items__": "runtime/tensor/"
    "distributed_checkpoint.py and checkpoint/convert.py have this protocol's methods",
    "torch.distributed._checkpointable._Checkpointable.__create_chunk_list__": "likewise",
    "torch.distributed._checkpointable._Checkpointable.__get_tensor_shard__": "likewise",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh": "runtime/tensor/tensor_parallel.py: what it is part of",
    "torch.distributed.tensor.DTensor._local_tensor": "runtime/tensor/local_parameter.py gives a DTensor a stored one",
    "torch.distributed.tensor.DTensor._spec": "runtime/tensor/local_parameter.py places gradients and states",
    "torch.ops._c10d_functional.wait_tensor": "passes/ir/collectives.py tells when a collective is over",
    "torch.Tensor._backward_hooks": "runtime/tensor/stored_tensor.py knows an object's hooks",
    "torch.Tensor._post_accumulate_grad_hooks": "runtime/tensor/stored_tensor.py tells an implementation of the hooks",
    "torch.autocast_increment_nesting": "runtime/tensor/operations.py asks whether an autocast context is open",
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": "ops.py asks whether operators are recorded",
    "torch._C._disabled_torch_function_impl": "runtime/tensor/stored_tensor.py is dispatched below autograd only",
    "torch._disable_dynamo": "optim/streamed.py keeps Dynamo out of the optimizer's step",
    "torch._fused_sgd_": "optim/plain.py tries whether it updates parameters of 16 bits",
    "torch._ops.OpOverloadPacket": "runtime/tensor/operations.py has handlers for all overloads",
    "torch._ops.OpOverload": "passes/ir/aliases.py reads schemas",
    "torch.ops.aten.mm.default._op": "runtime/execute/binding.py calls operations without OpOverload.__call__",
    "torch.ops.higher_order.with_effects": "passes/activations/segments.py doesn't repeat what has effects",
    "torch._ops.HigherOrderOperator": "passes/ir/aliases.py takes them for anything",
    "torch._dynamo.exc.BackendCompilerFailed": "explain.py unwraps it; frontend/refusal.py carries errors as one",
    "torch._dynamo.exc.BackendCompilerFailed.remove_dynamo_frames": "frontend/refusal.py says what is raised",
    "torch.Tensor._make_wrapper_subclass": "runtime/tensor/stored_tensor.py is such a subclass",
    "torch._subclasses.fake_tensor.FakeTensorMode": "runtime/execute/inductor.py compiles regions without values",
    "torch.UntypedStorage._cdata": "frontend/offload.py and graph_inputs.py find what shares memory",
    "torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE": "passes/activations/keep.py tags with it",
    "torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE": "passes/lowering/recompute_gathers.py tags with it",
}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_function(path: str) -> None:
    parameters, user = FUNCTIONS[path]
    taken = inspect.signature(_find(path, user)).parameters
    assert set(parameters) <= set(taken), _broken(f"{path} takes {tuple(taken)}; {user} gives {parameters}")


@pytest.mark.parametrize("path", NAMES)
def test_name(path: str) -> None:
    _find(path, NAMES[path])


def test_swapping_implementations_keeps_the_object() -> None:
    """frontend/offload.py: an object's value, gradient and history become another's, though weak references exist."""
    import weakref

    parameter, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.ones(3))
    reference = weakref.ref(parameter)
    torch._C._swap_tensor_impl(parameter, other)
    assert parameter.tolist() == [1, 1, 1] and other.tolist() == [0, 0] and reference() is parameter, _broken(
        "_swap_tensor_impl"
    )


@pytest.mark.parametrize("requires_grad", [True, False])
def test_who_else_has_a_parameters_elements_is_counted(requires_grad: bool) -> None:
    """frontend/offload.py: graphs have the tensor or its storage, and other tensors the storage."""
    from zinf_fx.frontend.offload import _is_shared

    broken = _broken("_use_count or _storage_Use_Count (frontend/offload.py)")
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad)
    x = torch.ones(3, requires_grad=True)
    assert not _is_shared(parameter), broken
    for of_another in (lambda: parameter.detach(), lambda: parameter * x, lambda: parameter.detach()[1:].numpy()):
        other = of_another()
        assert _is_shared(parameter), broken
        del other
        assert not _is_shared(parameter), broken


def test_the_node_that_runs_leads_to_the_leaves() -> None:
    """runtime/gradients/leaf.py: from the node of a function to its leaves, and from that of a leaf, while it adds."""
    broken = _broken("the nodes of autograd's graph (runtime/gradients/leaf.py)")
    seen: list[torch.Tensor] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, leaf: torch.Tensor) -> torch.Tensor:
            return leaf * 2

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            ((follower, _),) = torch._C._current_autograd_node().next_functions
            assert isinstance(follower, torch._C._functions.AccumulateGrad), broken
            assert torch._C._will_engine_execute_node(follower), broken
            seen.append(follower.variable)
            return gradient * 2

    class Sum(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func is torch.ops.aten.add_.Tensor:
                seen.append(torch._C._current_autograd_node().variable)
                return args[0]
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.ones(2).as_subclass(Sum)
    Twice.apply(leaf).sum().backward()
    assert len(seen) == 2 and all(variable is leaf for variable in seen), broken
    assert torch._C._current_autograd_node() is None, broken


def test_schemas_say_what_aliases_what() -> None:
    """passes/ir/aliases.py, runtime/tensor/stored_tensor.py: alias sets; those of lists are empty."""
    t = torch.ops.aten.t.default
    result, argument = t._schema.returns[0].alias_info, t._schema.arguments[0].alias_info
    broken = _broken("the alias information of schemas (passes/ir/aliases.py)")
    assert result.before_set == argument.before_set == {"a"} and not argument.is_write, broken
    (result,) = torch.ops.aten.split.Tensor._schema.returns
    assert result.alias_info is not None and result.alias_info.before_set == set(), broken
    assert torch.ops.aten.relu.default._schema.arguments[0].alias_info is None, broken
    copy = torch.ops.aten.copy_.default
    assert copy._schema.is_mutable and copy._schema.arguments[0].alias_info.is_write, broken
    assert torch.Tag.inplace_view in torch.ops.aten.t_.default.tags, broken
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.native_dropout.default.tags, broken


def test_modules_without_code_have_it_when_they_are_called() -> None:
    """passes/ir/rewriting.py: code is written for the graph that a module has then, and for no other before."""
    from zinf_fx.passes.ir.rewriting import copied_module, without_code

    written = []

    class Counted(fx.graph.CodeGen):
        def _gen_python_code(self, *arguments: Any, **options: Any) -> Any:
            written.append(arguments)
            return super()._gen_python_code(*arguments, **options)

    def graph(operation: Callable) -> fx.Graph:
        made = fx.Graph()
        made.output(made.call_function(operation, (made.placeholder("x"), 3)))
        made.set_codegen(Counted())
        return made

    eager = fx.GraphModule({}, graph(operator.add))
    written.clear()
    broken = _broken("modules that are compiled late (passes/ir/rewriting.py)")
    for module in (copied_module(eager), without_code(eager)):
        module.graph = graph(operator.mul)
        module.recompile()
        assert isinstance(module, fx.GraphModule) and not written, broken
        assert module(5) == 15 and len(written) == 1, broken
        written.clear()
    assert eager(5) == 8, broken


@pytest.fixture(scope="module")
def captured() -> SimpleNamespace:
    """Return what capture.py sees of a step: Dynamo's graph, the joint graph, and what the partitioner is told."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    seen = SimpleNamespace(calls=[])

    def partition(joint: fx.GraphModule, inputs: Any, **arguments: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        seen.joint, seen.arguments = fx.GraphModule(joint, joint.graph), arguments
        seen.descriptors = next(iter(joint.graph.find_nodes(op="output"))).meta["desc"]
        sine = next(n for n in joint.graph.nodes if n.target is torch.ops.aten.sin.default)
        sine.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
        for node in joint.graph.nodes:
            if node.target is torch.ops.aten.mm.default:
                node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
        (output,) = joint.graph.find_nodes(op="output")
        gradient = output.args[0][-1]
        with joint.graph.inserting_before(output):
            late = joint.graph.call_function(torch.ops.aten.cos.default, (sine.args[0],))
        late.meta = {"val": gradient.meta["val"], "partitioner_tag": "must_be_in_backward"}
        output.args = ([*output.args[0][:-1], late],)
        seen.forward, seen.backward = min_cut_rematerialization_partition(joint, inputs, **arguments)
        return seen.forward, seen.backward

    def compiler(module: fx.GraphModule, inputs: Any) -> Callable[[list], Any]:
        def run(arguments: list) -> Any:
            seen.calls.append(type(arguments))
            values = list(arguments)
            arguments.clear()
            return module(*values)

        run._boxed_call = True
        return run

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.dynamo = module
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=partition,
            inference_compiler=compiler,
            keep_inference_input_mutations=True,
        )

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.sin(self.layer(x)) @ self.layer.weight).sum()

    torch._dynamo.reset()
    torch.compile(Model(), backend=backend)(torch.randn(2, 3, requires_grad=True)).backward()
    return seen


def test_placeholders_have_a_source(captured: SimpleNamespace) -> None:
    """graph_inputs.py: the name of each parameter comes from where Dynamo found it."""
    sources = [getattr(n, "_dynamo_source", None) for n in captured.dynamo.graph.find_nodes(op="placeholder")]
    names = [source.name() if callable(source.name) else source.name for source in sources]
    expected = "L['self']._modules['layer']._parameters['weight']"
    assert expected in names, _broken(f"Dynamo's sources are {names}; capture._qualified expects {expected}")


def test_sources_tell_what_comes_with_a_call() -> None:
    """graph_inputs.py: a model's buffers, and tensors that are its attributes, are inputs of the graph too."""
    sources = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        sources.extend(node._dynamo_source for node in module.graph.find_nodes(op="placeholder"))
        return module.forward

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))
            self.shift = torch.ones(())

        def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.shift + others["y"]

    torch._dynamo.reset()
    torch.compile(torch.nn.Sequential(Model())[0], backend=backend)(torch.ones(2), y=torch.ones(2))
    local = [source.guard_source is GuardSource.LOCAL for source in sources]
    assert len(sources) == 4 and sum(local) == 2, _broken(f"Source.guard_source of {sources}: {local}")


def test_nodes_are_described(captured: SimpleNamespace) -> None:
    """graph_inputs.py: inputs and gradients are found by AOTAutograd's descriptors."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    primals = [n for n in captured.joint.graph.find_nodes(op="placeholder") if n.name.startswith("primals")]
    broken = _broken("the descriptors in a joint graph's metadata (graph_inputs.origin_of)")
    assert [n.meta["desc"] for n in primals] == [PlainAOTInput(0), PlainAOTInput(1)], broken
    count = captured.arguments["num_fwd_outputs"]
    assert captured.descriptors[count:] == [GradAOTOutput(PlainAOTInput(0)), GradAOTOutput(PlainAOTInput(1))], broken


def test_the_partitioner_obeys_tags(captured: SimpleNamespace) -> None:
    """passes/: what must be saved, recomputed, or done in backward."""
    targets = [[n.target for n in g.graph.nodes] for g in (captured.forward, captured.backward)]
    sine, cosine, mm = torch.ops.aten.sin.default, torch.ops.aten.cos.default, torch.ops.aten.mm.default
    broken = _broken("how the partitioner reads node.meta['recompute'] and ['partitioner_tag']")
    assert sine in targets[0] and sine in targets[1], broken
    saved = next(iter(captured.forward.graph.find_nodes(op="output"))).args[0]
    assert any(n.target is mm for n in saved), broken
    assert cosine in targets[1], broken


def test_compiled_functions_take_a_list_that_they_may_empty(captured: SimpleNamespace) -> None:
    """capture.py, runtime/execute/executor.py: the mark `_boxed_call`."""
    assert captured.calls == [list, list], _broken("the protocol of _boxed_call")


def test_graphs_keep_nodes_with_effects() -> None:
    """ops.py: `has_side_effect` guards a node without users from dead-code elimination."""
    from zinf_fx import ops

    graph = fx.Graph()
    token = graph.placeholder("token")
    graph.call_function(ops.release, (token,))
    graph.call_function(operator.add, (1, 2))
    graph.output(())
    graph.eliminate_dead_code()
    assert [n.target for n in graph.nodes][1:-1] == [ops.release], _broken("torch.fx.node.has_side_effect")


def test_a_failing_backend_shows_its_error() -> None:
    """explain.py: the exception that the backend raised is `inner_exception`."""
    from torch._dynamo.exc import BackendCompilerFailed

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        raise KeyError("mine")

    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as error:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert isinstance(error.value.inner_exception, KeyError), _broken("BackendCompilerFailed.inner_exception")


def test_what_takes_the_place_of_a_failing_backends_error_is_raised() -> None:
    """frontend/refusal.py: Dynamo raises what `remove_dynamo_frames` returns, and compiles again in the next call, from
    torch 2.11 to 2.15."""
    from torch._dynamo.exc import BackendCompilerFailed

    class Refusal(BackendCompilerFailed):
        def remove_dynamo_frames(self) -> Exception:
            return self.inner_exception

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        attempts.append(module)
        raise Refusal(backend, KeyError("mine"), None)

    torch._dynamo.reset()
    attempts: list[fx.GraphModule] = []
    for fullgraph in (False, True):
        call = torch.compile(lambda x: x + 1, backend=backend, fullgraph=fullgraph)
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                call(torch.ones(2))
    assert len(attempts) == 4, _broken("BackendCompilerFailed.remove_dynamo_frames")


def test_nodes_of_compiled_graphs_are_known_by_their_name() -> None:
    """runtime/gradients/leaf.py: of results, and behind the copies to inputs that are written to, from torch 2.11 to
    2.15."""
    from zinf_fx.runtime.gradients.leaf import compiled_nodes

    def function(x: torch.Tensor, w: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        y = x + w
        x.copy_(y)
        view.add_(w)
        return y.sin()

    torch._dynamo.reset()
    w = torch.ones(2, requires_grad=True)
    x, base = w * 2, torch.ones(4)
    y = torch.compile(function, backend="aot_eager")(x, w, base[:2])
    broken = _broken("the name of AOTAutograd's nodes (runtime/gradients/leaf.py)")
    (node,) = compiled_nodes([y])
    assert node is y.grad_fn and type(node).__name__ == "CompiledFunctionBackward", broken
    assert compiled_nodes([x]) == compiled_nodes([base]) == compiled_nodes([base[1:]]) == {node}, broken
    assert not compiled_nodes([w, w * 2, y * 2, torch.ones(2)]) - {node}, broken


def test_inputs_that_overlap_are_refused_in_these_words() -> None:
    """frontend/capture.py knows by AOTAutograd's words, from torch 2.11 to 2.15, that a graph which takes parameters of
    a class of their own writes to one of them."""
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch.testing._internal.two_tensor import TwoTensor

    from zinf_fx.frontend.capture import _is_of_overlap

    def function(parameter: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return parameter * x.sum() * y.sum()

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        try:
            return aot_module_simplified(module, inputs, fw_compiler=lambda module, _: module)
        except RuntimeError as error:
            refused.append(_is_of_overlap(error))
            return module.forward

    torch._dynamo.reset()
    parameter, base, refused = TwoTensor(torch.ones(2), torch.ones(2)), torch.ones(4), []
    torch.compile(function, backend=backend)(parameter, base[:3], base[1:])
    assert refused == [True], _broken("what AOTAutograd says of inputs that overlap (frontend/capture.py)")


def _find(path: str, user: str) -> Any:
    """Return what `path` names, however much of it is a module."""
    parts = path.split(".")
    value = import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = import_module(".".join(parts[:depth]))
        except ImportError:
            pytest.fail(_broken(f"{path} is gone: {user}"))
    return value


def _broken(what: str) -> str:
    return f"torch {torch.__version__} changed what zinf_fx relies on: {what}"


LISTING = [
    member for member in vars(torch.optim).values() if isinstance(member, type) and hasattr(member, "_init_group")
]


@pytest.mark.parametrize("kind", LISTING)
def test_classes_list_parameters_and_gradients_first(kind: type[torch.optim.Optimizer]) -> None:
    """optim/arithmetic.py gives them the lists of the last step again, with other gradients."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    sparse = kind is torch.optim.SparseAdam
    weight.grad = torch.ones(2, 2).to_sparse() if sparse else torch.ones(2, 2)
    optimizer = kind([weight], lr=0.1)
    listed = []

    def note(group: dict[str, Any], *lists: list[object]) -> object:
        result = kind._init_group(optimizer, group, *lists)
        listed.append([list(some) for some in lists])
        return result

    optimizer._init_group = note
    optimizer.step()
    (((parameter,), (gradient,), *_),) = listed
    assert parameter is weight and gradient is weight.grad
