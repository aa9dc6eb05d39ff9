"""The graph's own operations: their schemas, and what they return when only shapes are known.

`gather` is what capture emits, and runs in eager code too. So does `dequantize`. The passes lower `gather` to
the others, which the executor binds to its own methods: they have no kernel of their own, so a graph can't run unbound
by mistake. Of a `mm` and a `dequantize`, they make a `quantised_mm`, which has one.

| op | meaning | ZeRO-Infinity, section 6.2 |
|---|---|---|
| gather | the full value of a stored tensor | |
| pack | the token of a pack: of the parameters with these tokens, which move together | |
| member | a parameter of a pack that was gathered | |
| dequantize | the values of a tensor of which the bytes of a quantised format were gathered | |
| quantised_mm | a product with these values, or with their transposition, of which few are there at a time | |
| together | the gradients of the parameters of a pack, as they lie in it | |
| fetch | start the NVMe -> host read of this rank's shard | nc-transfer |
| upload | start the host -> device copy of the shard | cg-transfer |
| allgather | start the collective that builds the full tile | gg-transfer |
| wait | the full tile, once ready | |
| release | the tile's buffers are free | re-partition |
| reduce_scatter | start the collective that turns a full gradient into this rank's shard | |
| offload | start the move of a gradient shard to its tier, adding to what is there | |
| offload_activation | start the move of an activation to its tier; the token of the tile that it is from now on | |
| written | the token of a parameter from now on, after the graph wrote to it; only while a graph is captured | |
| write | start the move of a parameter's new value to its tier | |
| micro_batch | a part of what holds a batch; only until the graph of one micro-batch is repeated for all of them | |
| join | what all micro-batches computed, of what one computes; only until then | |
| random_state, set_random_state | what a device's generator draws from next | |
| snapshot | what an input that the graph writes to was; only until the graph is divided into forward and backward | |

An activation that left comes back in backward as any tile does.
`start` is the tile's first element in its parameter, when that has several tiles, and of a `member`, the parameter's
first element in its pack; `after`, how many writes of the graph to the parameter come before; `shape`, of a
`dequantize`, that of the values behind the first dimension, which the rows of bytes are, too. When an event happens,
whether forward starts it for backward, what it finds in memory and where its buffer lies, the node's `Event` says, and
no argument. `how` a `join` makes one value of those of `count` micro-batches: "cat" along `dim`, "mean" or "sum".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from zinf_fx import cuda

_library = torch.library.Library("zinf", "DEF")
_library.define(
    "gather(Tensor token, SymInt[] shape, ScalarType dtype, Device device, *, int start=0, int after=0) -> Tensor"
)
_library.define("pack(Tensor[] tokens) -> Tensor")
_library.define("member(Tensor(a) pack, SymInt[] shape, *, int start, int number) -> Tensor(a)")
_library.define("dequantize(Tensor packed, int[] shape, str format, ScalarType dtype) -> Tensor")
_library.define(
    "quantised_mm(Tensor left, Tensor packed, int columns, str format, ScalarType dtype, bool transposed, *, "
    "Tensor? bias=None) -> Tensor"
)
_library.define("together(Tensor[] gradients, int[] starts, int numel) -> Tensor")
_library.define("fetch(Tensor token, *, int start=0) -> ()")
_library.define("upload(Tensor token, *, int start=0) -> ()")
_library.define("allgather(Tensor token, *, int start=0) -> ()")
_library.define("wait(Tensor token, SymInt[] shape, ScalarType dtype, Device device, *, int start=0) -> Tensor")
_library.define("release(Tensor token, *, int start=0) -> ()")
_library.define("reduce_scatter(Tensor token, Tensor gradient, *, int start=0) -> Tensor")
_library.define("offload(Tensor token, Tensor shard, *, int start=0) -> ()")
_library.define("offload_activation(Tensor value, SymInt[] stride) -> Tensor")
_library.define("written(Tensor value) -> Tensor")
_library.define("write(Tensor token, Tensor value, *, int after=0) -> ()")
_library.define("micro_batch(Tensor batch, int dim, int count) -> Tensor")
_library.define("join(Tensor value, str how, int count, int dim=0) -> Tensor")
_library.define("random_state(Device device) -> Tensor")
_library.define("set_random_state(Tensor state, Device device) -> ()")
_library.define("snapshot(Tensor value) -> Tensor")

gather = torch.ops.zinf.gather.default
pack = torch.ops.zinf.pack.default
member = torch.ops.zinf.member.default
dequantize = torch.ops.zinf.dequantize.default
quantised_mm = torch.ops.zinf.quantised_mm.default
together = torch.ops.zinf.together.default
fetch = torch.ops.zinf.fetch.default
upload = torch.ops.zinf.upload.default
allgather = torch.ops.zinf.allgather.default
wait = torch.ops.zinf.wait.default
release = torch.ops.zinf.release.default
reduce_scatter = torch.ops.zinf.reduce_scatter.default
offload = torch.ops.zinf.offload.default
offload_activation = torch.ops.zinf.offload_activation.default
written = torch.ops.zinf.written.default
write = torch.ops.zinf.write.default
micro_batch = torch.ops.zinf.micro_batch.default
join = torch.ops.zinf.join.default
random_state = torch.ops.zinf.random_state.default
set_random_state = torch.ops.zinf.set_random_state.default
snapshot = torch.ops.zinf.snapshot.default

TRANSFERS = (fetch, upload, allgather)
# What the runtime does without computing: it knows a pack by its parameters, and draws from the generator itself.
NOT_COMPUTED = (together, random_state, set_random_state)
LOWERED = (*TRANSFERS, wait, release, reduce_scatter, offload, offload_activation, write)


def gathered(token: torch.Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What `gather` gives. Where a model is only tried with fake tensors, and nobody records operators, it is a fake
    tensor without the operator, which costs much more."""
    if type(token) is torch.Tensor or get_proxy_mode() is not None:
        return gather(token, shape, dtype, device)
    return token.new_empty(shape, dtype=dtype, device=device)


# What each of them is called, in schedules and as a method of the runtime.
KINDS = {op: op._schema.name.removeprefix("zinf::") for op in LOWERED}

# Node metadata: the event of the schedule that a lowered node is.
EVENT = "zinf_event"

for _op in (*LOWERED, random_state, set_random_state, snapshot):
    # FX removes a node without users unless it is known to have an effect. The users of a snapshot may all be in
    # backward, and the partitioner asks which nodes forward keeps.
    torch.fx.has_side_effect(_op)


@torch.library.register_fake("zinf::gather", lib=_library)
@torch.library.register_fake("zinf::wait", lib=_library)
def _full_tile(
    token: torch.Tensor, shape: list[int], dtype: torch.dtype, device: torch.device, *, start: int = 0, after: int = 0
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("zinf::member", lib=_library)
def part_of_pack(pack: torch.Tensor, shape: list[int], *, start: int, number: int) -> torch.Tensor:
    """What `member` gives."""
    return pack[start : start + math.prod(shape)].view(shape)


@torch.library.register_fake("zinf::dequantize", lib=_library)
def _dequantized(packed: torch.Tensor, shape: list[int], format: str, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((packed.shape[0], *shape), dtype=dtype)


@torch.library.register_fake("zinf::quantised_mm", lib=_library)
def _product(
    left: torch.Tensor,
    packed: torch.Tensor,
    columns: int,
    format: str,
    dtype: torch.dtype,
    transposed: bool,
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return left.new_empty(left.shape[0], packed.shape[0] if transposed else columns, dtype=dtype)


@torch.library.register_fake("zinf::together", lib=_library)
def _together(gradients: list[torch.Tensor], starts: list[int], numel: int) -> torch.Tensor:
    return gradients[0].new_empty(numel)


@torch.library.register_fake("zinf::reduce_scatter", lib=_library)
def _shard(token: torch.Tensor, gradient: torch.Tensor, *, start: int = 0) -> torch.Tensor:
    return torch.empty_like(gradient)


@torch.library.register_fake("zinf::pack", lib=_library)
@torch.library.register_fake("zinf::offload_activation", lib=_library)
@torch.library.register_fake("zinf::written", lib=_library)
def _token(value: torch.Tensor | list[torch.Tensor], stride: Sequence[int] = ()) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.register_fake("zinf::micro_batch", lib=_library)
def _micro_batch(batch: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    part = batch.narrow(dim, 0, batch.shape[dim] // count)
    return torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)


@torch.library.register_fake("zinf::join", lib=_library)
def _joined(value: torch.Tensor, how: str, count: int, dim: int = 0) -> torch.Tensor:
    return torch.cat([value] * count, dim) if how == "cat" else torch.empty_like(value)


@torch.library.register_fake("zinf::random_state", lib=_library)
def _random_state(device: torch.device) -> torch.Tensor:
    return torch.empty(_generator(device).get_state().shape, dtype=torch.uint8)


for _name in ("fetch", "upload", "allgather", "release", "offload", "write", "set_random_state"):
    torch.library.register_fake(f"zinf::{_name}", lambda *args, **kwargs: None, lib=_library)


def _generator(device: torch.device) -> torch.Generator:
    """The generator that operations on a device draw from."""
    if device.type == "cpu":
        return torch.default_generator
    return cuda.generator(device)


@torch.library.impl("zinf::join", "CompositeExplicitAutograd", lib=_library)
def _join_constants(value: torch.Tensor, how: str, count: int, dim: int = 0) -> torch.Tensor:
    """Of a constant, which capture computes with; a graph has no other that is run."""
    return torch.cat([value] * count, dim) if how == "cat" else value.clone()


@torch.library.impl("zinf::snapshot", "CompositeExplicitAutograd", lib=_library)
def _snapshot(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


@torch.library.impl("zinf::random_state", "CompositeExplicitAutograd", lib=_library)
def _get_random_state(device: torch.device) -> torch.Tensor:
    return _generator(device).get_state()


@torch.library.impl("zinf::set_random_state", "CompositeExplicitAutograd", lib=_library)
def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    _generator(device).set_state(state)


def _remember_division(ctx, inputs: tuple, output: torch.Tensor) -> None:
    ctx.division = inputs[1:]


def _micro_batch_backward(ctx, gradient: torch.Tensor) -> tuple:
    dim, count = ctx.division
    return join(gradient, "cat", count, dim), None, None


def _join_backward(ctx, gradient: torch.Tensor) -> tuple:
    """The gradient of what one micro-batch computed."""
    how, count, *dim = ctx.division
    if how == "cat":
        gradient = micro_batch(gradient, *(dim or (0,)), count)
    elif how == "mean":
        gradient = gradient / count
    return gradient, None, None, None


for _name, _backward in (("micro_batch", _micro_batch_backward), ("join", _join_backward)):
    torch.library.register_autograd(f"zinf::{_name}", _backward, setup_context=_remember_division, lib=_library)
