"""`StoredTensor`: a torch.Tensor with an honest shape, dtype and device, whose bytes live in a TensorStorage.

Eager operations gather the full value, compute, and drop it; mutating ones write through. While a graph is captured
the token is a fake tensor, so that the same dispatch puts a `zinf.gather` node into the graph instead.

A view of a stored tensor is again a stored tensor: the same storage, and the view operations to replay on its value.
So autograd saves wrappers, never values, and `p.data[i].zero_()` reaches the bytes. Autocast's casts are such steps
too, because autocast caches them and autograd saves them.
"""

from __future__ import annotations

import copy
import io
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, SupportsIndex, TypeVar

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from zinf_fx import ops
from zinf_fx.cycles import collect_given_up_captures
from zinf_fx.errors import StoredTensorError
from zinf_fx.interrupts import held_back
from zinf_fx.plan.sharding import shards_of
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.memory.device import check_device, device_of
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.distributed_checkpoint import Checkpointable
from zinf_fx.runtime.tensor.eager_reads import note_eager_read
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.operations import (
    HANDLERS,
    HORIZONTAL,
    SAME_VALUE,
    decodes,
    foreach,
    in_autocast,
    is_view,
    mutated_arguments,
    needs_no_value,
    write,
)
from zinf_fx.runtime.tensor.pending_gradient import gradient_hook
from zinf_fx.runtime.tensor.quantised import Form, Quantised, check_trainable
from zinf_fx.runtime.tensor.storage import TensorStorage, spilled
from zinf_fx.runtime.tensor.views import (
    Base,
    TensorMetadata,
    ViewStep,
    memory_of,
    note_gathered,
    replayed,
    without_values,
)

if TYPE_CHECKING:
    import numpy

aten = torch.ops.aten

T = TypeVar("T", bound=torch.Tensor)
S = TypeVar("S", bound="StoredTensor")

# Properties, which PyTorch's stub shows as their values.
_DATA: Any = torch.Tensor.data
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class StoredTensor(Checkpointable):
    """A tensor whose bytes live in the store. Made by `offload`, `offloading`, the executor and the optimizers."""

    _storage: TensorStorage | None
    _in_memory: tuple[torch.Tensor, torch.UntypedStorage]  # whole, and this one's memory, once data_ptr() was called
    _local_of: StoredTensor | None = None  # of the local tensor of a DTensor: what stands for it
    _kind: TensorMetadata | None = None  # for __tensor_flatten__
    buffer_place: object = None  # that of its storage
    _carried: tuple[str, ...] = ()  # attributes that say what the bytes mean, where a library's modules know
    expects_gradient = False  # becomes true on an object, and goes where its implementation goes
    # What FullyShardedDataParallel calls divided over ranks already, it leaves alone, and has no values of in memory.
    _fsdp_flattened = True

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    def __new__(
        cls,
        token: torch.Tensor,
        base: Base,
        views: tuple[ViewStep, ...] = (),
        like: torch.Tensor | None = None,
        storage: TensorStorage | None = None,
        requires_grad: bool = False,
    ) -> Self:
        """`like` has the metadata of the value after `views`; default: contiguous, as `base`."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            base.shape if like is None else like.shape,
            strides=None if like is None else like.stride(),
            storage_offset=None if like is None else like.storage_offset(),
            dtype=base.dtype if like is None else like.dtype,
            device=base.device,
            requires_grad=requires_grad,
        )
        tensor.token, tensor.base, tensor.views = token, base, views
        if not tensor.captured:
            torch._C._set_throw_on_mutable_data_ptr(tensor)  # to_dlpack() would give the address, which is null
        tensor._storage = storage  # keeps the bytes alive; a fake token has none
        if storage is not None and storage.buffer_place is not None:
            tensor.buffer_place = storage.buffer_place()
        return tensor

    @classmethod
    def of(
        cls,
        storage: TensorStorage,
        shape: Iterable[int],
        device: torch.device,
        requires_grad: bool = False,
        quantised: Quantised | None = None,
    ) -> Self:
        """Return the tensor of `shape` whose bytes are `storage`'s. `quantised` says how these are to be read as its
        values."""
        shape = torch.Size(shape)
        stored_shape = shape if quantised is None else torch.Size(quantised.bytes_shape(shape))
        device, is_part = torch.device(device), bool(storage.shard.part_of)
        base = Base(stored_shape, storage.dtype, device, storage.tier, storage.config, is_part)
        if quantised is None:
            return cls(storage.token, base, storage=storage, requires_grad=requires_grad)
        return cls(storage.token, base, quantised.steps(shape), quantised.like(shape), storage)

    # -- traceable wrapper subclass: identity goes in the token, never in the context -------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], TensorMetadata]:
        kind = self._kind
        if kind is None:
            self._kind = kind = TensorMetadata.of(self.base, self.dtype, self.views)
        return ["token"], kind

    @staticmethod
    def __tensor_unflatten__(inner: dict, kind: TensorMetadata, outer_size: Any, outer_stride: Any) -> StoredTensor:
        base, dtype, views = kind
        if not views:
            return StoredTensor(inner["token"], base._replace(shape=outer_size))
        like = torch.empty_strided(outer_size, outer_stride, dtype=dtype, device="meta")
        return StoredTensor(inner["token"], base, views, like)

    # -- for users ---------------------------------------------------------------------------------------------------

    @property
    def stored(self) -> TensorStorage:
        """The storage behind this tensor. Raises: StoredTensorError inside a captured graph, where there is none."""
        if self._storage is None:
            self._storage = storage = TensorStorage.of_token(self.token)
            self.buffer_place = storage.buffer_place and storage.buffer_place()
        return self._storage

    def full_tensor(self) -> torch.Tensor:
        """Return the full value as an ordinary tensor that the caller owns."""
        with torch.no_grad():
            value = self.gathered()
            return value.clone() if self.stored.in_place else value

    def to_local(self) -> torch.Tensor:
        """Return this rank's shard as an ordinary tensor: flat, and without padding, where the tensor is partitioned;
        else the full value."""
        storage = self.stored
        if not storage.shard.partitioned:
            return self.full_tensor()
        if self.views:
            raise StoredTensorError("to_local() of a view of a partitioned tensor: ask for that of the whole tensor")
        with storage.brought(storage.settled()) as held:
            own = [held[storage.shard.position(part.start) :][: len(part)] for part in storage.shard.own]
            return torch.cat(own)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = "StoredParameter" if isinstance(self, torch.nn.Parameter) else "StoredTensor"
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}', tier='{self.base.tier}')"

    def __deepcopy__(self, memo: dict) -> StoredTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise StoredTensorError("only leaves can be deep-copied: this stored tensor is the result of a computation")
        twin = memo[id(self)] = stored_again(self, self.dtype, self.device)
        twin.requires_grad_(self.requires_grad)
        carry(twin, carried(self), of=self)
        if isinstance(self, torch.nn.Parameter):
            as_parameter(twin)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Pickles as the ordinary tensor or parameter that it stands for, so files load without zinf_fx.

        torch.multiprocessing would share an ordinary tensor's memory with a process that is being spawned, but this
        value's is gone before that begins: its bytes are sent.
        """
        storage = self.stored
        if storage.spills and len(self.views) <= (self.quantised is not None):  # torch.save keeps all until the last
            whole = spilled(self.gathered().view(-1), storage.config.stores[0]) if self.views else storage.spilled()
            value = whole.view(self.shape)
        else:
            value = self.full_tensor()
        if value.untyped_storage().nbytes() > value.nbytes:  # padding of shards, which would be written too
            value = value.clone()
        value.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            value = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
        if get_spawning_popen() is not None:
            torch.save(value, file := io.BytesIO())
            return torch.load, (io.BytesIO(file.getvalue()),)
        return value.__reduce_ex__(protocol)

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor; but a value that is assigned is copied into the store.

        A parameter takes a value of another shape or dtype too, as it does when embeddings are resized.
        """
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, StoredTensor):
            if value.token is self.token and value.views == self.views:
                return
            if value.stored.label is not None:
                raise StoredTensorError(
                    f"a stored tensor can't share the bytes of {value.stored.label} by assignment to .data: copy them "
                    "with copy_(), or tie the modules by assigning the one parameter to both"
                )
            value = value.gathered()  # of a likeness, say
        with torch.no_grad():
            if value.shape != self.shape or value.dtype != self.dtype:
                self._become(value)
            else:
                self.data.copy_(value)

    def _become(self, value: torch.Tensor) -> None:
        """Take the shape, dtype and elements of an ordinary tensor, on the same tier and partitioned alike.

        Raises: StoredTensorError for what is no parameter, is divided by tensor parallelism, or has a gradient, which
        would no longer fit; StoreError. This is as before then.
        """
        storage, shape = self.stored, tuple(self.shape)
        what = f".data of a stored tensor of shape {shape} and {self.dtype} can't become a tensor of "
        what += f"shape {tuple(value.shape)} and {value.dtype}"
        whole = isinstance(self, torch.nn.Parameter) and self._local_of is None and not self.views
        if not whole or storage.shard.part_of or value.layout != torch.strided or value.device != self.device:
            raise StoredTensorError(f"{what}: make a new parameter instead")
        if self.grad is not None:
            raise StoredTensorError(f"{what} while it has a gradient: set that to None first")
        if storage.takes_first:
            value = value.clone()
            storage.take_first(value)
        with torch.inference_mode(False):
            twin = as_parameter(stored_again(self, value.dtype, self.device, value)).requires_grad_(self.requires_grad)
        twin.stored.shard.agreed = storage.takes_first or storage.shard.ranks.size == 1
        take_implementation(self, twin)

    # -- dispatch ----------------------------------------------------------------------------------------------------

    @classmethod
    @torch._disable_dynamo  # eager code between two graphs comes here under Dynamo's eyes
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in SAME_VALUE:
            return args[0]._twin()
        if func in HANDLERS and not any(t.captured for t in tree_iter((args, kwargs)) if isinstance(t, StoredTensor)):
            with held_back:
                result = HANDLERS[func](func, args, kwargs)
            if result is not NotImplemented:
                return result
        mutated = mutated_arguments(func, args, kwargs)
        if isinstance(args[0] if args else None, StoredTensor) and not mutated:
            if needs_no_value(func, kwargs):
                device = kwargs.get("device") or args[0].device
                return func(without_values(args[0]), *args[1:], **{**kwargs, "device": device})
            if not args[0].captured:
                if is_view(func) or (func is aten._to_copy.default and in_autocast()):
                    return args[0]._view(func, args[1:], kwargs)
                if func is aten._to_copy.default and not torch.is_grad_enabled() and not decodes(args[0], kwargs):
                    return args[0]._convert(kwargs)
        if args and isinstance(args[0], (list, tuple)) and func._schema.name.startswith(HORIZONTAL):
            return foreach(func, args, kwargs)
        if mutated:
            return write(func, args, kwargs, mutated)
        for argument in args:
            if isinstance(argument, StoredTensor) and not argument.captured:
                note_eager_read(func, argument.stored)
        new_args, new_kwargs = tree_map_only(StoredTensor, StoredTensor.gathered, (args, kwargs))
        return func(*new_args, **new_kwargs)

    @property
    def quantised(self) -> Quantised | None:
        """How the stored bytes become values, where they are of a quantised format."""
        return Quantised.of(self.views)

    @property
    def requires_grad(self) -> bool:
        """As of any tensor. Setting it raises StoredTensorError where what is quantised, or in a base, would train."""
        return _REQUIRES_GRAD.__get__(self)

    @requires_grad.setter
    @torch._disable_dynamo  # called between two graphs, it would be captured, which torch 2.14 fails to do
    def requires_grad(self, requires_grad: bool) -> None:
        if requires_grad:
            check_trainable(
                self.shape, self.quantised, self._storage is not None and self._storage.bytes.allocation.is_read_only
            )
        _REQUIRES_GRAD.__set__(self, requires_grad)

    # PyTorch documents this name of the argument; its stub has another.
    def requires_grad_(self, requires_grad: bool = True) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of any tensor. Raises: StoredTensorError, as setting `requires_grad` does."""
        self.requires_grad = requires_grad
        return self

    def expect_gradient(self) -> None:
        """Prepare for a use that autograd may record: what arrives as `grad` will go to its tier, after the user's
        hooks.

        Hooks belong to the Python object in part. An implementation that was swapped in (by `offload`, or by
        Module.to()) doesn't know them until they are assigned again.
        """
        if self._local_of is not None:
            self._local_of.expect_gradient()
        if self.expects_gradient or self.views or self.captured or not (self.requires_grad and self.is_leaf):
            return
        with RUNNING.turn():
            if not self.expects_gradient:
                hook_gradient(self, None if self._keeps_gradient() else gradient_hook)
                self.expects_gradient = True

    def _keeps_gradient(self) -> bool:
        """Whether a gradient that autograd leaves in `grad` is where it is to be, and nobody waits for it."""
        storage = self.stored
        on_device = storage.has_plain_gradient and storage.placement.gradients == "device"
        return on_device and not storage.gradient.followed

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether the user registered hooks on the gradient, which only autograd can run."""
        before, after = self._backward_hooks or {}, self._post_accumulate_grad_hooks or {}
        return bool(before) or bool(after and list(after.values()) != [gradient_hook])

    # What code outside of PyTorch asks a tensor for.

    def storage(self) -> TensorStorage:
        """Return what has `data_ptr()` and `size()`, as of any tensor: that of a stored tensor is its address in the
        store."""
        return self.stored

    def data_ptr(self) -> int:
        """Return the address of the value in memory, to be read, as of any tensor: safetensors saves through it.

        It is gathered for that, and kept as long as this object; what is written there doesn't reach the store. Tensors
        of one storage share the memory.
        """
        if self.captured:
            return super().data_ptr()
        with torch.no_grad():
            whole = self.stored.snapshot()
            value = self.replayed(whole.view(self.base.shape))
        self._in_memory = whole, memory_of(whole, value)
        return value.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return that of the memory whose address `data_ptr()` gave last: torch.distributed.checkpoint.async_save
        copies it. It has no bytes where nobody asked for an address."""
        held = self.__dict__.get("_in_memory")
        return super().untyped_storage() if held is None else held[1]

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        """As of any tensor, of a copy of the value: what is written there doesn't reach the store."""
        return self.full_tensor().requires_grad_(self.requires_grad).numpy(force=force)

    def tolist(self) -> list:
        """As of any tensor."""
        return self.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        """As of any tensor: one without dimensions is formatted as a number."""
        return format(self.item(), spec) if self.dim() == 0 and not self.captured else super().__format__(spec)

    def _has_no_memory(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StoredTensorError(
            f"a stored tensor of shape {tuple(self.shape)} has no memory of its own that could be shared or changed "
            "from outside PyTorch: use full_tensor(), or zinf_fx.gathered() with modify=True"
        )

    # PyTorch would go through the address of the first element, which is null.
    apply_ = share_memory_ = __dlpack__ = _has_no_memory

    @property
    def parameter(self) -> StoredTensor:
        """What stands for this where zinf works on parameters: see [Note: DTensor parameters]."""
        return self if self._local_of is None else self._local_of

    @parameter.setter
    def parameter(self, leaf: StoredTensor) -> None:
        self._local_of = leaf

    @property
    def whole(self) -> torch.Tensor:
        """The parameter that users have: this, unless it stands for a DTensor."""
        return self

    def hold(self) -> None:
        """Keep what users have until `follow`: see [Note: DTensor parameters]."""

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a state of this parameter as users see it."""
        return tensor

    def gathered(self) -> torch.Tensor:
        """Return the value; while a graph is captured, its gather. Nobody may write to it: it may be the bytes
        themselves."""
        self.expect_gradient()
        if self.captured:
            note_gathered(self)
        elif self.views and self.stored.read_in_parts and (span := _span(self)) is not None:
            elements, shown = span
            (part,) = self.stored.elements([elements])
            return part.to(self.device).as_strided(shown.shape, shown.stride())
        return self.replayed(ops.gathered(self.token, self.base.shape, self.base.dtype, self.base.device))

    def replayed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the views of this tensor, on `value`, which is that of the base."""
        return replayed(self.views, value)

    def _twin(self) -> StoredTensor:
        if weakref.getweakrefs(self) and not self.captured:
            collect_given_up_captures()  # `Module.to` swaps the parameter for its twin
        return self._handed_on(self._seen(self.views, self if self.views else None))

    def _seen(self, views: tuple[ViewStep, ...], like: torch.Tensor | None) -> StoredTensor:
        """Return another view of the same bytes: in inference mode, of a tensor from outside of it, one as from
        outside."""
        with torch.inference_mode(torch.is_inference_mode_enabled() and self.is_inference()):
            return StoredTensor(self.token, self.base, views, like, self._storage)

    def _handed_on(self, twin: StoredTensor) -> StoredTensor:
        """Return `twin`, which may take this tensor's place in a DTensor parameter: see [Note: DTensor parameters]."""
        carry(twin, carried(self), of=self)
        if self._local_of is not None:
            self._local_of.hold()
            twin.parameter = self._local_of
        return twin

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self.expect_gradient()
        results = func(without_values(self), *args, **kwargs)
        if func is aten.view.default and results.shape == self.shape:  # all of it, as DTensor.to_local() gives it
            return self._twin()
        frozen = tuple(tuple(a) if isinstance(a, list) else a for a in args)

        def wrap(like: torch.Tensor, output: int | None) -> StoredTensor:
            return self._seen((*self.views, ViewStep(func, frozen, tuple(kwargs.items()), output)), like)

        if isinstance(results, (list, tuple)):
            return [wrap(like, number) for number, like in enumerate(results)]
        return wrap(results, None)

    def _convert(self, kwargs: dict) -> StoredTensor:
        """Return what Module.to() makes of this tensor: another stored tensor on the same tier."""
        dtype = kwargs.get("dtype") or self.dtype
        target = torch.device(kwargs.get("device") or self.device)
        check_device(target, "this stored tensor")
        collect_given_up_captures()
        return self._handed_on(stored_again(self, dtype, target))


def _span(tensor: StoredTensor) -> tuple[range, torch.Tensor] | None:
    """Return the range of the base's elements from the first to the last that a view shows, and a tensor without values
    that has the view's shape and strides. None where the range is more than half of the base, or where a step of the
    view computes something, as conversions do that are steps in inference mode."""
    base = tensor.base
    if not tensor.numel() or tensor.dtype != base.dtype:
        return None
    whole = torch.empty(base.shape, dtype=base.dtype, device="meta")
    shown = tensor.replayed(whole)
    if shown.untyped_storage() is not whole.untyped_storage():
        return None
    first = shown.storage_offset()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shown.shape, shown.stride(), strict=True))
    return (range(first, first + reach), shown) if 2 * reach <= whole.numel() else None


@held_back
def stored_again(tensor: S, dtype: torch.dtype, device: torch.device, value: torch.Tensor | None = None) -> S:
    """Make a stored tensor with the value of this one, or with `value` of any shape. Of a quantised one, the bytes are
    the same, and give values of `dtype`."""
    storage, shard, target = tensor.stored, tensor.stored.shard, device_of(device)
    quantised = Quantised.of(tensor.views)
    if quantised is not None and tensor.views == quantised.steps(tensor.shape) and value is None:
        quantised = quantised._replace(dtype=dtype)
        form, shape, shards = Form(tensor.base.shape, tensor.base.dtype, quantised), tensor.shape, shard.shards
        source = storage.value()
    else:
        shape = tensor.shape if value is None else value.shape
        form, shards = Form(shape, dtype), shard.shards
        if dtype != tensor.base.dtype or tensor.views or value is not None:
            shards = shards_of(shape, dtype, shard.ranks.shards, storage.config, shards.owner)
        source = tensor.gathered() if value is None else value
    mine = LocalShard(shards, shard.ranks, shard.partitioned)
    twin = TensorStorage(storage.config, mine, Allocation(storage.tiers, storage.tier, [mine.held], form.dtype, target))
    twin.set(source)
    twin.shard.take_state(shard)
    twin.gradient_state = storage.gradient_state
    twin.label = storage.label
    return type(tensor).of(twin, shape, target.torch_device, quantised=form.quantised)


def stored_as(tensor: S, quantised: Quantised) -> S:
    """Make a stored tensor without a value yet, of the shape of this one, whose bytes are to become values in this way.

    Raises: StoreError when there is no room.
    """
    storage, shard = tensor.stored, tensor.stored.shard
    shape, dtype = quantised.bytes_shape(tensor.shape), torch.uint8
    shards = shards_of(shape, dtype, shard.ranks.shards, storage.config, shard.shards.owner)
    mine = LocalShard(shards, shard.ranks, shard.partitioned)
    allocation = Allocation(storage.tiers, storage.tier, [mine.held], dtype, device_of(tensor.device))
    twin = TensorStorage(storage.config, mine, allocation)
    twin.label = storage.label
    return type(tensor).of(twin, tensor.shape, tensor.device, quantised=quantised)


def bytes_of(tensor: S) -> S:
    """Return the matrix of bytes of a quantised stored tensor, as a stored tensor."""
    return type(tensor)(tensor.token, tensor.base, storage=tensor.stored)


def hook_gradient(tensor: torch.Tensor, take: Callable[[torch.Tensor], None] | None) -> None:
    """Let `take`, if anything, see each gradient that autograd leaves in a leaf. Its present implementation may not
    know the hooks yet that were registered before."""
    tensor._backward_hooks = tensor._backward_hooks
    hooks = tensor._post_accumulate_grad_hooks
    if hooks is not None or take is not None:
        tensor._post_accumulate_grad_hooks = hooks = OrderedDict() if hooks is None else hooks
    if take is not None and take not in hooks.values():
        tensor.register_post_accumulate_grad_hook(take)


def take_implementation(tensor: torch.Tensor, twin: StoredTensor) -> None:
    """Give the object `tensor` the implementation, class and attributes of `twin`, which nothing else may use."""
    torch._C._swap_tensor_impl(tensor, twin)
    tensor.__class__ = type(twin)
    assert isinstance(tensor, StoredTensor)
    attributes = vars(tensor)
    for known in ("_in_memory", "_kind"):
        attributes.pop(known, None)
    attributes.update(vars(twin))
    tensor.expects_gradient = False  # autograd doesn't know the hooks of this implementation yet
    tensor.expect_gradient()


def as_parameter(tensor: T) -> T:
    """Give `tensor` nn.Parameter's mark."""
    tensor._is_param = True
    return tensor


def carried(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a tensor was given by `carry`."""
    return {name: vars(tensor)[name] for name in getattr(tensor, "_carried", ())}


def carry(tensor: torch.Tensor, attributes: dict[str, Any], of: torch.Tensor) -> None:
    """Give a stored tensor attributes of a library's, which go where its implementation goes. Where one is `of`, the
    tensor in whose place it is, it is the stored tensor now."""
    if attributes:
        vars(tensor).update({name: tensor if value is of else value for name, value in attributes.items()})
        vars(tensor)["_carried"] = tuple(attributes)
