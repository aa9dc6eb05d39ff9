"""What does not move costs nothing: where a parameter, its gradient and its states are in the memory of what updates
them, the torch class steps them as they are.

[Note: in-place updates]
The class gets plain tensors over the stored bytes, in the parameter's shape, and all parameters of a group in one call,
as without zinf. These tensors serve from step to step, for as long as the optimizer shows the same states of the same
parameter. Where it has an fp32 master, the class steps that with a copy of the gradient, and the parameter takes the
result, rounded. Whatever else there is to do goes the way of all stored parameters (see `StreamedStep`): the first step
makes states, what somebody has put in their place is brought to where they live, and so is what somebody has written to
a parameter with a master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, State, TensorLists
from zinf_fx.optim.formats import MASTER
from zinf_fx.optim.layouts import GroupLayouts, StateLayout
from zinf_fx.optim.recurrence import Recurrence
from zinf_fx.optim.states import ParameterStates
from zinf_fx.plan.chunks import AT_A_TIME
from zinf_fx.runtime.gradients.state import GradientState, state_of
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

_gradient, _layout, _dtype = map(attrgetter, ("grad", "layout", "dtype"))


class InPlaceParameter:
    """A stored parameter that the torch class steps where it is.

    Attributes:
        parameter: as users have it.
        place: the device that updates it.
        layout: the layout of its states.
        entry: what the optimizer shows of its states.
        value: its bytes, in its shape.
        weights: what the class updates: `value` or, where there is a master, the bytes of that, in the same shape.
        state: what the class works on. Of a stored state, that is its bytes.
        written: the tensors by whose versions autograd sees that an update writes.
    """

    def __init__(
        self,
        states: ParameterStates,
        layout: StateLayout,
        entry: State,
        value: torch.Tensor,
        memory: Mapping[str, torch.Tensor],
        master: torch.Tensor | None,
    ) -> None:
        """`memory` has the bytes of the stored states of `layout` by their names, and `master` those of the master, if
        there is one."""
        self.parameter, self.place, self.value = states.parameter, states.place, value
        self.weights = value if master is None else master
        self._states, self._bytes = states, states.parameter.stored.bytes
        self.layout, self.entry, self._memory = layout, entry, memory
        self.state: State = {k: memory.get(k, v) for k, v in entry.items() if k in memory or k not in states.tensors}
        self.written = (self.parameter, *self._bytes.tokens)

    @property
    def has_master(self) -> bool:
        return self.weights is not self.value

    @property
    def is_written_to(self) -> bool:
        """Whether somebody wrote to the parameter, and its master doesn't have that yet."""
        return self.has_master and self._states.version != self._bytes.version

    def note_rounded(self) -> None:
        """Note that the parameter has the values of its master."""
        self._states.version = self._bytes.version

    def usable(self, gradient: torch.Tensor, unscales: bool) -> torch.Tensor | None:
        """Return the parameter's gradient, or its bytes, if the class can work on them or on a copy. `unscales` says
        whether the class changes what it works on."""
        memory: torch.Tensor | None = gradient
        if isinstance(gradient, StoredTensor):
            memory = None if unscales else _memory_of(gradient, self.place)
        if type(memory) is not torch.Tensor or memory.layout is not torch.strided:
            return None
        # Fused kernels take elements in the order in which they lie.
        return memory if memory.dtype is self.value.dtype and memory.is_contiguous() else None

    @property
    def states_nbytes(self) -> int:
        """The bytes of the states that an update changes."""
        masters = self.weights.nbytes if self.has_master else 0
        return masters + sum(memory.nbytes for memory in self._memory.values())

    def show(self) -> None:
        """Have the optimizer show what the class left in `state`."""
        for name, value in self.state.items():
            memory = self._memory.get(name)
            if memory is None:
                self.entry[name] = value
            elif value is not memory:
                memory.copy_(value)
                self.state[name] = memory


@dataclass(frozen=True)
class InPlaceBatch:
    """Parameters that the class updates in one call, with lists of what they have.

    Attributes:
        place: the device that updates them.
        members: all of them have masters, or none has.
        parameters: the members' parameters.
        dtypes: the dtypes of the parameters.
        rounded: the bytes of parameters with masters, which take the values of these.
        written: the tensors by whose versions autograd sees that an update writes.
        lists: what the class steps, with its states.
    """

    place: Device
    members: Sequence[InPlaceParameter]
    parameters: Sequence[StoredTensor]
    dtypes: Sequence[torch.dtype]
    rounded: list[torch.Tensor]
    written: Sequence[torch.Tensor]
    lists: TensorLists

    @staticmethod
    def of(members: Sequence[InPlaceParameter]) -> InPlaceBatch:
        """Make a batch of members that one device updates."""
        return InPlaceBatch(
            members[0].place,
            members,
            [member.parameter for member in members],
            [member.value.dtype for member in members],
            [member.value for member in members if member.has_master],
            list(chain.from_iterable(member.written for member in members)),
            TensorLists([member.weights for member in members], [member.state for member in members]),
        )

    def gradients(self) -> list[torch.Tensor] | None:
        """Return the gradients of the parameters, if the class can work on all of them as they are."""
        gradients = list(map(_gradient, self.parameters))
        plain = set(map(type, gradients)) == {torch.Tensor} and set(map(_layout, gradients)) == {torch.strided}
        fit = plain and list(map(_dtype, gradients)) == self.dtypes and all(map(torch.Tensor.is_contiguous, gradients))
        return gradients if fit else None

    def update(self, inner: Optimizer, gradients: list[torch.Tensor]) -> bool:
        """Take a step of `inner`, the class with its options. Returns whether the same objects are all that is in the
        states afterwards."""
        if self.rounded:
            gradients = _copies(gradients, self.lists.weights)
        same = self.lists.step(inner, gradients)
        if self.rounded:
            torch._foreach_copy_(self.rounded, self.lists.weights)
            for member in self.members:
                member.note_rounded()
        return same


def _copies(gradients: list[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy gradients to the dtype of the weights that they update."""
    numbers = [weight.numel() for weight in weights]
    memory = torch.empty(sum(numbers), dtype=weights[0].dtype, device=weights[0].device)
    copies = [part.view(weight.shape) for part, weight in zip(memory.split(numbers), weights, strict=True)]
    torch._foreach_copy_(copies, gradients)
    return copies


class InPlaceGroup:
    """The parameters of one of the optimizer's groups that the class steps where they are, from step to step.

    Attributes:
        members: for each parameter of the group, it as a member, or None if it is updated in chunks.
        is_complete: whether all parameters are members.
        tiers: the tiers in which members live.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        members: Sequence[InPlaceParameter | None],
        shown: Mapping[torch.Tensor, State],
    ) -> None:
        """`shown` is the optimizer's state."""
        self.members = list(members)
        self._present = [member for member in members if member is not None]
        self.is_complete = len(self._present) == len(self.members)
        self._mastered = [member for member in self._present if member.has_master]
        layouts = {member.weights.dtype: member.layout for member in self._present}
        self._dtypes = list(layouts)
        self.tiers = {member.parameter.stored.tiers for member in self._present}
        self._batches: list[InPlaceBatch] | None = None
        stored = [member.parameter for member in self._present]
        self._recurrence = Recurrence(parameters, stored, shown, layouts.values())

    def batches(self, group: Group) -> list[InPlaceBatch] | None:
        """Return all parameters of the group in the calls that update them, if all are members."""
        if self._batches is None and self.is_complete:
            self._batches = list(_batches_of(group, self._present))
        return self._batches

    def note_states(self) -> None:
        """Take the states that the optimizer shows now for those that come again."""
        self._recurrence.note_states()
        for batch in self._batches or ():
            batch.lists.take_over_states()

    def comes_again(
        self, parameters: Sequence[torch.Tensor], shown: Mapping[torch.Tensor, State], layouts: GroupLayouts
    ) -> bool:
        """Whether the optimizer shows the same states of the same parameters, and all have the same bytes."""
        present = [layouts.of_pieces(dtype) for dtype in self._dtypes]
        written = (member.is_written_to for member in self._mastered)
        return self._recurrence.comes_again(parameters, shown, present) and not any(written)


def _memory_of(tensor: StoredTensor, place: Device) -> torch.Tensor | None:
    """Return the bytes of a stored tensor in its shape, if they are all it has and live where `place` computes."""
    shard = tensor.stored.shard
    if tensor.views or shard.ranks.shards > 1 or state_of(tensor) is GradientState.LOCAL:
        return None
    memory = tensor.stored.bytes.in_memory_of(place)
    return None if memory is None else memory.view(tensor.shape)


@dataclass(frozen=True)
class InPlaceUpdate:
    """One call of the torch class: a batch of members of one group, with their gradients."""

    group: InPlaceGroup
    options: Group
    batch: InPlaceBatch
    gradients: list[torch.Tensor]

    @property
    def states_nbytes(self) -> int:
        """The bytes of the states that it changes."""
        return sum(member.states_nbytes for member in self.batch.members)

    def run(self, inner: Optimizer) -> None:
        """Update the members. `inner` is the class with its options, without parameters yet."""
        if not self.batch.update(inner, self.gradients):
            for member in self.batch.members:
                member.show()
            self.group.note_states()


class InPlaceGroups:
    """What one optimizer updates in place, group by group, from step to step."""

    def __init__(self) -> None:
        self._groups: dict[int, InPlaceGroup] = {}  # by number

    def divide(
        self,
        optimizer: Optimizer,
        shown: Mapping[torch.Tensor, State],
        stored: Mapping[StoredTensor, ParameterStates],
        layouts_of: Callable[[Group], GroupLayouts],
    ) -> tuple[list[InPlaceUpdate], list[Group]]:
        """Return the in-place updates of a step of `optimizer`, and its groups with all other parameters that the step
        may concern. `shown` is the optimizer's state, and `stored` what it keeps of stored parameters.

        Raises: OptimizerError for options that can't be honoured.
        """
        unscales = getattr(optimizer, "grad_scale", None) is not None  # a fused class does, before it updates
        updates: list[InPlaceUpdate] = []
        remaining: list[Group] = []
        for number, group in enumerate(optimizer.param_groups):
            in_place = self._group(number, group, shown, stored, layouts_of)
            options = {name: value for name, value in group.items() if name != "params"}
            complete = _update_all(in_place, options, group)
            if complete is not None:
                updates += complete
                remaining.append({**group, "params": []})
                continue
            rest: list[torch.Tensor] = []
            gradients: dict[InPlaceParameter, torch.Tensor] = {}
            for parameter, member in zip(group["params"], in_place.members, strict=True):
                gradient = parameter.grad
                usable = None if member is None or gradient is None else member.usable(gradient, unscales)
                if member is not None and usable is not None:
                    gradients[member] = usable
                elif gradient is not None or not isinstance(parameter, StoredTensor):
                    rest.append(parameter)
            remaining.append({**group, "params": rest})
            for batch in _batches_of(group, list(gradients)):
                updates.append(InPlaceUpdate(in_place, options, batch, [gradients[member] for member in batch.members]))
        return updates, remaining

    def _group(
        self,
        number: int,
        group: Group,
        shown: Mapping[torch.Tensor, State],
        stored: Mapping[StoredTensor, ParameterStates],
        layouts_of: Callable[[Group], GroupLayouts],
    ) -> InPlaceGroup:
        """Return a group with the members that it has now."""
        parameters, known = group["params"], self._groups.get(number)
        layouts: GroupLayouts | None = None
        if known is not None:
            layouts = layouts_of(group)
            if not known.comes_again(parameters, shown, layouts):
                known = None
            elif known.is_complete:
                return known
        members = [None] * len(parameters) if known is None else known.members
        joined: dict[int, InPlaceParameter] = {}
        for position, (parameter, member) in enumerate(zip(parameters, members, strict=True)):
            if member is None and isinstance(parameter, StoredTensor) and parameter.grad is not None:
                layouts = layouts or layouts_of(group)
                member = _find(parameter, shown.get(parameter), stored.get(parameter), group, layouts)
                if member is not None:
                    joined[position] = member
        if known is None or joined:
            known = InPlaceGroup(parameters, [joined.get(n, member) for n, member in enumerate(members)], shown)
            self._groups[number] = known
        return known


def _find(
    parameter: StoredTensor,
    entry: State | None,
    states: ParameterStates | None,
    group: Group,
    layouts: GroupLayouts,
) -> InPlaceParameter | None:
    """Return a parameter as the class may step it from now on, if all that its update needs is in memory."""
    if states is None or entry is None or states.rounded or (states.has_master and states.masters != (MASTER,)):
        return None
    if states.place.in_host_memory and (states.bytes_written or parameter.stored.device.computes_apart):
        return None  # it goes to the store, or is updated beside the device: see [Note: beside]
    value = _memory_of(parameter, states.place)
    at_once = group.get("fused") and not states.has_master
    if value is None or not (at_once or value.numel() <= _elements(parameter, states.dtype, states.place)):
        return None
    layout = layouts.of_pieces(states.dtype)
    names = () if layout is None else (*layout.tensors, *((MASTER,) if states.has_master else ()))
    if layout is None or any(entry.get(name) is not states.tensors.get(name, entry) for name in names):
        return None
    lying = ((name, _memory_of(states.tensors[name], states.place)) for name in names)
    memory = {name: elements for name, elements in lying if elements is not None}
    # Fused kernels count steps where they run, and the others on the CPU.
    counts_at = (states.place if group.get("fused") else CPU).torch_device
    numbers = (v for k, v in entry.items() if k not in states.tensors and isinstance(v, torch.Tensor))
    if len(memory) < len(names) or any(number.device != counts_at for number in numbers):
        return None
    member = InPlaceParameter(states, layout, entry, value, memory, memory.pop(MASTER, None))
    return None if member.is_written_to else member


def _elements(parameter: StoredTensor, dtype: torch.dtype, place: Device) -> int:
    """How many elements one call updates in `dtype`, where the class makes temporary tensors as large as these."""
    return AT_A_TIME if place is CPU else parameter.stored.config.chunk // dtype.itemsize


def _update_all(in_place: InPlaceGroup, options: Group, group: Group) -> list[InPlaceUpdate] | None:
    """Return updates of all parameters of a group, if the class can step all as they are."""
    batches = in_place.batches(group)
    if batches is None:
        return None
    updates: list[InPlaceUpdate] = []
    for batch in batches:
        if (gradients := batch.gradients()) is None:
            return None
        updates.append(InPlaceUpdate(in_place, options, batch, gradients))
    return updates


def _batches_of(group: Group, members: Sequence[InPlaceParameter]) -> Iterator[InPlaceBatch]:
    """Divide members of one group into the calls that update them."""
    kinds: dict[tuple[Device, bool], list[InPlaceParameter]] = {}
    for member in members:
        kinds.setdefault((member.place, member.has_master), []).append(member)
    for (place, have_masters), alike in kinds.items():
        first = room = 0
        for number, member in enumerate(alike if have_masters or not group.get("fused") else ()):
            count = member.weights.numel()
            if number == first:
                room = _elements(member.parameter, member.weights.dtype, place)
            elif count > room:
                yield InPlaceBatch.of(alike[first:number])
                first, room = number, _elements(member.parameter, member.weights.dtype, place)
            room -= count
        yield InPlaceBatch.of(alike[first:])
