"""The gradients that leave one run of a backward graph, until each is final and may be consumed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from zinf_fx.errors import StoredTensorError
from zinf_fx.plan.memory.accounting import gradient_buffer_bytes
from zinf_fx.plan.packs import gradient_offsets
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphSchedule, Tile
from zinf_fx.runtime.gradients.accumulate import (
    Addends,
    accumulate_gradient,
    accumulate_gradient_part,
    accumulate_side_by_side,
    addends_of,
    addends_of_pack,
    give_back_unreduced,
    is_reduced_now,
    new_gradient,
    reduction_of,
    reduction_of_pack,
    take_unreduced,
)
from zinf_fx.runtime.gradients.ahead import GradientsAhead, RoomsAhead
from zinf_fx.runtime.gradients.leaf import Due, Leaf, due_to, leaves_of_node
from zinf_fx.runtime.gradients.plain import leave_copies, noted
from zinf_fx.runtime.gradients.reduction import PackReduction, ReducedMember, Reduction
from zinf_fx.runtime.recorder import GRADIENT, RECORDER
from zinf_fx.runtime.tensor.gradient_state import GradientConsumer, GradientState
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.stored_tile import StoredTile


class Departures:
    """What is known of a graph's parameters and their gradients before it runs.

    Attributes:
        last_uses: of each parameter's tile, how many releases and offloads of it the graph has.
        gradients: how many offloads alone.
        to_nvme: those that leave for NVMe.
    """

    def __init__(self, plan: Plan, schedule: GraphSchedule) -> None:
        events = [event for event in schedule.events if not schedule.tiles[event.tile].activation]
        offloads = [event for event in events if event.kind == "offload"]
        self.last_uses = Counter(event.tile for event in events if event.kind in ("release", "offload"))
        self.gradients = Counter(event.tile for event in offloads)
        self.to_nvme = RoomsAhead(plan, schedule)


class LeavingGradients:
    """What becomes of the gradients of one run of a backward graph. Dictionaries are by the storages' keys, but for
    what `leaves_of_node` gives."""

    def __init__(
        self,
        plan: Plan,
        tiles: Sequence[Tile],
        storages: Sequence[StoredTile],
        departures: Departures,
        followed: bool,
    ) -> None:
        """`storages`: of each tile. `followed`: whether somebody is to know when the graph has used a parameter."""
        self._plan, self._tiles, self._storages = plan, tiles, storages
        self._last_uses = departures.last_uses if followed else {}
        self._ahead = GradientsAhead(departures.to_nvme, storages)
        self._reducing: Reduction | PackReduction | None = None  # the gradient that began last
        self._begun: dict[int, _PartialGradient] = {}
        self._unreduced: dict[int, _PartialGradient] = {}
        # By tokens' ids, parameters whose gradients are to be returned, and what their `grad` was: see `returned`.
        self._returning: dict[int, tuple[StoredTensor, torch.Tensor | None]] = {}
        # What is to come of releases and offloads, and of offloads alone.
        self._uses_left: Counter[int] = Counter()
        self._gradients_left: Counter[int] = Counter()
        for tile, uses in self._last_uses.items():
            self._uses_left[storages[tile].key] += uses
            self._gradients_left[storages[tile].key] += departures.gradients[tile]

    @cached_property
    def _leaves(self) -> dict[int, Leaf]:
        """The parameters that gradients go to."""
        return leaves_of_node()

    def reduce_scatter(
        self, tile: int, gradient: torch.Tensor | list[torch.Tensor]
    ) -> torch.Tensor | Reduction | list[torch.Tensor | ReducedMember]:
        """Start to average a gradient, or those of a pack, over the ranks. One rank's is the average."""
        storage, planned = self._storages[tile], self._tiles[tile]
        if storage.ranks.size == 1:
            return gradient
        parameters = [self._accumulating(member) for member in storage.members]
        if not any(parameter is not None for parameter in parameters):
            return gradient
        if self._reducing is not None:
            self._reducing.advance()  # by now, its group has summed it while operators computed
        with RECORDER.about(planned.label, GRADIENT):
            several = zip(storage.members, parameters, strict=True)
            before = [self._before(member.key, parameter, planned.start) for member, parameter in several]
            if planned.members:
                found, self._reducing = reduction_of_pack(parameters, gradient, planned.label, before)
                return found
            found = reduction_of(*parameters, planned.start, gradient, planned.label, *before)
        self._reducing = found if isinstance(found, Reduction) else None
        return found

    def reduced_now(self, tile: int) -> list[bool]:
        """Of the gradient of a tile, or of each of a pack, whether this run is to reduce it."""
        parameters = [self._accumulating(member) for member in self._storages[tile].members]
        return [parameter is not None and is_reduced_now(parameter) for parameter in parameters]

    def offload(
        self,
        tile: int,
        shard: torch.Tensor | Reduction | list[torch.Tensor | ReducedMember],
        offset: int | None = None,
    ) -> None:
        """Move a gradient, or those of a pack, to its tier and add it to the parameter's `.grad`, as autograd would."""
        storage, planned = self._storages[tile], self._tiles[tile]
        with RECORDER.about(planned.label, GRADIENT):
            if planned.members:
                self._accumulate_pack(storage, tile, shard, offset)
            else:
                self._accumulate(*storage.members, tile, shard, offset)
        if planned.gradient_tier == "nvme":
            self._ahead.has_left(self._addends_of)
        if tile in self._last_uses:
            self._gradients_left[storage.key] -= 1
        self.passed(tile)

    def copy_gradients(self, tiles: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Add copies of gradients to their parameters' `.grad`, ordinary tensors of the same device: somebody may hold
        a gradient, or it lives somewhere else in the device's memory."""
        found = []
        for tile, gradient in zip(tiles, gradients, strict=True):
            (storage,) = self._storages[tile].members
            parameter = self._taking(storage, self._tiles[tile].name)
            if parameter is not None:
                found.append((parameter, storage, gradient))
        if RECORDER.log is None:
            leave_copies(found)
            return
        labels = {id(*self._storages[tile].members): self._tiles[tile].label for tile in tiles}
        for one in found:
            _, storage, gradient = one
            with RECORDER.about(labels[id(storage)], GRADIENT), noted(storage, gradient.nbytes):
                leave_copies([one])

    def passed(self, tile: int) -> None:
        """A release or an offload of a tile is over. After the last of this graph, and when no other graph is to use
        it, the gradient may be consumed."""
        if tile not in self._last_uses:
            return
        storage = self._storages[tile]
        self._uses_left[storage.key] -= 1
        if not self._uses_left[storage.key]:
            consumed: defaultdict[GradientConsumer, list[StoredTensor]] = defaultdict(list)
            for member in storage.members:
                state = member.gradient
                state.backward_ended()
                leaf = self._leaves.get(id(member.token))
                is_due = leaf is not None and id(member.token) not in self._returning
                if state.consumer is not None and not state.backwards_due and is_due:
                    consumed[state.consumer].append(leaf[0])
            for consumer, parameters in consumed.items():
                consumer.take_gradients(parameters)

    def end(self, results: tuple, tokens: Mapping[int, torch.Tensor]) -> tuple:
        """All have left. Returns the graph's results, with gradients that torch.autograd.grad() is to return: they have
        come where those that are added to `grad` do, and whatever was there is there again. `tokens`: by position
        among the results, that of the parameter whose gradient it is."""
        self._ahead.close()
        if not self._returning:
            return results
        found = {token: parameter.grad for token, (parameter, _) in self._returning.items()}
        self._give_back_grads()
        returned = {position: found[id(token)] for position, token in tokens.items() if id(token) in found}
        return tuple(returned.get(position, one) for position, one in enumerate(results))

    def _give_back_grads(self) -> None:
        for parameter, before in self._returning.values():
            parameter.grad = before
        self._returning = {}

    def abort(self, error: BaseException) -> None:
        """After `error`: half a gradient is none."""
        self._ahead.close()
        for begun in self._begun.values():
            if begun.missing:
                begun.parameter.grad = None
        for begun in self._unreduced.values():
            give_back_unreduced(begun.parameter, begun.before)
        self._give_back_grads()
        if self._uses_left:
            members = (member for storage in self._storages for member in storage.members)
            for consumer in {member.gradient.consumer for member in members} - {None}:
                consumer.abandon(error)

    def _accumulating(self, storage: TensorStorage) -> StoredTensor | None:
        """The parameter with these bytes to whose `.grad` this backward pass is to add, if there is one."""
        token = id(storage.token)
        leaf = self._leaves.get(token)
        due = Due.NOTHING if leaf is None else due_to(leaf)
        if due is Due.NOTHING:
            return None
        parameter, _ = leaf
        if due is Due.RETURNED and token not in self._returning:
            if storage.share.ranks.size > 1:
                raise StoredTensorError(
                    "torch.autograd.grad can't return the gradient of a stored parameter of shape "
                    f"{tuple(parameter.shape)} from compiled code where {storage.share.ranks.size} ranks train it: "
                    "call backward() and read `.grad`, or run the model uncompiled"
                )
            self._returning[token] = parameter, parameter.grad
            parameter.grad = None
        return parameter

    def _taking(self, storage: TensorStorage, name: str) -> StoredTensor | None:
        """As `_accumulating`, for the gradient that is here now. `name`: for errors."""
        parameter = self._accumulating(storage)
        if parameter is not None and parameter.has_gradient_hooks:
            raise StoredTensorError(
                f"a hook was registered on '{name}' after its graph was compiled, and would not run: "
                "register hooks before the first compiled call, or call torch.compiler.reset() after it"
            )
        return parameter

    def _accumulate(
        self, storage: TensorStorage, tile: int, shard: torch.Tensor | Reduction, offset: int | None
    ) -> None:
        parameter = self._taking(storage, self._tiles[tile].name)
        if parameter is None or self._keep_for_consumer(storage, parameter, shard, self._gradients_left[storage.key]):
            return
        self._make_room([parameter], tile)
        self._limit_writes(storage, tile)
        if self._tiles[tile].rows is None:
            accumulate_gradient(parameter, shard, offset)
            self._unreduced.pop(storage.key, None)
        else:
            self._offload_part(storage.key, parameter, self._tiles[tile], shard, offset)

    def _addends_of(self, tile: int) -> Addends | None:
        """What the gradient of a tile, or those of a pack, are to be added to, where that is known by now."""
        storage, planned = self._storages[tile], self._tiles[tile]
        parameters = [self._accumulating(member) for member in storage.members]
        if any(parameter is None or parameter.grad is None for parameter in parameters):
            return None
        if planned.members:
            return addends_of_pack(storage, parameters)
        begun = self._begun.get(storage.key)
        if begun is not None and planned.start in begun.missing:
            return None
        return addends_of(parameters[0], planned.start, planned.numel)

    def _accumulate_pack(
        self, pack: StoredTile, tile: int, gradients: list[torch.Tensor | ReducedMember], offset: int | None
    ) -> None:
        planned = self._tiles[tile]
        found = [
            (number, parameter, gradient)
            for number, (storage, gradient) in enumerate(zip(pack.members, gradients, strict=True))
            if (parameter := self._taking(storage, planned.members[number].name)) is not None
            and not (
                GradientState.any_followed
                and self._keep_for_consumer(storage, parameter, gradient, self._gradients_left[pack.key])
            )
        ]
        if not found:
            return
        _, parameters, shards = zip(*found, strict=True)
        self._make_room(parameters, tile)
        self._limit_writes(pack, tile)
        if len(found) < len(gradients) or not accumulate_side_by_side(pack, parameters, shards, offset):
            starts = gradient_offsets(planned, self._plan.stage)
            for number, parameter, shard in found:
                accumulate_gradient(parameter, shard, None if offset is None else offset + starts[number])
        for member in pack.members if self._unreduced else ():
            self._unreduced.pop(member.key, None)

    def _make_room(self, parameters: Sequence[StoredTensor], tile: int) -> None:
        """Where an optimizer steps in backward, before gradients take host memory until they are consumed."""
        planned = self._tiles[tile]
        if not GradientState.any_followed or planned.gradient_tier != "host":
            return
        if any(parameter.grad is not None for parameter in parameters):
            return  # they have it
        whole = planned.gradient_nbytes_at_once(self._plan.stage) if planned.rows is None else parameters[0].nbytes
        for consumer in {parameter.storage.gradient.consumer for parameter in parameters} - {None}:
            consumer.make_room(whole)

    def _limit_writes(self, storage: StoredTile | TensorStorage, tile: int) -> None:
        """Wait until there is room for the gradient's buffer."""
        if self._tiles[tile].gradient_tier == "nvme":
            nbytes = gradient_buffer_bytes(self._tiles[tile], self._plan.stage)
            storage.tiers.limit_writes(max(self._plan.gradient_buffer - nbytes, 0))

    def _keep_for_consumer(
        self,
        storage: TensorStorage,
        parameter: StoredTensor,
        shard: torch.Tensor | Reduction | ReducedMember,
        left: int,
    ) -> bool:
        """Keep a gradient in memory that needs no place on its tier: whole, it is consumed when this graph has used the
        tile. `left`: gradients of the tile that are to come, with this one. Returns whether it is such."""
        state = storage.gradient
        if storage.share.ranks.size > 1 or state.consumer is None or not storage.device.in_host_memory:
            return False
        if id(storage.token) in self._returning:
            return False
        whole = shard.shape == parameter.shape and shard.dtype == parameter.dtype
        if not whole or left != 1 or state.backwards_due != 1 or parameter.grad is not None:
            return False
        state.consumer.make_room(shard.nbytes)
        parameter.grad = shard
        return True

    def _before(self, key: int, parameter: StoredTensor | None, start: int) -> StoredTensor | None:
        """What this rank accumulated by itself, for the first gradient of the tile of a parameter that begins at
        `start`. It is kept until the sum is there."""
        if parameter is None:
            return None
        if (taken := take_unreduced(parameter)) is not None:
            self._unreduced[key] = _PartialGradient(parameter, self._starts[key].copy(), taken)
        waits = self._unreduced.get(key)
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

    def _offload_part(
        self, key: int, parameter: StoredTensor, tile: Tile, shard: torch.Tensor | Reduction, offset: int | None
    ) -> None:
        """Add to a range of the gradient, or write it where this run is the first to; it began with no values."""
        if parameter.grad is None:
            parameter.grad = new_gradient(parameter, parameter.dtype, reduced=isinstance(shard, Reduction))
            self._begun[key] = _PartialGradient(parameter, self._starts[key].copy())
        begun = self._begun.get(key)
        first = begun is not None and tile.start in begun.missing
        accumulate_gradient_part(parameter, tile.start, shard, first=first, offset=offset)
        if first:
            begun.missing.remove(tile.start)
            if not begun.missing:
                self._unreduced.pop(key, None)


@dataclass
class _PartialGradient:
    """A new gradient that arrives tile by tile, and the first elements of the tiles that have not arrived.

    `before`: of this rank alone, what is to be added to each tile's once.
    """

    parameter: StoredTensor
    missing: set[int]
    before: StoredTensor | None = None
