"""Compute regions compiled by Inductor, whose functions are private ones of PyTorch's: nothing else calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from zinf_fx.config import Compute
from zinf_fx.errors import ConfigError

log = logging.getLogger("zinf_fx")

Results = Sequence[torch.Tensor]
Boxed = Callable[[list], Results]
"""Takes a list of inputs, which it empties as it goes."""


def what_computes(compute: Compute, devices: Iterable[torch.device]) -> Literal["eager", "inductor"]:
    """What computes the operators of a graph with inputs on these devices; `compute` as of a `Config`. Where "auto"
    finds a GPU that Inductor can't compile for, a warning says why, once."""
    if compute != "auto":
        return compute
    if not any(device.type == "cuda" for device in devices):
        return "eager"
    if (missing := what_is_missing(on_cuda=True)) is not None:
        _warn_once(f"PyTorch's own kernels compute on the GPU, one operation after the other: Inductor {missing}")
        return "eager"
    return "inductor"


def check_can_compile(devices: Iterable[torch.device]) -> None:
    """Check that there is what Inductor compiles with for these devices. Raises: ConfigError."""
    missing = what_is_missing(on_cuda=any(device.type == "cuda" for device in devices))
    if missing is not None:
        raise ConfigError(f"compute='inductor' {missing}, or leave compute='inductor' out. Nothing was changed")


def what_is_missing(on_cuda: bool) -> str | None:
    """What Inductor needs, and doesn't find, and how to come by it; None: nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return (
            f"needs a C++ compiler, and there is none that works ({error}): install g++, or name another one in the "
            "environment variable CXX"
        )
    if on_cuda and not has_triton():
        return "needs Triton for a CUDA device, and it can't be used here: install triton"
    return None


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


class CompiledRegion:
    """What a region computes: called with a list of its inputs, which it empties as it goes.

    Where Inductor can't compile the region, or its first results are not what they must be, PyTorch's own kernels
    compute it, and a warning says so.
    """

    __name__ = "region"  # which FX asks of whatever a node calls

    def __init__(self, module: fx.GraphModule, where: str) -> None:
        """`where`: the operator, in words. `module`: what it takes and returns are fake tensors in its graph's
        metadata, and its results share memory neither with its inputs nor with each other."""
        self._module, self._where = module, where
        self._expected: Sequence[torch.Tensor] = module.graph.output_node().meta["val"]
        self._run: Boxed = self._first
        try:
            self._compiled: Boxed | None = _compiled(self._module)
        except Exception as error:
            self._run_eagerly(f"Inductor can't compile it: {_brief(error)}")

    @property
    def is_compiled(self) -> bool:
        """Whether what Inductor made is what runs."""
        return self._compiled is not None

    def __call__(self, inputs: list) -> Results:
        return self._run(inputs)

    def _first(self, inputs: list) -> Results:
        """The first run, after which its results are looked at."""
        given, compiled = list(inputs), self._compiled
        assert compiled is not None
        try:
            results = compiled(inputs)
        except Exception as error:
            results = self._eagerly(given)  # which raises what the inputs are to blame for
            self._run_eagerly(f"its compiled code raised {_brief(error)}")
            return results
        if (wrong := self._what_is_wrong(results, given)) is not None:
            self._run_eagerly(wrong)
            return self._eagerly(given)
        numbered = enumerate(zip(results, self._expected, strict=True))
        shapes = {
            n: expected.shape
            for n, (result, expected) in numbered
            if _is_known(expected) and result.shape != expected.shape
        }
        self._run = _in_shapes(compiled, shapes) if shapes else compiled
        return _viewed(results, shapes)

    def _what_is_wrong(self, results: Results, inputs: Sequence[object]) -> str | None:
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs if isinstance(tensor, torch.Tensor)}
        for number, (result, expected) in enumerate(zip(results, self._expected, strict=True)):
            place = result.untyped_storage().data_ptr()
            if result.numel() and place in taken:
                return f"result {number} of its compiled code shares memory with an input or another result"
            taken.add(place)
            if _is_known(expected) and not _can_be_viewed_as(expected, result):
                return (
                    f"result {number} of its compiled code has shape {tuple(result.shape)} and strides "
                    f"{result.stride()}, not {tuple(expected.shape)} and {expected.stride()}"
                )
        return None

    def _run_eagerly(self, why: str) -> None:
        log.warning("%s runs with PyTorch's own kernels, as equal ones do: %s", self._where, why)
        self._compiled, self._run = None, self._eagerly

    def _eagerly(self, inputs: list) -> Results:
        values = tuple(inputs)
        inputs.clear()
        return self._module(*values)


# Equal regions share what was compiled for one of them, for as long as any is there.
_REGIONS: WeakValueDictionary[Hashable, CompiledRegion] = WeakValueDictionary()


def compiled_region(module: fx.GraphModule, text: str, where: str) -> CompiledRegion:
    """A region, compiled. `text` is the same for regions that compute the same of values of the same types; `where`
    names the operator in warnings."""
    # Symbols in the text are those of one graph's sizes.
    key = (text, torch.get_num_threads(), _mode_of(module).shape_env if _has_open_sizes(module) else None)
    region = _REGIONS.get(key)
    if region is None:
        _REGIONS[key] = region = CompiledRegion(module, where)
    return region


def _compiled(module: fx.GraphModule) -> Boxed:
    """What Inductor makes of a graph whose inputs are fake tensors. Sizes that it takes for granted become conditions
    of the graph that Dynamo compiles at the time."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    mode = _mode_of(module)
    # Of a region with open sizes, its files would tell conditions of the whole graph, which are not to be had there.
    files = config.patch(fx_graph_cache=config.fx_graph_cache and not _has_open_sizes(module))
    compute = torch.func.functionalize(_LaidOut(module).run)
    with tracing(TracingContext(mode)), torch.no_grad(), files:
        with mode, enable_python_dispatcher():
            inputs = [_another(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
            traced = make_fx(compute, select_decomp_table())(*inputs)
        results = traced.graph.output_node()
        returned: Any = results.args[0]
        results.meta["user_visible_output_idxs"] = list(range(len(returned)))  # they keep their strides
        return compile_fx_inner(traced, inputs)


def _mode_of(module: fx.GraphModule) -> FakeTensorMode:
    mode = detect_fake_mode([node.meta["val"] for node in module.graph.nodes])
    assert mode is not None
    return mode


def _has_open_sizes(module: fx.GraphModule) -> bool:
    """Whether the region is for tensors of any size."""
    values = [value for node in module.graph.nodes for value in tree_leaves(node.meta["val"])]
    sizes = (size for value in values if isinstance(value, torch.Tensor) for size in (*value.shape, *value.stride()))
    return any(isinstance(value, torch.SymInt) for value in (*values, *sizes))


def _another(value: torch.Tensor | torch.SymInt) -> torch.Tensor | torch.SymInt:
    """A fake tensor like another one, which nodes of a graph may share: what is recorded is told apart by objects."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class _LaidOut(fx.Interpreter):
    """Runs a graph in which every value has the strides that it was captured with, for which the graph's views were
    made: the operations of which Inductor makes another may give other ones."""

    def run_node(self, n: fx.Node) -> Any:
        result, expected = super().run_node(n), n.meta["val"]
        if not isinstance(expected, torch.Tensor) or _lies_as(expected, result):
            return result
        outermost_first = sorted(range(result.dim()), key=lambda dim: -expected.stride(dim))
        back = [outermost_first.index(dim) for dim in range(result.dim())]
        return result.permute(outermost_first).contiguous().permute(back)


def _is_known(expected: torch.Tensor) -> bool:
    """Whether all sizes and strides are numbers, of which none is left open."""
    return all(isinstance(size, int) for size in (*expected.shape, *expected.stride()))


def _can_be_viewed_as(expected: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the elements of a result have the places that are expected. It may have one dimension where more
    are expected, one behind the other: of a reduction whose dimensions are kept, fused with one over other dimensions,
    Inductor's code for a GPU returns the elements so (`triton.mix_order_reduction` of PyTorch 2.11)."""
    if result.shape == expected.shape:
        return _lies_as(expected, result)
    flat = result.dim() == 1 and result.numel() == expected.numel()
    return flat and result.is_contiguous() and expected.is_contiguous()


def _viewed(results: Results, shapes: Mapping[int, torch.Size]) -> Results:
    """Results, those with the numbers in `shapes` in other shapes."""
    return [result.view(shapes[number]) if number in shapes else result for number, result in enumerate(results)]


def _in_shapes(compiled: Boxed, shapes: Mapping[int, torch.Size]) -> Boxed:
    return lambda inputs: _viewed(compiled(inputs), shapes)


def _lies_as(expected: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the elements of two tensors of one shape have the same places."""
    strides = zip(expected.shape, expected.stride(), result.stride(), strict=True)
    return all(size == 1 or wanted == given for size, wanted, given in strides)


def _brief(error: Exception) -> str:
    """The type and the first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
