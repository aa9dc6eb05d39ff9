"""Operations that are run in another way on stored tensors than on their gathered values, such as writes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter, tree_map_only

from zinf_fx import ops
from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.memory.process import pass_through
from zinf_fx.runtime.tensor.quantised import Quantised, quantised_bytes
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.views import LAZY, Base, ViewStep, note_written, replayed

aten = torch.ops.aten


class Operand(torch.Tensor):
    """What operations know of a stored tensor: each is a `StoredTensor`, the class that has them run here."""

    token: torch.Tensor
    base: Base
    views: tuple[ViewStep, ...]

    if TYPE_CHECKING:  # PyTorch's stub lets no subclass be made of anything else than `torch.Tensor` is

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @property
    def captured(self) -> bool:
        """Whether this is a stand-in inside a graph that is being captured."""
        return type(self.token) is not torch.Tensor

    @property
    @abstractmethod
    def stored(self) -> TensorStorage:
        """The storage behind this tensor. Raises: StoredTensorError inside a captured graph, where there is none."""

    @abstractmethod
    def gathered(self) -> torch.Tensor:
        """Return the value; while a graph is captured, its gather. Nobody may write to it: it may be the bytes
        themselves."""


Handler = Callable[[torch._ops.OpOverload, tuple, dict], Any]

HANDLERS: dict[torch._ops.OpOverload, Handler] = {}


def handle(operation: torch._ops.OpOverloadPacket, handler: Handler) -> None:
    """Let `handler(overload, args, kwargs)` run `operation` on stored tensors, in place of gathering their values.

    It returns what the operation does, or NotImplemented to leave a case to the ordinary way. Inside a graph that is
    being captured it isn't asked.
    """
    HANDLERS.update((getattr(operation, name), handler) for name in operation.overloads())


SAME_VALUE = {aten.detach.default, aten.alias.default}
# Results depend on shape, dtype and device alone. (Optimizers take some over: `handle`.)
_METADATA_ONLY = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
# Every element is overwritten, so that the present value need not be read.
OVERWRITES = {
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.normal_.default,
    aten.uniform_.default,
}


# Operations on lists whose elements don't depend on each other.
HORIZONTAL = ("aten::_foreach_", "aten::_amp_foreach_")


def in_autocast() -> bool:
    """Whether an autocast context is open. `torch.is_autocast_enabled` says no while autocast's own casts run."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting > 1


def is_view(func: Any) -> bool:
    arguments = func._schema.arguments
    if not arguments:
        return False
    alias = arguments[0].alias_info
    return alias is not None and not alias.is_write and all(r.alias_info is not None for r in func._schema.returns)


def needs_no_value(func: Any, kwargs: dict) -> bool:
    """Whether the result depends on shape, dtype and device alone, so that no value is gathered. That is all that a
    copy on the meta device has."""
    if func is aten._to_copy.default:
        return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"
    return func in _METADATA_ONLY


def decodes(tensor: torch.Tensor, kwargs: dict) -> bool:
    """Whether a conversion makes numbers of integers: `Module.to` doesn't, and what does computes with them."""
    return not tensor.is_floating_point() and (kwargs.get("dtype") or tensor.dtype).is_floating_point


# What `tensor.data = other` is in a graph: from torch 2.14, an operation of its own.
_ASSIGN_DATA = tuple(getattr(aten, name).default for name in ("shallow_copy_data_",) if hasattr(aten, name))
# After which the first tensor has the elements of the second.
_TAKE_OVER = (aten.copy_.default, aten.set_.source_Tensor, *_ASSIGN_DATA)


def mutated_arguments(func: Any, args: tuple, kwargs: dict) -> list[Operand]:
    """Return the stored tensors that `func` writes to."""
    if not func._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [t for t in tree_iter(value) if isinstance(t, Operand)]
    return written


def write(func: Any, args: tuple, kwargs: dict, mutated: list[Operand]) -> Any:
    """Run `func`, which writes to the stored tensors `mutated`."""
    if func in _TAKE_OVER and _is_same(*args[:2]):  # load_state_dict() of what was loaded in place; `w.data = w`
        return args[0]
    if mutated[0].captured:
        return _write_in_graph(func, args, kwargs, mutated)
    with RUNNING.turn():  # two threads that write through at a time would lose a write, and take room from each other
        return _write_through(func, args, kwargs, mutated)


def _write_through(func: Any, args: tuple, kwargs: dict, mutated: list[Operand]) -> Any:
    """Run `func` on gathered values, then write what it changed back to the store."""
    for tensor in mutated:
        _check_writable(tensor, func)
    # `out=` may resize its tensor, which must not happen to resident bytes.
    in_scratch = any(argument.is_out for argument in func._schema.arguments)
    overwrites = func in OVERWRITES and not any(a is args[0] for a in args[1:])
    # A value that is copied over all of a quantised tensor may be mostly what it has (`gathered` with `modify`).
    quantises_all = overwrites and func is not aten.copy_.default
    bases: dict[int, torch.Tensor] = {}  # by storage key: two views of one parameter change one value
    packed: dict[int, torch.Tensor] = {}  # likewise: the bytes of quantised ones, unless all of them are replaced
    values: dict[int, torch.Tensor] = {}  # by tensor
    for tensor in mutated:
        storage = tensor.stored
        quantised = Quantised.of(tensor.views)
        if storage.key not in bases:
            if quantises_all and quantised is not None and len(tensor.views) == 1:
                bases[storage.key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            elif quantised is not None:
                packed[storage.key] = storage.value().view(tensor.base.shape)
                bases[storage.key] = tensor.views[0](packed[storage.key])
            elif storage.in_place:
                flat = storage.value().clone() if in_scratch else storage.value()
                bases[storage.key] = flat.view(tensor.base.shape)
            elif overwrites and not tensor.views:
                pass_through(tensor.nbytes)
                bases[storage.key] = torch.empty(tensor.base.shape, dtype=storage.dtype, device=tensor.device)
            else:
                bases[storage.key] = storage.value().view(tensor.base.shape)
        values[id(tensor)] = replayed(tensor.views[quantised is not None :], bases[storage.key])

    def substitute(tensor: Operand) -> torch.Tensor:
        return values[id(tensor)] if id(tensor) in values else tensor.gathered()

    new_args, new_kwargs = tree_map_only(Operand, substitute, (args, kwargs))
    result = func(*new_args, **new_kwargs)
    for tensor in mutated:
        if values[id(tensor)].shape != tensor.shape:
            raise _refusal(func, tensor, f"give it the shape {tuple(values[id(tensor)].shape)}")
    for tensor in mutated:
        storage = tensor.stored
        base, quantised = bases.pop(storage.key, None), Quantised.of(tensor.views)
        if base is None:
            continue
        storage.take_first(base)
        storage.shard.agreed = storage.takes_first or storage.shard.ranks.size == 1
        if quantised is not None:
            storage.set(quantised_bytes(base, quantised.format, packed.pop(storage.key, None)))
        else:
            storage.bytes.written() if storage.in_place and not in_scratch else storage.set(base)
    originals = {id(values[id(tensor)]): tensor for tensor in mutated}
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)


def _is_same(target: object, source: object) -> bool:
    """Whether both show the same elements of one stored tensor."""
    if not isinstance(target, Operand) or not isinstance(source, Operand):
        return False
    return target.token is source.token and target.views == source.views


def _write_in_graph(func: Any, args: tuple, kwargs: dict, mutated: list[Operand]) -> Any:
    """Let the graph that is being captured compute what `func` writes, and the token stand for that from now on.

    PyTorch functionalizes a write to the token as one to any input: what the graph does later sees the new token, and
    in the end the graph copies the last one into its input.
    """
    for tensor in mutated:
        _check_writable(tensor, func)
    with torch.no_grad():
        if func is aten.copy_.default and all(isinstance(getattr(t, "token", None), FakeTensor) for t in args[:2]):
            args[0].token.copy_(args[1].token)  # what ends the graph
            return args[0]
        values = {id(tensor): tensor.gathered() for tensor in mutated}
        new_args, new_kwargs = tree_map_only(
            Operand, lambda t: values[id(t)] if id(t) in values else t.gathered(), (args, kwargs)
        )
        result = func(*new_args, **new_kwargs)
        for tensor in mutated:
            tensor.token.copy_(ops.written(values[id(tensor)]))
            note_written(tensor)
    originals = {id(values[id(tensor)]): tensor for tensor in mutated}
    return tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), result)


def _check_writable(tensor: Operand, func: Any) -> None:
    """Raises: StoredTensorError for a write that can't reach the store."""
    shapes_anew = func in _ASSIGN_DATA or func._schema.name in ("aten::set_", "aten::resize_")
    if torch.Tag.inplace_view in func.tags or shapes_anew:
        raise _refusal(func, tensor, "change its shape or memory")
    if tensor.captured and (tensor.views or tensor.base.is_part):
        what = "a DTensor whose parts are stored" if tensor.base.is_part else "a view of a stored tensor"
        raise StoredTensorError(
            f"{func} writes to {what}, of shape {tuple(tensor.shape)}, inside a compiled graph, where the write would "
            "be lost: move it out of the compiled region"
        )
    if any(step.op in LAZY for step in tensor.views):
        raise StoredTensorError(
            f"{func} writes to a conjugate of a stored tensor of shape {tuple(tensor.shape)}, which holds no value of "
            "its own: write the conjugate of the value to the tensor itself, or clone() it first"
        )
    if any(step.op is aten._to_copy.default for step in tensor.views):
        raise StoredTensorError(
            f"{func} writes to a copy of a stored tensor of shape {tuple(tensor.shape)} that was converted under "
            "autocast, and which holds no value of its own: clone() it first"
        )


def _refusal(func: Any, tensor: torch.Tensor, what: str) -> StoredTensorError:
    return StoredTensorError(
        f"{func} on a stored tensor of shape {tuple(tensor.shape)} would {what}: make a new parameter instead"
    )


def foreach(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run a horizontally fused operation, one element at a time: the values are never in memory together."""
    length = len(args[0])

    def element(value: Any, index: int) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == length:
            return value[index : index + 1]  # `scalars`
        return [value[index]] if isinstance(value, (list, tuple)) and len(value) == length else value

    results = []
    for index in range(length):
        one_args = [element(a, index) for a in args]
        one_kwargs = {k: element(v, index) for k, v in kwargs.items()}
        mutated = mutated_arguments(func, tuple(one_args), one_kwargs)
        if mutated:
            write(func, tuple(one_args), one_kwargs, mutated)
        else:
            one_args, one_kwargs = tree_map_only(Operand, lambda t: t.gathered(), (one_args, one_kwargs))
            results.append(func(*one_args, **one_kwargs))
    if not results or results[0] is None:
        return None
    if len(func._schema.returns) == 1:
        return [r for (r,) in results]
    return tuple([r[k][0] for r in results] for k in range(len(func._schema.returns)))
