"""What does not move costs nothing: where a parameter, its gradient and its states are in the memory of what updates
them, the torch class steps them as they are.

[Note: resident updates]
The class gets plain tensors over the stored bytes, in the parameter's shape, and all parameters of a group in one call,
as without zinf. These tensors serve from step to step, for as long as the optimizer shows the same states of the same
parameter. Whatever else there is to do goes the way of all stored parameters (see `StreamedStep`): the first step makes
states, and what somebody has put in their place is brought to where they live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, StateLayout, step_without_hooks
from zinf_fx.optim.layouts import GroupLayouts
from zinf_fx.optim.states import ParameterStates, State
from zinf_fx.plan.memory.accounting import AT_A_TIME
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


class Resident:
    """A stored parameter as the torch class steps it.

    Attributes:
        parameter: as users have it.
        place: what updates it.
        weights: over its bytes, in its shape.
        state: what the class works on; of stored states, their bytes.
        written: what autograd sees the writes of an update by.
    """

    def __init__(
        self,
        states: ParameterStates,
        layout: StateLayout,
        entry: State,
        weights: torch.Tensor,
        memory: Mapping[str, torch.Tensor],
    ) -> None:
        """`entry`: what the optimizer shows. `memory`: by name, the bytes of the stored states of `layout`."""
        self.parameter, self.place, self.weights = states.parameter, states.place, weights
        self.state: State = {k: memory.get(k, v) for k, v in entry.items() if k in memory or k not in states.tensors}
        self._states = tuple(states.tensors[name].storage.bytes for name in memory)
        tokens = (each.tokens for each in (self.parameter.storage.bytes, *self._states))
        self.written = (self.parameter, *chain.from_iterable(tokens))
        self._layout, self._entry, self._shown, self._memory = layout, entry, tuple(entry.values()), memory
        # A model may be converted before the next step, and what it had then is not to be kept.
        self._storage = weakref.ref(self.parameter.storage)

    def is_of(self, entry: State | None, layouts: GroupLayouts) -> bool:
        """Whether the optimizer shows this still as it was, for a parameter with the same bytes."""
        return (
            entry is self._entry
            and self._storage() is self.parameter.storage
            and layouts.of_pieces(self.weights.dtype) is self._layout
            and len(entry) == len(self._shown)
            and all(map(is_, entry.values(), self._shown))
        )

    def gradient(self, unscales: bool) -> torch.Tensor | None:
        """The parameter's, if the class can work on it as it is. `unscales`: whether it changes the gradient, too."""
        found = self.parameter.grad
        if isinstance(found, StoredTensor):
            found = None if unscales else _memory_of(found, self.place)
        if type(found) is not torch.Tensor or found.layout is not torch.strided:
            return None
        # Fused kernels take elements in the order in which they lie.
        return found if found.dtype is self.weights.dtype and found.is_contiguous() else None

    def before_write(self) -> None:
        """Wait for transfers from and to the bytes, if there can be any, and let who holds tiles see a write."""
        every = (self.parameter.storage.bytes, *self._states)
        if self.place.in_host_memory and not self.parameter.storage.device.in_host_memory:
            for each in every:
                each.in_memory_of(self.place)
        for each in every:
            each.home.version += 1

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that an update changes."""
        return sum(memory.nbytes for memory in self._memory.values())

    def end(self) -> None:
        """Show what the class left in `state`."""
        for name, value in self.state.items():
            memory = self._memory.get(name)
            if memory is None:
                self._entry[name] = value
            elif value is not memory:
                memory.copy_(value)
                self.state[name] = memory
        self._shown = tuple(self._entry.values())


def _memory_of(tensor: StoredTensor, place: Device) -> torch.Tensor | None:
    """The bytes of a stored tensor in its shape, where `place` computes, if they live there and are all it has."""
    share = tensor.storage.share
    if tensor.views or share.ranks.shards > 1 or share.unreduced:
        return None
    memory = tensor.storage.bytes.in_memory_of(place)
    return None if memory is None else memory.view(tensor.shape)


@dataclass(frozen=True)
class ResidentCall:
    """One call of the torch class: some parameters of one group, with their gradients, updated at one place."""

    group: Group
    place: Device
    residents: Sequence[Resident]
    gradients: Sequence[torch.Tensor]

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that it changes."""
        return sum(one.states_nbytes for one in self.residents)

    def run(self, inner: Optimizer) -> None:
        """`inner`: the class with its options, and no parameters yet."""
        weights = [one.weights for one in self.residents]
        inner.param_groups[0]["params"] = weights
        inner.state.update(zip(weights, [one.state for one in self.residents], strict=True))
        try:
            for parameter, gradient in zip(weights, self.gradients, strict=True):
                parameter.grad = gradient
            step_without_hooks(inner)
        finally:
            for parameter in weights:
                parameter.grad = None
        for one in self.residents:
            one.end()


class Residents:
    """Those of one optimizer, from step to step."""

    def __init__(self) -> None:
        self._known: dict[StoredTensor, Resident] = {}

    def divide(
        self,
        optimizer: Optimizer,
        shown: Mapping[torch.Tensor, State],
        stored: Mapping[torch.Tensor, ParameterStates],
        layouts_of: Callable[[Group], GroupLayouts],
    ) -> tuple[list[ResidentCall], list[Group]]:
        """What a step of `optimizer` does with residents, and its groups with all other parameters that the step may
        concern. `shown`: its state. `stored`: what it keeps of stored parameters.

        Raises: OptimizerError for options that can't be honoured.
        """
        unscales = getattr(optimizer, "grad_scale", None) is not None  # a fused class does, before it updates
        calls: list[ResidentCall] = []
        others: list[Group] = []
        for group in optimizer.param_groups:
            found: dict[Device, list[tuple[Resident, torch.Tensor]]] = {}
            rest: list[torch.Tensor] = []
            layouts: GroupLayouts | None = None
            for parameter in group["params"]:
                if not isinstance(parameter, StoredTensor):
                    rest.append(parameter)
                elif parameter.grad is not None:
                    layouts = layouts or layouts_of(group)
                    one = self._known.get(parameter)
                    if one is None or not one.is_of(shown.get(parameter), layouts):
                        one = self._find(parameter, shown.get(parameter), stored.get(parameter), group, layouts)
                    gradient = None if one is None else one.gradient(unscales)
                    if gradient is None:
                        rest.append(parameter)
                    else:
                        found.setdefault(one.place, []).append((one, gradient))
            others.append({**group, "params": rest})
            options = {name: value for name, value in group.items() if name != "params"}
            for place, pairs in found.items():
                calls += [
                    ResidentCall(options, place, *zip(*some, strict=True)) for some in _calls(group, place, pairs)
                ]
        return calls, others

    def _find(
        self,
        parameter: StoredTensor,
        entry: State | None,
        states: ParameterStates | None,
        group: Group,
        layouts: GroupLayouts,
    ) -> Resident | None:
        """A parameter as the class may step it from now on, if all that its update needs is in memory."""
        self._known.pop(parameter, None)
        if states is None or entry is None or states.has_master or states.rounded:
            return None
        weights = _memory_of(parameter, states.place)
        if weights is None or not (group.get("fused") or weights.numel() <= _elements(parameter, states.place)):
            return None
        layout = layouts.of_pieces(parameter.dtype)
        if layout is None or any(entry.get(name) is not states.tensors.get(name, entry) for name in layout.tensors):
            return None
        memory = {name: _memory_of(states.tensors[name], states.place) for name in layout.tensors}
        # Fused kernels count steps where they run, and the others on the CPU.
        counts_at = (states.place if group.get("fused") else CPU).torch_device
        numbers = (v for k, v in entry.items() if k not in states.tensors and isinstance(v, torch.Tensor))
        if any(each is None for each in memory.values()) or any(number.device != counts_at for number in numbers):
            return None
        one = self._known[parameter] = Resident(states, layout, entry, weights, memory)
        return one


def _elements(parameter: StoredTensor, place: Device) -> int:
    """Of parameters that the class updates in one call where it makes temporary tensors as large as these."""
    return AT_A_TIME if place is CPU else parameter.storage.config.chunk // parameter.dtype.itemsize


def _calls(
    group: Group, place: Device, pairs: Sequence[tuple[Resident, torch.Tensor]]
) -> Iterator[Sequence[tuple[Resident, torch.Tensor]]]:
    """Residents of one group, and their gradients, call by call."""
    if group.get("fused"):
        yield pairs
        return
    together: list[tuple[Resident, torch.Tensor]] = []
    room = 0
    for one, gradient in pairs:
        count = gradient.numel()
        if together and count > room:
            yield together
            together = []
        if not together:
            room = _elements(one.parameter, place)
        room -= count
        together.append((one, gradient))
    yield together
