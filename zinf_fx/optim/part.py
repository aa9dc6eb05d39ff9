"""A part of a chunk: the weights of one parameter, with their gradient and states, in one memory for one update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch

from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.companions import part_of
from zinf_fx.optim.elements import AnyWindow, open_elements, open_window
from zinf_fx.optim.opened import OpenWindows, begin_update, end_update, store_weights, take_over_written, weights_of
from zinf_fx.optim.states import ParameterStates, State
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.windows import DeviceWindow, Window


@dataclass
class Begun:
    """Elements of a part whose update has begun.

    Attributes:
        elements: which they are, of the part.
        weights, state: what the arithmetic runs on.
        memory: the states that are stored, by name.
        masters: likewise, those of the weights.
    """

    elements: slice
    weights: torch.Tensor
    state: State
    memory: Mapping[str, torch.Tensor]
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)


class OpenPart(OpenWindows):
    """The windows of one part, opened at construction, but for the gradient's: wait for their reads, update all of it,
    some elements at a time or several at the same time, `store`; `close` in any case.

    Attributes:
        piece: which elements of which parameter.
        names: of the states that are stored.
    """

    def __init__(self, piece: Piece[ParameterStates], names: Iterable[str], present: Set[str]) -> None:
        """`names`: the states that are stored; those in `present` hold values, as does the master if it is in there.

        Raises: StoreError; no window is open then.
        """
        states = piece.owner
        self.piece, self.names, self._place, self._present = piece, tuple(names), states.place, present
        super().__init__()
        try:
            self._known = present.issuperset(states.masters)
            self._master = {n: self._open(states.tensors[n], self._known, n) for n in states.masters}
            self._refresh = states.refresh
            self._parameter = self._open(states.parameter, states.reads_weights or self._refresh)
            self._states = {name: self._open(states.tensors[name], name in present, name) for name in self.names}
        except BaseException:
            self.close()
            raise

    @property
    def parameters(self) -> list[StoredTensor]:
        """Those that are updated."""
        return [self.piece.owner.parameter]

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states that the update changes, masters among them."""
        return self.piece.owner.states_nbytes(self._elements)

    def open_gradient(self) -> None:
        """Open the gradient, which is final."""
        self._gradient = self._keep(self._open_gradient(self.piece.owner.gradient))

    @property
    def is_current(self) -> bool:
        """Whether its windows would not be opened otherwise now."""
        return self.shows_the_present and (self._refresh or not self.piece.owner.refresh)

    def wait(self) -> None:
        """After the reads, take over what others wrote to the parameter; where it still is the master rounded, the
        master stays."""
        for window in self._windows:
            window.wait()
        if self._master and self._refresh:
            take_over_written(self._elements_of(self._master), self._parameter.wait(), self._known)

    def _elements_of(
        self, windows: Mapping[str, Window | DeviceWindow], some: range | None = None
    ) -> dict[str, torch.Tensor]:
        """What windows over states have, by name: of some of the elements that they are over; default all."""
        found = {name: window.wait() for name, window in windows.items()}
        if some is None:
            return found
        parts = {name: part_of(name, self.piece.owner.tensors, some) for name in found}
        return {name: found[name][part.start : part.stop] for name, part in parts.items()}

    def store(self, unscaled: bool) -> None:
        """Start writing what was updated; with `unscaled`, the gradient is part of that."""
        for window in (*self._master.values(), self._parameter, *self._states.values()):
            window.store()
        if unscaled:
            self._gradient.store()

    @property
    def _elements(self) -> range:
        """Of the parameter."""
        return range(self.piece.start, self.piece.start + self.piece.count)

    def _open(self, tensor: StoredTensor, load: bool, state: str = "") -> Window | DeviceWindow:
        part = part_of(state, self.piece.owner.tensors, self._elements)
        return self._keep(open_window(tensor.storage, self._place, part.start, len(part), load=load))

    def _open_gradient(self, gradient: torch.Tensor) -> AnyWindow:
        return open_elements(gradient, self._place, self.piece.start, self.piece.count)


class OpenPiece(OpenPart):
    """A piece of a parameter that is updated element by element: everything is flat."""

    def begin(self, elements: slice, scalars: State, scratch: torch.Tensor | None) -> Begun:
        """Some of the elements, as weights with their gradient, and with their states, copies of `scalars` among them.

        `scratch`: in the weights' dtype, `scratch_rows` of at least as many elements: for the gradient and for states
        in another dtype.
        """
        stored, some = self.piece.owner, range(elements.start, elements.stop)
        masters, memory = self._elements_of(self._master, some), self._elements_of(self._states, some)
        room = None if stored.weights_row is None else scratch[stored.weights_row, : len(some)]
        weights = weights_of(self._parameter.wait()[elements], masters, room)
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scalars.items()}
        gradient = self._gradient.wait()[elements]
        state |= begin_update(weights, gradient, memory, self._present, stored.rounded, scratch)
        return Begun(elements, weights, state, memory, masters)

    def end(self, begun: Begun, state: State) -> State:
        """Put the updated weights and element-wise states where they will be stored from. Returns the other states."""
        store_weights(begun.weights, self._parameter.wait()[begun.elements], begun.masters)
        return end_update(begun.weights, begun.memory, state)
