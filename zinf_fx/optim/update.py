"""How a chunk is updated: the torch class runs on what the windows of its parts have, and its states are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, State, borrow, show, step_without_hooks
from zinf_fx.optim.elements import moved
from zinf_fx.optim.partial_step import Progress
from zinf_fx.optim.slices import Begun, OpenChunk, OpenPack, OpenPart, Recipe
from zinf_fx.optim.states import ParameterStates
from zinf_fx.optim.threads import at_the_same_time
from zinf_fx.plan.chunks import Piece, all_of, cut
from zinf_fx.runtime.memory.device import CPU, Device
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


@dataclass(frozen=True)
class _Lane:
    """What pieces of a chunk that is updated by `recipe` need for themselves, one at a time: the torch class, borrowed,
    and scratch."""

    recipe: Recipe
    inner: Optimizer
    scratch: torch.Tensor | None


class ChunkUpdate:
    """The update of the chunks of one step, by the arithmetic of one torch class.

    What decides the result besides the options of groups, which come with each chunk, is read from the optimizer at
    construction. The optimizer itself is not held.

    Attributes:
        unscales: whether the arithmetic divides the gradients by a GradScaler's scale.
    """

    def __init__(
        self, optimizer: Optimizer, kind: type[Optimizer], shown: dict[torch.Tensor, State], progress: Progress
    ) -> None:
        """`kind`: the class. `shown`: what the optimizer shows of states. `progress` is told which parameters are begun
        and finished."""
        self._kind = kind
        # Classes of others may have what can't be used by two threads at the same time.
        self._runs_in_threads = kind.__module__.startswith("torch.optim.")
        self._shown = shown
        self._progress = progress
        self._template = borrow(optimizer, kind, {}, [])
        self._template.__dict__.pop("step", None)  # a scheduler's, bound to the optimizer
        self.unscales = getattr(self._template, "grad_scale", None) is not None

    def borrowed(self, group: Group, place: Device) -> Optimizer:
        """The class by the options of `group`, to run at `place`."""
        inner = borrow(self._template, self._kind, group, [])
        for name in ("grad_scale", "found_inf"):  # GradScaler's, on the device of the gradients
            if name in vars(inner):
                setattr(inner, name, moved(vars(inner)[name], place))
        return inner

    def run(self, chunk: OpenChunk, count: int, piece: int, scratch: torch.Tensor | None) -> None:
        """Update a chunk, some elements at a time: on the CPU, the cache keeps what each operation leaves to the next
        of the gradient in fp32 and of the new weights. See [Note: workers].

        `count`: how many pieces are updated at the same time, by a class of PyTorch's own, of at most `piece` elements
        each. `scratch`: memory for what these have in other dtypes than that of the update, if anything.
        """
        recipe = chunk.recipe
        for part in chunk.parts:
            part.wait()
        self._progress.begun.update(parameter for part in chunk.parts for parameter in part.parameters)
        for part in chunk.parts:
            if isinstance(part, OpenPack):
                self._update_pack(part, scratch)
        parts = [part for part in chunk.parts if isinstance(part, OpenPart)]
        if recipe.whole:
            several, count = [(all_of(part, part.piece.count),) for part in parts], 1
        else:
            several = list(cut([(part, (range(part.piece.count),)) for part in parts], piece))
            count = min(count, len(several)) if self._runs_in_threads else 1
        rooms = [scratch] * count
        if scratch is not None and count > 1:
            rooms = [scratch[:, first : first + piece] for first in range(0, count * piece, piece)]
        lanes = [_Lane(recipe, self.borrowed(recipe.group, recipe.place), room) for room in rooms]
        with closing(at_the_same_time(self._update_together, lanes, several)) as updated:
            for together, scalars in zip(several, updated, strict=True):
                self._store_whole_parts(together, scalars)

    def _update_pack(self, pack: OpenPack, scratch: torch.Tensor | None) -> None:
        pack.update(self.borrowed, self._shown, scratch)
        pack.store(unscaled=self.unscales)
        for recipe, states in pack.states.updates:
            if recipe.is_first or states.has_master:
                self._show(states, recipe.names, {})
        self._progress.finish(pack.states.members, pack.states.touched)
        pack.states.let_go_of_gradients()

    def _update_together(self, lane: _Lane, pieces: Sequence[Piece[OpenPart]]) -> list[State]:
        """Run the class on some elements of parts, in one call. Returns the states of each that aren't stored."""
        # Fused kernels count steps where they run, and the others on the CPU.
        recipe, inner = lane.recipe, lane.inner
        counts_at = recipe.place if recipe.group.get("fused") else CPU
        begun: list[Begun] = []
        offset = 0
        for some in pieces:
            states = some.owner.piece.owner
            entry = self._shown[states.parameter.whole]
            scalars = {k: moved(v, counts_at) for k, v in entry.items() if k not in states.tensors}
            rows = None if lane.scratch is None else lane.scratch.flatten(1).view(recipe.dtype)[:, offset:]
            begun.append(some.owner.begin(some.elements, scalars, rows))
            offset += round_up(some.count, WINDOW_ALIGNMENT)
        inner.param_groups[0]["params"] = [one.weights for one in begun]
        inner.state.clear()
        inner.state.update((one.weights, one.state) for one in begun)
        step_without_hooks(inner)
        return [some.owner.end(one, inner.state[one.weights]) for some, one in zip(pieces, begun, strict=True)]

    def _store_whole_parts(self, pieces: Sequence[Piece[OpenPart]], several: Sequence[State]) -> None:
        """Pieces are updated, and all before them. Start writing the parts that end with one of them, and show the
        states of parameters that do; `several`: those that aren't stored."""
        for some, scalars in zip(pieces, several, strict=True):
            part = some.owner
            states = part.piece.owner
            if some.last:
                part.store(unscaled=self.unscales)
                if part.piece.last:
                    self._show(states, part.names, scalars)
                    self._progress.finish([states], states.touched)

    def _show(self, states: ParameterStates, names: Iterable[str], scalars: State) -> None:
        """All elements of a parameter are updated: show its states, those of these names and `scalars`."""
        parameter = states.parameter
        entry = self._shown[parameter.whole]
        show(entry, scalars)
        entry.update((name, parameter.shown(states.tensors[name])) for name in names)
        if states.has_master:
            entry.update((name, parameter.shown(states.tensors[name])) for name in states.masters)
            states.version = parameter.storage.bytes.version
