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


class Resident:
    """A stored parameter as the torch class steps it.

    Attributes:
        parameter: as users have it.
        place: what updates it.
        layout: of its states.
        entry: what the optimizer shows of them.
        value: over its bytes, in its shape.
        weights: what the class updates: those, or the bytes of the master, likewise.
        state: what the class works on; of stored states, their bytes.
        written: what autograd sees the writes of an update by.
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
        """`memory`: by name, the bytes of the stored states of `layout`; `master`: those of the master, if any."""
        self.parameter, self.place, self.value = states.parameter, states.place, value
        self.weights = value if master is None else master
        self._states, self._bytes = states, states.parameter.stored.bytes
        self.layout, self.entry, self._memory = layout, entry, memory
        self.state: State = {k: memory.get(k, v) for k, v in entry.items() if k in memory or k not in states.tensors}
        storage = self.parameter.stored
        self.written = (self.parameter, *storage.bytes.tokens)

    @property
    def has_master(self) -> bool:
        return self.weights is not self.value

    @property
    def is_written_to(self) -> bool:
        """Whether somebody wrote to the parameter, which its master doesn't have yet."""
        return self.has_master and self._states.version != self._bytes.version

    def master_is_rounded(self) -> None:
        """The parameter has the values of its master now."""
        self._states.version = self._bytes.version

    def gradient(self, found: torch.Tensor, unscales: bool) -> torch.Tensor | None:
        """`found`, the parameter's, if the class can work on it, or on a copy of it. `unscales`: whether the class
        changes what it works on."""
        usable: torch.Tensor | None = found
        if isinstance(found, StoredTensor):
            usable = None if unscales else _memory_of(found, self.place)
        if type(usable) is not torch.Tensor or usable.layout is not torch.strided:
            return None
        # Fused kernels take elements in the order in which they lie.
        return usable if usable.dtype is self.value.dtype and usable.is_contiguous() else None

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that an update changes."""
        masters = self.weights.nbytes if self.has_master else 0
        return masters + sum(memory.nbytes for memory in self._memory.values())

    def show(self) -> None:
        """Show what the class left in `state`."""
        for name, value in self.state.items():
            memory = self._memory.get(name)
            if memory is None:
                self.entry[name] = value
            elif value is not memory:
                memory.copy_(value)
                self.state[name] = memory


@dataclass(frozen=True)
class Together:
    """Residents that the class updates in one call, and lists of what they have.

    Attributes:
        place: what updates them.
        dtypes: of the parameters.
        rounded: over the bytes of those with a master, which take its values; there is no other kind with them.
        written: what autograd sees the writes of an update by.
        lists: what the class steps, with its states.
    """

    place: Device
    residents: Sequence[Resident]
    parameters: Sequence[StoredTensor]
    dtypes: Sequence[torch.dtype]
    rounded: list[torch.Tensor]
    written: Sequence[torch.Tensor]
    lists: TensorLists

    @staticmethod
    def of(residents: Sequence[Resident]) -> Together:
        """Those of one place."""
        return Together(
            residents[0].place,
            residents,
            [one.parameter for one in residents],
            [one.value.dtype for one in residents],
            [one.value for one in residents if one.has_master],
            list(chain.from_iterable(one.written for one in residents)),
            TensorLists([one.weights for one in residents], [one.state for one in residents]),
        )

    def gradients(self) -> list[torch.Tensor] | None:
        """Those of the parameters, if all are ordinary tensors that the class can work on as they are."""
        found = list(map(_gradient, self.parameters))
        plain = set(map(type, found)) == {torch.Tensor} and set(map(_layout, found)) == {torch.strided}
        fit = plain and list(map(_dtype, found)) == self.dtypes and all(map(torch.Tensor.is_contiguous, found))
        return found if fit else None

    def update(self, inner: Optimizer, gradients: list[torch.Tensor]) -> bool:
        """A step of `inner`, the class with its options. Returns whether the same objects are all that is in the state
        afterwards."""
        if self.rounded:
            gradients = _copies(gradients, self.lists.weights)
        same = self.lists.step(inner, gradients)
        if self.rounded:
            torch._foreach_copy_(self.rounded, self.lists.weights)
            for one in self.residents:
                one.master_is_rounded()
        return same


def _copies(gradients: list[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients in the dtype of what they are for."""
    numbers = [weight.numel() for weight in weights]
    memory = torch.empty(sum(numbers), dtype=weights[0].dtype, device=weights[0].device)
    copies = [part.view(weight.shape) for part, weight in zip(memory.split(numbers), weights, strict=True)]
    torch._foreach_copy_(copies, gradients)
    return copies


class ResidentGroup:
    """The residents among the parameters of a group, when they were last seen.

    Attributes:
        residents: for each parameter, it as a resident, or None.
        is_complete: whether all are residents.
        tiers: in which they live.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        residents: Sequence[Resident | None],
        shown: Mapping[torch.Tensor, State],
    ) -> None:
        """`residents`: of each parameter; None: it is none. `shown`: the optimizer's state."""
        self.residents = list(residents)
        self._present = [one for one in residents if one is not None]
        self.is_complete = len(self._present) == len(self.residents)
        self._mastered = [one for one in self._present if one.has_master]
        layouts = {one.weights.dtype: one.layout for one in self._present}
        self._dtypes = list(layouts)
        self.tiers = {one.parameter.stored.tiers for one in self._present}
        self._together: list[Together] | None = None
        stored = [one.parameter for one in self._present]
        self._recurrence = Recurrence(parameters, stored, shown, layouts.values())

    def together(self, group: Group) -> list[Together] | None:
        """How all parameters of the group are updated, if all are residents."""
        if self._together is None and self.is_complete:
            self._together = list(_together(group, self._present))
        return self._together

    def note_states(self) -> None:
        """Take the states that the optimizer shows now for those that come again."""
        self._recurrence.note_states()
        for one in self._together or ():
            one.lists.take_over_states()

    def comes_again(
        self, parameters: Sequence[torch.Tensor], shown: Mapping[torch.Tensor, State], layouts: GroupLayouts
    ) -> bool:
        """Whether the optimizer shows the same states of the same parameters, and all have the same bytes."""
        found = [layouts.of_pieces(dtype) for dtype in self._dtypes]
        written = (one.is_written_to for one in self._mastered)
        return self._recurrence.comes_again(parameters, shown, found) and not any(written)


def _memory_of(tensor: StoredTensor, place: Device) -> torch.Tensor | None:
    """The bytes of a stored tensor in its shape, where `place` computes, if they live there and are all it has."""
    share = tensor.stored.share
    if tensor.views or share.ranks.shards > 1 or state_of(tensor) is GradientState.LOCAL:
        return None
    memory = tensor.stored.bytes.in_memory_of(place)
    return None if memory is None else memory.view(tensor.shape)


@dataclass(frozen=True)
class ResidentCall:
    """One call of the torch class: some residents of one group, with their gradients, updated at one place."""

    group: ResidentGroup
    options: Group
    together: Together
    gradients: list[torch.Tensor]

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that it changes."""
        return sum(one.states_nbytes for one in self.together.residents)

    def run(self, inner: Optimizer) -> None:
        """`inner`: the class with its options, and no parameters yet."""
        if not self.together.update(inner, self.gradients):
            for one in self.together.residents:
                one.show()
            self.group.note_states()


class Residents:
    """Those of one optimizer, from step to step."""

    def __init__(self) -> None:
        self._groups: dict[int, ResidentGroup] = {}  # by number

    def divide(
        self,
        optimizer: Optimizer,
        shown: Mapping[torch.Tensor, State],
        stored: Mapping[StoredTensor, ParameterStates],
        layouts_of: Callable[[Group], GroupLayouts],
    ) -> tuple[list[ResidentCall], list[Group]]:
        """What a step of `optimizer` does with residents, and its groups with all other parameters that the step may
        concern. `shown`: its state. `stored`: what it keeps of stored parameters.

        Raises: OptimizerError for options that can't be honoured.
        """
        unscales = getattr(optimizer, "grad_scale", None) is not None  # a fused class does, before it updates
        calls: list[ResidentCall] = []
        others: list[Group] = []
        for number, group in enumerate(optimizer.param_groups):
            rest: list[torch.Tensor] = []
            taken: dict[Resident, torch.Tensor] = {}  # gradients
            seen = self._see(number, group, shown, stored, layouts_of)
            options = {name: value for name, value in group.items() if name != "params"}
            everything = _all_of(seen, group)
            if everything is not None:
                calls += [ResidentCall(seen, options, some, gradients) for some, gradients in everything]
                others.append({**group, "params": []})
                continue
            for parameter, one in zip(group["params"], seen.residents, strict=True):
                gradient = parameter.grad
                usable = None if one is None or gradient is None else one.gradient(gradient, unscales)
                if one is not None and usable is not None:
                    taken[one] = usable
                elif gradient is not None or not isinstance(parameter, StoredTensor):
                    rest.append(parameter)
            others.append({**group, "params": rest})
            for some in _together(group, list(taken)):
                calls.append(ResidentCall(seen, options, some, [taken[one] for one in some.residents]))
        return calls, others

    def _see(
        self,
        number: int,
        group: Group,
        shown: Mapping[torch.Tensor, State],
        stored: Mapping[StoredTensor, ParameterStates],
        layouts_of: Callable[[Group], GroupLayouts],
    ) -> ResidentGroup:
        """The residents of a group, as they are now."""
        parameters, seen = group["params"], self._groups.get(number)
        layouts: GroupLayouts | None = None
        if seen is not None:
            layouts = layouts_of(group)
            if not seen.comes_again(parameters, shown, layouts):
                seen = None
            elif seen.is_complete:
                return seen
        residents = [None] * len(parameters) if seen is None else seen.residents
        news: dict[int, Resident] = {}
        for position, (parameter, one) in enumerate(zip(parameters, residents, strict=True)):
            if one is None and isinstance(parameter, StoredTensor) and parameter.grad is not None:
                layouts = layouts or layouts_of(group)
                one = _find(parameter, shown.get(parameter), stored.get(parameter), group, layouts)
                if one is not None:
                    news[position] = one
        if seen is None or news:
            seen = ResidentGroup(parameters, [news.get(n, one) for n, one in enumerate(residents)], shown)
            self._groups[number] = seen
        return seen


def _find(
    parameter: StoredTensor,
    entry: State | None,
    states: ParameterStates | None,
    group: Group,
    layouts: GroupLayouts,
) -> Resident | None:
    """A parameter as the class may step it from now on, if all that its update needs is in memory."""
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
    found = Resident(states, layout, entry, value, memory, memory.pop(MASTER, None))
    return None if found.is_written_to else found


def _elements(parameter: StoredTensor, dtype: torch.dtype, place: Device) -> int:
    """Of parameters that are updated in one call, in `dtype`, where that makes temporary tensors as large as these."""
    return AT_A_TIME if place is CPU else parameter.stored.config.chunk // dtype.itemsize


def _all_of(seen: ResidentGroup, group: Group) -> list[tuple[Together, list[torch.Tensor]]] | None:
    """All parameters of a group, call by call, with their gradients, if the class can step all as they are."""
    together = seen.together(group)
    if together is None:
        return None
    calls: list[tuple[Together, list[torch.Tensor]]] = []
    for some in together:
        if (gradients := some.gradients()) is None:
            return None
        calls.append((some, gradients))
    return calls


def _together(group: Group, residents: Sequence[Resident]) -> Iterator[Together]:
    """Residents of one group in the calls that update them."""
    kinds: dict[tuple[Device, bool], list[Resident]] = {}
    for one in residents:
        kinds.setdefault((one.place, one.has_master), []).append(one)
    for (place, have_masters), several in kinds.items():
        first = room = 0
        for number, one in enumerate(several if have_masters or not group.get("fused") else ()):
            count = one.weights.numel()
            if number == first:
                room = _elements(one.parameter, one.weights.dtype, place)
            elif count > room:
                yield Together.of(several[first:number])
                first, room = number, _elements(one.parameter, one.weights.dtype, place)
            room -= count
        yield Together.of(several[first:])
