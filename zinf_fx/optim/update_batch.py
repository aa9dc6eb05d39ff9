"""Updates that come together, and what a step has to know of all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from zinf_fx.optim.arithmetic import State
from zinf_fx.optim.chunks import Chunk
from zinf_fx.optim.layouts import GroupLayouts, StateLayout
from zinf_fx.optim.recurrence import Recurrence
from zinf_fx.optim.slices import SliceStates, Update, UpdateKind
from zinf_fx.optim.states import ParameterStates
from zinf_fx.plan.chunks import AT_A_TIME, Member, cut
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class Bytes(NamedTuple):
    """What the update of an element takes at most: of all memory, of writes to the store, and of windows."""

    all: int
    written: int
    opened: int

    @staticmethod
    def of(parameters: Collection[ParameterStates]) -> Bytes:
        return Bytes(
            max(states.bytes_per_element for states in parameters),
            max(states.bytes_written for states in parameters),
            max(states.bytes_opened for states in parameters),
        )


class UpdateBatch:
    """Updates that come together. What is known of all of them is worked out once, and serves again in the next step
    when the same tensors come again. Where a parameter gets another storage, it does not keep what the old one had.

    Attributes:
        updates: the update of each parameter.
        parameters: the parameters, with their states.
        users_parameters: the parameters that users have.
        bytes: where the parameters live.
        tiers: the tiers in which they live.
        touched: the keys of the storages that the updates read and write.
        recurs: whether it may come again in the next step.
        streams_gradients: whether all gradients are stored tensors, which nobody can change unseen.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        self.updates = updates
        self.states = [update.states for update in updates]
        self.parameters = {states.parameter: states for states in self.states}
        self.users_parameters = [states.parameter.whole for states in self.states]
        storages = [states.parameter.stored for states in self.states]
        self.bytes = [storage.bytes for storage in storages]
        self.tiers = list(dict.fromkeys(storage.tiers for storage in storages))
        self.touched = frozenset(chain.from_iterable(states.touched for states in self.states))
        self.streams_gradients = all([states.streamed_gradient is not None for states in self.states])
        self.recurs = False
        self._chunks: tuple[int, list[Chunk]] | None = None
        mine = weakref.ref(self)
        self._storages = [weakref.ref(storage, lambda gone: _let_go_of_bytes(mine())) for storage in storages]

    @staticmethod
    def of(batches: Sequence[UpdateBatch]) -> UpdateBatch:
        """Make one batch of all updates in several."""
        return batches[0] if len(batches) == 1 else UpdateBatch([u for batch in batches for u in batch.updates])

    @cached_property
    def elements(self) -> int:
        """How many elements this rank updates."""
        return sum(len(part) for states in self.states for part in states.updated)

    @cached_property
    def chunk_bytes(self) -> int:
        """The bytes of the fp32 weights of a chunk, as configured."""
        return min(states.parameter.stored.config.chunk for states in self.states)

    @cached_property
    def wanted_threads(self) -> int | None:
        """How many threads update a chunk on the CPU, as configured."""
        configured = {states.parameter.stored.config.update_threads for states in self.states}
        return min((threads for threads in configured if threads is not None), default=None)

    @cached_property
    def bytes_per_element(self) -> Bytes:
        return Bytes.of(self.states)

    @cached_property
    def reads(self) -> bool:
        """Whether anything of them is moved."""
        return any(states.bytes_per_element for states in self.states)

    @property
    def is_first(self) -> bool:
        """Whether the torch class makes states for any of them."""
        return any(kind.is_first for kind in self._kinds)

    @cached_property
    def _kinds(self) -> set[UpdateKind]:
        return {update.group.kind for update in self.updates}

    @cached_property
    def apart(self) -> Device | None:
        """The device that computes with all of the parameters, where it does so apart from the CPU, which updates
        them."""
        devices = {states.parameter.stored.device for states in self.states}
        if len(devices) > 1 or any(states.place is not CPU for states in self.states):
            return None
        (device,) = devices
        return device if device.computes_apart else None

    @cached_property
    def allocations(self) -> set[Allocation]:
        """Where the parameters and their states live."""
        return {allocation for states in self.states for allocation in states.allocations}

    @cached_property
    def in_shards(self) -> list[Update]:
        """The updates of parameters of which each of many ranks updates its own shard only."""
        return [update for update in self.updates if update.states.in_shards]

    def chunks(self, elements: int) -> list[Chunk]:
        """Return the updates in chunks of at most so many elements, in the order of their parameters' places."""
        if self._chunks is None or self._chunks[0] != elements:
            self._chunks = elements, self._cut(elements)
        return self._chunks[1]

    def let_go_of_gradients(self) -> None:
        """Drop the gradients: the updates are over, well or not."""
        for states in self.states:
            states.gradient = None
        for chunk in self._chunks[1] if self._chunks is not None else ():
            chunk.let_go_of_gradients()

    def _cut(self, elements: int) -> list[Chunk]:
        """Cut the updates into chunks, which are in the order of their first parameters, and those of a kind in the
        order in which they were cut: the last slice of a parameter is updated last."""
        chunks: list[tuple[int, Chunk]] = []
        by_kind: dict[UpdateKind, dict[StoredTensor, Update]] = {}
        for update in self.updates:
            by_kind.setdefault(update.group.kind, {})[update.states.parameter] = update
        for kind, updates in by_kind.items():
            members = [updates[parameter] for parameter in sorted(updates, key=_place)]
            if kind.non_elementwise:
                for update in members:
                    parameter = update.states.parameter
                    chunk = Chunk([SliceStates([update], [range(parameter.numel())], is_last=True)])
                    chunks.append((_place(parameter), chunk))
                continue
            place = 0
            joins = [False, *(update.states.joins(before.states) for before, update in pairwise(members))]
            sizes = [Member(update.states.updated, joined) for update, joined in zip(members, joins, strict=True)]
            for slices in cut(sizes, elements, AT_A_TIME):
                place = max(place, _place(members[slices[0].members.start].states.parameter))
                updated = [
                    SliceStates(members[piece.members.start : piece.members.stop], piece.elements, piece.is_last)
                    for piece in slices
                ]
                chunks.append((place, Chunk(updated)))
        return [chunk for _, chunk in sorted(chunks, key=itemgetter(0))]


def _place(parameter: StoredTensor) -> int:
    return parameter.stored.place


def _let_go_of_bytes(batch: UpdateBatch | None) -> None:
    """Drop the bytes when a parameter's storage is gone. The batch does not come again: see `RecurringUpdates`."""
    if batch is not None:
        batch.bytes, batch._chunks = [], None
        batch.__dict__.pop("allocations", None)


class RecurringUpdates:
    """The batch of a whole step, which comes again in the next one while nobody has changed anything that matters."""

    def __init__(
        self,
        batch: UpdateBatch,
        groups: Sequence[Sequence[StoredTensor]],
        shown: Mapping[torch.Tensor, State],
        layouts: Callable[[int], GroupLayouts],
    ) -> None:
        """`groups` has the parameters in `batch`, those of each of the optimizer's groups. `shown` is the optimizer's
        state. `layouts` gives those of a group, by its number."""
        self.batch = batch
        batch.recurs = True
        self._sizes = list(map(len, groups))
        self._parameters = list(chain.from_iterable(groups))
        self._dtypes = [
            (number, dtype)
            for number, parameters in enumerate(groups)
            for dtype in {batch.parameters[parameter].dtype for parameter in parameters}
        ]
        states = [batch.parameters[parameter] for parameter in self._parameters]
        self._states, self._mastered = states, [updated for updated in states if updated.has_master]
        gradients = [updated.gradient for updated in states]
        # By key: who holds a space keeps it from reuse.
        self._spaces = [gradient.stored.key for gradient in gradients if isinstance(gradient, StoredTensor)]
        self._recurrence = Recurrence(self._parameters, self._parameters, shown, self._layouts_by(layouts))

    @staticmethod
    def of(
        batch: UpdateBatch,
        groups: Sequence[Sequence[torch.Tensor]],
        shown: Mapping[torch.Tensor, State],
        layouts: Callable[[int], GroupLayouts],
    ) -> RecurringUpdates | None:
        """Make recurring updates; None where `groups` have other parameters too, or something else can't be known
        again."""
        kinds = [type(parameter) for parameter in chain.from_iterable(groups)]
        if kinds != [StoredTensor] * len(batch.parameters) or not batch.streams_gradients:
            return None
        if any(update.group.kind.non_elementwise for update in batch.updates):
            return None
        stored = [[parameter for parameter in group if isinstance(parameter, StoredTensor)] for group in groups]
        return RecurringUpdates(batch, stored, shown, layouts)

    def comes_again(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        shown: Mapping[torch.Tensor, State],
        layouts: Callable[[int], GroupLayouts],
    ) -> bool:
        """Whether the batch comes again for the gradients that the parameters have now; takes them, then."""
        parameters = list(chain.from_iterable(groups))
        if list(map(len, groups)) != self._sizes:
            return False
        if not self._recurrence.comes_again(parameters, shown, self._layouts_by(layouts)):
            return False
        given = (parameter.grad for parameter in self._parameters)
        gradients = [gradient for gradient in given if isinstance(gradient, StoredTensor) and not gradient.views]
        if len(gradients) < len(self._parameters):
            return False
        if [gradient.stored.key for gradient in gradients] != self._spaces:
            return False
        for states, gradient in zip(self._states, gradients, strict=True):
            states.gradient = gradient
        for states in self._mastered:
            states.look_for_writes(states.masters)
        return True

    def _layouts_by(self, layouts: Callable[[int], GroupLayouts]) -> list[StateLayout | None]:
        """Return the present layouts of the groups, in each dtype of an update."""
        return [layouts(number).of_pieces(dtype) for number, dtype in self._dtypes]
