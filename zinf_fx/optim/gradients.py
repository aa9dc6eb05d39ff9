"""What is done to all gradients between backward and the step, chunk by chunk: norms, unscaling and clipping."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from types import NotImplementedType
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from zinf_fx.interrupts import sealed
from zinf_fx.optim.chunks import chunk_elements, in_turn
from zinf_fx.optim.elements import OpenWindows, current_chunks, open_elements, open_window
from zinf_fx.plan.chunks import ChunkSlice, Member, cut, part_of
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.operations import handle
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import tensor_ranks
from zinf_fx.runtime.tensor.tiers import drain_after


class Opened(Protocol):
    """A chunk whose windows are open."""

    def close(self) -> None: ...


C = TypeVar("C")

O = TypeVar("O", bound=Opened)  # noqa: E741


def opened_ahead(chunks: Iterable[C], open_chunk: Callable[[C], O], ahead: int = 1) -> Generator[O, None, None]:
    """Yield `open_chunk` of each chunk, in order, which is called `ahead` chunks before the result is handed out.

    What was opened and not handed out is closed when the iteration ends early.
    """
    waiting: deque[O] = deque()
    try:
        for chunk in chunks:
            waiting.append(open_chunk(chunk))
            if len(waiting) > ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for opened in waiting:
            opened.close()


class OpenPieces(OpenWindows):
    """Pieces of stored tensors with their windows open: wait for them, change them, `store`, `close`."""

    def __init__(self, pieces: Iterable[tuple[StoredTensor, range]], place: Device) -> None:
        """Open windows where `place` computes."""
        super().__init__()
        try:
            for tensor, elements in pieces:
                self._keep(open_window(tensor.stored, place, elements.start, len(elements)))
        except BaseException:
            self.close()
            raise

    def wait(self) -> list[torch.Tensor]:
        """Return the pieces, flat, once they are there."""
        return [window.wait() for window in self._windows]

    def store(self) -> None:
        """Start writing back what was changed."""
        for window in self._windows:
            window.store()


@sealed
def update_in_chunks(
    tensors: Sequence[StoredTensor], place: Device, update: Callable[[list[torch.Tensor]], None]
) -> None:
    """Call `update`, which changes each element by itself, with the flat pieces of each chunk of `tensors` where
    `place` computes, while the next one is read and the one before written (ZeRO-Infinity, section 5.2.2). All is in
    the store at the end.

    Raises: StoreError; some elements are updated then, and others not.
    """
    all_tiers = list({id(tiers): tiers for tiers in (tensor.stored.tiers for tensor in tensors)}.values())
    moved = (t.dtype.itemsize for t in tensors if not t.stored.bytes.in_host_memory)
    bytes_per_element = max(moved, default=0)
    elements = chunk_elements(min(tensor.stored.config.chunk for tensor in tensors), bytes_per_element, all_tiers)

    nbytes = elements * bytes_per_element
    # At the end of the room, whose beginning may have what is read for the step.
    behind = max(min(tiers.chunk_room for tiers in all_tiers) - CHUNKS * nbytes, 0)

    def open_pieces(numbered: tuple[int, tuple[ChunkSlice, ...]]) -> OpenPieces:
        number, slices = numbered
        with in_turn(all_tiers, part_of(number, nbytes, behind)):
            return OpenPieces([(tensors[piece.members.start], piece.elements[0]) for piece in slices], place)

    try:
        members = [Member(tensor.stored.shard.current) for tensor in tensors]
        with closing(opened_ahead(enumerate(cut(members, elements)), open_pieces)) as opened:
            for chunk in opened:
                with closing(chunk):
                    update(chunk.wait())
                    chunk.store()
                for tiers in all_tiers:
                    tiers.limit_writes(nbytes)
        for tiers in all_tiers:
            tiers.drain()
    except BaseException as error:
        drain_after(error, all_tiers)
        raise


aten = torch.ops.aten


def _vector_norm(
    operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> NotImplementedType | torch.Tensor:
    tensor, *rest = args
    order, dims = (rest[0] if rest else 2.0), (rest[1] if len(rest) > 1 else None)
    if not _is_sharded(tensor) or dims is not None or len(rest) > 2 or kwargs.get("keepdim") or "out" in kwargs:
        return NotImplemented
    return _norms_of([tensor], float(order))[0].to(kwargs.get("dtype") or tensor.dtype)


def _norms(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> NotImplementedType | list:
    tensors, *rest = args
    if not any(_is_sharded(tensor) for tensor in tensors) or len(rest) > 1:
        return NotImplemented
    order, dtype = float(rest[0] if rest else kwargs.get("ord", 2.0)), kwargs.get("dtype")
    of_shards = iter(_norms_of([t for t in tensors if _is_sharded(t)], order))
    return [
        next(of_shards).to(dtype or t.dtype) if _is_sharded(t) else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in tensors
    ]


def _is_sharded(tensor: object) -> bool:
    """Whether this rank has the present values of some elements only."""
    if not isinstance(tensor, StoredTensor) or tensor.views:
        return False
    return tensor.stored.shard.in_shards


def _norms_of(tensors: list[StoredTensor], order: float) -> list[torch.Tensor]:
    """Return the vector norms of all elements, on the tensors' device, in one collective for those of the same
    ranks."""
    totals = torch.stack([_part_of_norm(tensor, order) for tensor in tensors]).to(tensors[0].device)
    reduce = {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(order, ReduceOp.SUM)
    for ranks in dict.fromkeys(tensor.stored.shard.ranks for tensor in tensors):
        theirs = [number for number, tensor in enumerate(tensors) if tensor.stored.shard.ranks is ranks]
        numbers = totals[theirs]
        ranks.reduce_over_shards(numbers, "norms", reduce)
        totals[theirs] = numbers
    return list(totals ** (1 / order) if math.isfinite(order) and order else totals)


def _part_of_norm(tensor: StoredTensor, order: float) -> torch.Tensor:
    """Return what the elements that are here add to the norm before its root is taken, in the dtype in which sums of it
    are exact enough."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    extreme = max if order == math.inf else min
    nothing = {math.inf: 0.0, -math.inf: math.inf}.get(order, 0.0)
    total = torch.tensor(nothing, dtype=torch.float64, device="cpu")
    for elements in current_chunks(tensor):
        window = open_elements(tensor, CPU, elements.start, len(elements))
        try:
            part = torch.linalg.vector_norm(window.wait(), order, dtype=dtype).double()
        finally:
            window.close()
        total = total + part ** (order or 1) if math.isfinite(order) else extreme(total, part)
    return total


handle(aten.linalg_vector_norm, _vector_norm)

handle(aten._foreach_norm, _norms)

aten = torch.ops.aten

# They change every element by itself: GradScaler's unscaling and search for infinities, what clip_grad_norm_ and
# clip_grad_value_ do in the end, on lists with `foreach=True` and otherwise on one gradient after the other, and what
# torch.distributed.pipelining divides gradients by.
_ON_LISTS = (
    aten._amp_foreach_non_finite_check_and_unscale_,
    aten._foreach_mul_,
    aten._foreach_clamp_min_,
    aten._foreach_clamp_max_,
)

_ON_ONE = (aten.mul_, aten.div_, aten.clamp_)


def _run_on_list(operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> NotImplementedType | None:
    """Run one of the operations on a list, where all else that it takes is the same for each tensor."""
    tensors, *rest = args[0], *map(_number, args[1:])
    stored = [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]
    if kwargs or not all(_is_number(value) for value in rest) or any(tensor.views for tensor in stored):
        return NotImplemented
    ordinary = [tensor for tensor in tensors if not isinstance(tensor, StoredTensor)]
    if ordinary:
        operation(ordinary, *rest)
    place = stored[0].stored.device  # that of the numbers, too
    update_in_chunks(stored, place, lambda pieces: operation(pieces, *rest))
    if operation is aten._amp_foreach_non_finite_check_and_unscale_.default:
        infinities = rest[0]
        assert isinstance(infinities, torch.Tensor)
        _agree_on_infinities(stored, infinities)
    return None


def _agree_on_infinities(gradients: Sequence[StoredTensor], infinities: torch.Tensor) -> None:
    """Let all ranks that have parts of any of `gradients` know of infinities. (DTensor does this where its first
    gradient is divided.)"""
    together = dict.fromkeys(gradient.stored.shard.ranks for gradient in gradients)
    for gradient in gradients:
        together |= dict.fromkeys(
            tensor_ranks(gradient.stored.config, group) for group in gradient.stored.shard.part_of
        )
    for ranks in together:
        ranks.reduce_over_all(infinities, "whether gradients are finite", torch.distributed.ReduceOp.MAX)


def _run_on_one(
    operation: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]
) -> NotImplementedType | torch.Tensor:
    """Run one of the operations on one tensor. (One without dimensions has other rules for the dtype of the result.)"""
    tensor, *rest = args[0], *map(_number, args[1:])
    stored = isinstance(tensor, StoredTensor) and not tensor.views and tensor.dim()
    if kwargs or not stored or not all(_is_number(value) for value in rest):
        return NotImplemented

    def update(pieces: list[torch.Tensor]) -> None:
        for piece in pieces:
            operation(piece, *rest)

    update_in_chunks([tensor], tensor.stored.device, update)
    return tensor


def _number(value: object) -> object:
    """Return `value`, or the full one of a DTensor: the norm of gradients of which some are DTensors is one."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dim() <= 1 and not isinstance(value, StoredTensor)
    return value is None or isinstance(value, (int, float))


for _operation in _ON_LISTS:
    handle(_operation, _run_on_list)

for _operation in _ON_ONE:
    handle(_operation, _run_on_one)
