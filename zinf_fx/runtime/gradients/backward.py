"""What becomes of the gradients of one run of a backward graph: they are reduced and offloaded, and then consumed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.plan.memory.accounting import gradient_buffer_bytes, offloads_to_nvme, prefetched_gradient_buffers
from zinf_fx.plan.packs import gradient_offsets
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule, Tile
from zinf_fx.runtime.gradients.accumulate import (
    Addends,
    Gradient,
    accumulate,
    addends_of,
    new_gradient,
    start_reduction,
)
from zinf_fx.runtime.gradients.leaf import Due, Leaf, due_to, leaves_of_node
from zinf_fx.runtime.gradients.reduction import ReducedGradient, Reduction
from zinf_fx.runtime.gradients.state import is_reduced_now, restore_local, take_local
from zinf_fx.runtime.recorder import GRADIENT, RECORDER
from zinf_fx.runtime.tensor.pending_gradient import GradientConsumer, PendingGradient
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.stored_tile import StoredTile

_OfTile = Gradient | Sequence[Gradient]
"""The gradient of a tile as a graph passes it on, or those of a pack."""


class _PrefetchedBuffer(NamedTuple):
    """The buffer of a gradient on its way to NVMe, which is there before the gradient is computed.

    Attributes:
        tile, label: the tile whose gradient it is for.
        offset: where it lies in the host arena's region.
        limit: how many bytes of gradients may be on their way to NVMe when it is taken.
    """

    tile: int
    label: str
    offset: int | None
    limit: int


class PlannedGradients:
    """What is known of the gradients of a backward graph before it runs.

    Attributes:
        last_uses: how many releases and offloads of each tile the graph has.
        offloads: how many offloads of each tile it has.
        prefetched: by the number of a gradient that has left for NVMe, the buffers that are there from then on.
        starts: where the gradients of each tile's parameters begin in its buffer, in bytes.
    """

    def __init__(self, plan: Plan, schedule: GraphSchedule) -> None:
        events = [event for event in schedule.events if not schedule.tiles[event.tile].activation]
        self.last_uses = Counter(event.tile for event in events if event.kind in ("release", "offload"))
        self.offloads = Counter(event.tile for event in events if event.kind == "offload")
        self.starts = [gradient_offsets(tile, plan.stage) if tile.members else [0] for tile in schedule.tiles]
        self.prefetched: defaultdict[int, list[_PrefetchedBuffer]] = defaultdict(list)
        offloads = offloads_to_nvme(schedule)
        nbytes = [gradient_buffer_bytes(schedule.tiles[event.tile], plan.stage) for event in offloads]
        buffers = zip(offloads, prefetched_gradient_buffers(plan, schedule), strict=True)
        for number, (event, before) in enumerate(buffers):
            if before is not None:
                label = schedule.tiles[event.tile].label
                limit = plan.gradient_buffer - sum(nbytes[before + 1 : number + 1])
                self.prefetched[before].append(_PrefetchedBuffer(event.tile, label, event.offset, limit))


class BackwardGradients:
    """What becomes of the gradients of one run of a backward graph. Dictionaries are by the storages' keys, but for
    what `leaves_of_node` gives."""

    def __init__(
        self,
        plan: Plan,
        tiles: Sequence[Tile],
        storages: Sequence[StoredTile],
        planned: PlannedGradients,
        followed: bool,
    ) -> None:
        """`storages` has those of each tile. `followed` says whether somebody is to know when the graph has used a
        parameter."""
        self._plan, self._tiles, self._storages = plan, tiles, storages
        self._last_uses = planned.last_uses if followed else {}
        self._prefetched, self._offsets = planned.prefetched, planned.starts
        self._left_for_nvme = 0
        self._prefetches: list[Addends] = []
        self._reducing: Reduction | None = None  # that began last
        self._begun: dict[int, _PartialGradient] = {}
        self._local: dict[int, _PartialGradient] = {}
        # By tokens' ids, parameters whose gradients are to be returned, and what their `grad` was: see `end`.
        self._returning: dict[int, tuple[StoredTensor, torch.Tensor | None]] = {}
        # What is to come of releases and offloads, and of offloads alone.
        self._uses_left: Counter[int] = Counter()
        self._gradients_left: Counter[int] = Counter()
        for tile, uses in self._last_uses.items():
            self._uses_left[storages[tile].key] += uses
            self._gradients_left[storages[tile].key] += planned.offloads[tile]

    @cached_property
    def _leaves(self) -> dict[int, Leaf]:
        return leaves_of_node()

    def reduce_scatter(self, tile: int, gradient: torch.Tensor | list[torch.Tensor]) -> _OfTile:
        """Start to average a gradient, or those of a pack, over the ranks. One rank's is the average."""
        storage, planned = self._storages[tile], self._tiles[tile]
        if storage.ranks.size == 1:
            return gradient
        parameters = [self._accumulating(member) for member in storage.members]
        if not any(parameter is not None for parameter in parameters):
            return gradient
        if self._reducing is not None:
            self._reducing.advance()  # by now, its group has summed it while operators computed
        gradients = gradient if isinstance(gradient, list) else [gradient]
        with RECORDER.about(planned.label, GRADIENT):
            both = zip(storage.members, parameters, strict=True)
            before = [self._before(member.key, parameter, planned.start) for member, parameter in both]
            start = 0 if planned.members else planned.start
            reduced, self._reducing = start_reduction(parameters, gradients, planned.label, before, start)
        return reduced if isinstance(gradient, list) else reduced[0]

    def reduced_now(self, tile: int) -> list[bool]:
        """Return whether this run is to reduce the gradient of a tile, or each of a pack."""
        parameters = [self._accumulating(member) for member in self._storages[tile].members]
        return [parameter is not None and is_reduced_now(parameter) for parameter in parameters]

    def offload(self, tile: int, gradient: _OfTile, offset: int | None = None) -> None:
        """Move a gradient, or those of a pack, to its tier and add it to the parameter's `.grad`, as autograd would."""
        storage, planned = self._storages[tile], self._tiles[tile]
        gradients = [gradient] if isinstance(gradient, Gradient) else gradient
        with RECORDER.about(planned.label, GRADIENT):
            self._accumulate(storage, tile, gradients, offset)
        if planned.gradient_tier == "nvme":
            self._prefetch()
        if tile in self._last_uses:
            self._gradients_left[storage.key] -= 1
        self.passed(tile)

    def copy_gradients(self, tiles: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add copies of gradients to their parameters' `.grad`, ordinary tensors of the same device: somebody may hold
        a gradient, or it lives somewhere else in the device's memory."""
        together: defaultdict[object, tuple[list[StoredTensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
        for tile, gradient in zip(tiles, gradients, strict=True):
            storage, planned = self._storages[tile], self._tiles[tile]
            parameter = self._taking(storage.first, planned.name)
            if parameter is None:
                continue
            if RECORDER.log is not None:
                with RECORDER.about(planned.label, GRADIENT):
                    accumulate([parameter], [gradient])
                continue
            parameters, arriving = together[storage.gradients_live_in]
            parameters.append(parameter)
            arriving.append(gradient)
        for parameters, arriving in together.values():
            accumulate(parameters, arriving)

    def passed(self, tile: int) -> None:
        """Note that a release or an offload of a tile is over. After the last of this graph, and when no other graph is
        to use it, the gradient may be consumed."""
        if tile not in self._last_uses:
            return
        storage = self._storages[tile]
        self._uses_left[storage.key] -= 1
        if not self._uses_left[storage.key]:
            consumed: defaultdict[GradientConsumer, list[StoredTensor]] = defaultdict(list)
            for member in storage.members:
                pending = member.gradient
                pending.backward_ended()
                leaf = self._leaves.get(id(member.token))
                if leaf is None or pending.backwards_due or id(member.token) in self._returning:
                    continue
                if (consumer := pending.consumer) is not None:
                    consumed[consumer].append(leaf[0])
            for consumer, parameters in consumed.items():
                consumer.take_gradients(parameters)

    def end(self, results: tuple, tokens: Mapping[int, torch.Tensor]) -> tuple:
        """Return the graph's results, when all gradients have left, with those that torch.autograd.grad() is to return:
        they have come where those that are added to `grad` do, and whatever was there is there again. `tokens` has, by
        the position of such a gradient among the results, that of its parameter."""
        self._drop_prefetches()
        if not self._returning:
            return results
        gradients = {token: parameter.grad for token, (parameter, _) in self._returning.items()}
        self._give_back_grads()
        returned = {position: gradients[id(token)] for position, token in tokens.items() if id(token) in gradients}
        return tuple(returned.get(position, result) for position, result in enumerate(results))

    def _give_back_grads(self) -> None:
        for parameter, before in self._returning.values():
            parameter.grad = before
        self._returning = {}

    def abort(self, error: BaseException) -> None:
        """Drop gradients of which half is there, after `error`."""
        self._drop_prefetches()
        for begun in self._begun.values():
            if begun.missing:
                begun.parameter.grad = None
        for begun in self._local.values():
            restore_local(begun.parameter, begun.before)
        self._give_back_grads()
        if self._uses_left:
            for consumer in _consumers(member for storage in self._storages for member in storage.members):
                consumer.abandon(error)

    def _accumulating(self, storage: TensorStorage) -> StoredTensor | None:
        """Return the parameter with these bytes to whose `.grad` this backward pass is to add, if there is one."""
        token = id(storage.token)
        leaf = self._leaves.get(token)
        if leaf is None or (due := due_to(leaf)) is Due.NOTHING:
            return None
        parameter, _ = leaf
        if due is Due.RETURNED and token not in self._returning:
            if storage.shard.ranks.size > 1:
                raise StoredTensorError(
                    "torch.autograd.grad can't return the gradient of a stored parameter of shape "
                    f"{tuple(parameter.shape)} from compiled code where {storage.shard.ranks.size} ranks train it: "
                    "call backward() and read `.grad`, or run the model uncompiled"
                )
            self._returning[token] = parameter, parameter.grad
            parameter.grad = None
        return parameter

    def _taking(self, storage: TensorStorage, name: str) -> StoredTensor | None:
        """Return the parameter that takes the gradient that is here now, as `_accumulating`. `name` is for errors."""
        parameter = self._accumulating(storage)
        if parameter is not None and parameter.has_gradient_hooks:
            raise StoredTensorError(
                f"a hook was registered on '{name}' after its graph was compiled, and would not run: "
                "register hooks before the first compiled call, or call torch.compiler.reset() after it"
            )
        return parameter

    def _accumulate(self, storage: StoredTile, tile: int, gradients: Sequence[Gradient], offset: int | None) -> None:
        """Add the gradients of a tile to those of their parameters, as far as these are to have them."""
        planned = self._tiles[tile]
        names = [member.name for member in planned.members] or [planned.name]
        starts, followed = self._offsets[tile], PendingGradient.any_followed
        left = self._gradients_left[storage.key] if followed else 0
        parameters: list[StoredTensor] = []
        arriving: list[Gradient] = []
        offsets: list[int | None] = []
        for number, (member, gradient) in enumerate(zip(storage.members, gradients, strict=True)):
            parameter = self._taking(member, names[number])
            if parameter is None or (followed and self._keep_for_consumer(parameter, gradient, left)):
                continue
            parameters.append(parameter)
            arriving.append(gradient)
            offsets.append(None if offset is None else offset + starts[number])
        if not parameters:
            return
        self._make_room(parameters, tile)
        self._limit_writes(storage, tile)
        if planned.rows is not None:
            self._accumulate_part(storage.key, parameters[0], planned, arriving[0], offset)
            return
        accumulate(parameters, arriving, offsets)
        for member in storage.members if self._local else ():
            self._local.pop(member.key, None)

    def _prefetch(self) -> None:
        """Read what gradients are to be added to whose buffers are there now, because another has left for NVMe."""
        for buffer in self._prefetched.get(self._left_for_nvme, ()):
            tiers = self._storages[buffer.tile].tiers
            with RECORDER.about(buffer.label, GRADIENT):
                tiers.limit_writes(buffer.limit)
                addends = self._addends_of(buffer.tile) if tiers.background is None else None
                if addends and addends.stored.prefetch(addends.start, addends.count, buffer.offset):
                    self._prefetches.append(addends)
        self._left_for_nvme += 1

    def _drop_prefetches(self) -> None:
        """Give back what was read and not used."""
        prefetches, self._prefetches = self._prefetches, []
        for addends in prefetches:
            addends.stored.drop_prefetched(addends.start, addends.count)

    def _addends_of(self, tile: int) -> Addends | None:
        """Return what the gradients of a tile are to be added to, where that is known by now."""
        storage, planned = self._storages[tile], self._tiles[tile]
        accumulating = [self._accumulating(member) for member in storage.members]
        parameters = [parameter for parameter in accumulating if parameter is not None and parameter.grad is not None]
        if len(parameters) < len(accumulating):
            return None
        begun = self._begun.get(storage.key)
        if begun is not None and planned.start in begun.missing:
            return None
        return addends_of(parameters, planned.start, planned.numel)

    def _make_room(self, parameters: Sequence[StoredTensor], tile: int) -> None:
        """Have optimizers that step in backward make room, before gradients take host memory until they are
        consumed."""
        planned = self._tiles[tile]
        if not PendingGradient.any_followed or planned.gradient_tier != "host":
            return
        if any(parameter.grad is not None for parameter in parameters):
            return  # they have it
        whole = planned.gradient_nbytes_at_once(self._plan.stage) if planned.rows is None else parameters[0].nbytes
        for consumer in _consumers(parameter.stored for parameter in parameters):
            consumer.make_room(whole)

    def _limit_writes(self, storage: StoredTile, tile: int) -> None:
        """Wait until there is room for the gradient's buffer."""
        if self._tiles[tile].gradient_tier == "nvme":
            nbytes = gradient_buffer_bytes(self._tiles[tile], self._plan.stage)
            storage.tiers.limit_writes(max(self._plan.gradient_buffer - nbytes, 0))

    def _keep_for_consumer(self, parameter: StoredTensor, gradient: Gradient, left: int) -> bool:
        """Keep a gradient in memory that needs no place on its tier: whole, it is consumed when this graph has used the
        tile. `left` counts the gradients of the tile that are to come, with this one. Returns whether it is such."""
        if isinstance(gradient, ReducedGradient):
            return False
        storage = parameter.stored
        pending = storage.gradient
        if storage.shard.ranks.size > 1 or pending.consumer is None or not storage.device.in_host_memory:
            return False
        if id(storage.token) in self._returning:
            return False
        whole = gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        if not whole or left != 1 or pending.backwards_due != 1 or parameter.grad is not None:
            return False
        pending.consumer.make_room(gradient.nbytes)
        parameter.grad = gradient
        return True

    def _before(self, key: int, parameter: StoredTensor | None, start: int) -> StoredTensor | None:
        """Return what this rank accumulated by itself, for the first gradient of the tile of a parameter that begins at
        `start`. It is kept until the sum is there."""
        if parameter is None:
            return None
        if (taken := take_local(parameter)) is not None:
            self._local[key] = _PartialGradient(parameter, self._starts[key].copy(), taken)
        waits = self._local.get(key)
        if waits is None or start not in waits.missing:
            return None
        waits.missing.remove(start)
        return waits.before

    @cached_property
    def _starts(self) -> dict[int, set[int]]:
        """The first elements of each parameter's tiles."""
        starts: defaultdict[int, set[int]] = defaultdict(set)
        for storage, tile in zip(self._storages, self._tiles, strict=True):
            for member in () if storage is None else storage.members:
                starts[member.key].add(tile.start)
        return starts

    def _accumulate_part(
        self, key: int, parameter: StoredTensor, tile: Tile, gradient: Gradient, offset: int | None
    ) -> None:
        """Add to a range of the gradient, or write it where this run is the first to; it began with no values."""
        if parameter.grad is None:
            parameter.grad = new_gradient(parameter, parameter.dtype, reduced=isinstance(gradient, ReducedGradient))
            self._begun[key] = _PartialGradient(parameter, self._starts[key].copy())
        begun = self._begun.get(key)
        first = begun is not None and tile.start in begun.missing
        accumulate([parameter], [gradient], [offset], start=tile.start, first=first)
        if begun is not None and first:
            begun.missing.remove(tile.start)
            if not begun.missing:
                self._local.pop(key, None)


def _consumers(storages: Iterable[TensorStorage]) -> set[GradientConsumer]:
    """Return the optimizers that step in backward with the parameters of these storages."""
    consumers = {storage.gradient.consumer for storage in storages}
    return {consumer for consumer in consumers if consumer is not None}


@dataclass
class _PartialGradient:
    """A new gradient that arrives tile by tile, and the first elements of the tiles that have not arrived.

    `before` is this rank's alone; each tile's part of it is to be added once.
    """

    parameter: StoredTensor
    missing: set[int]
    before: StoredTensor | None = None
