"""A piece of a parameter: its weights, gradient and states, in one memory together for one update."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack

import torch

from zinf_fx.optim.chunks import Piece
from zinf_fx.optim.elements import Slice, open_elements, open_window
from zinf_fx.optim.states import MASTER, ParameterStates, State
from zinf_fx.runtime.stored_tensor import StoredTensor
from zinf_fx.runtime.windows import DeviceWindow, Window


class OpenPiece:
    """The windows of one piece, opened at construction: wait for their reads, update, `store`; `close` in any case.

    Attributes:
        piece: which elements of which parameter.
        weights, state: what the arithmetic runs on, set by `wait`.
    """

    weights: torch.Tensor
    state: State

    def __init__(
        self, piece: Piece[StoredTensor], states: ParameterStates, names: Iterable[str], present: Collection[str]
    ) -> None:
        """`names`: the element-wise states; those in `present` hold values, as does the master if it is in there.

        Raises: StoreError; no window is open then.
        """
        self.piece = piece
        self._place = states.place
        self._present = present
        self._windows: list[Window | DeviceWindow | Slice] = []
        self._open_windows = ExitStack()
        parameter = piece.parameter
        try:
            self._gradient = self._keep(open_elements(states.gradient, self._place, piece.start, piece.count))
            self._parameter = self._master = None
            if states.has_master:
                self._master = self._open(states.tensors[MASTER], MASTER in present)
                self._refresh = states.refresh
                self._parameter = self._open(parameter, states.refresh)
            else:
                self._parameter = self._open(parameter, True)
            self._states = {name: self._open(states.tensors[name], name in present) for name in names}
            self._rounded = states.rounded
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return all(window.ready for window in self._windows)

    def arrive(self) -> None:
        """Wait for the reads, and change nothing."""
        for window in self._windows:
            window.arrived()

    def wait(self, scalars: State, scratch: torch.Tensor | None) -> None:
        """After the reads, make `weights`, with their gradient, and `state`, with copies of `scalars` among it.

        `scratch`: in the weights' dtype, `scratch_rows` of at least as many elements: for the gradient and for states
        in another dtype.
        """
        if self._master is None:
            self.weights = self._parameter.wait()
        else:
            self.weights = self._master.wait()
            if self._refresh:
                self._take_over(self._parameter.wait())
        gradient = self._gradient.wait()
        if gradient.dtype != self.weights.dtype:
            gradient = scratch[0, : self.piece.count].copy_(gradient)
        self.weights.grad = gradient
        self.state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in scalars.items()}
        self.state |= {name: window.wait() for name, window in self._states.items() if name in self._present}
        for row, name in enumerate(self._rounded, start=1):
            if name in self.state:
                self.state[name] = scratch[row, : self.piece.count].copy_(self.state[name])

    def store(self, state: State) -> State:
        """Start writing the updated weights and the element-wise ones of `state`. Returns the others."""
        self.weights.grad = None
        if self._master is not None:
            self._parameter.wait().copy_(self.weights)
            self._master.store()
        self._parameter.store()
        for name, window in self._states.items():
            memory = window.wait()
            if state[name] is not memory:
                memory.copy_(state[name])
            window.store()
        return {k: v for k, v in state.items() if k not in self._states}

    def close(self) -> None:
        """Give back what was not stored, and what the torch class allocated."""
        self.state = {}
        self._open_windows.close()

    def _open(self, tensor: StoredTensor, load: bool) -> Window | DeviceWindow:
        return self._keep(open_window(tensor.storage, self._place, self.piece.start, self.piece.count, load=load))

    def _keep(self, window: Window | DeviceWindow | Slice) -> Window | DeviceWindow | Slice:
        self._open_windows.callback(window.close)
        self._windows.append(window)
        return window

    def _take_over(self, parameter: torch.Tensor) -> None:
        """Take over what others wrote to the parameter; where it still is the master rounded, the master stays."""
        if MASTER in self._present:
            written = self.weights.to(parameter.dtype) != parameter
            self.weights[written] = parameter[written].to(self.weights.dtype)
        else:
            self.weights.copy_(parameter)
