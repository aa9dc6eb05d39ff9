"""Memory cut into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zinf_fx.runtime.memory.buffers import Arena

_PLACES = 8  # that are remembered: as a rule, a plan has one for each transfer of the same elements


class Cut:
    """Where tensors begin and end in memory that comes to lie at few places of an arena, again and again: at each, the
    tensors over it are made once."""

    def __init__(self, parts: Sequence[slice], shapes: Sequence[tuple[int, ...]] | None = None) -> None:
        """`parts`: the elements of each tensor; `shapes`: of the tensors, which are flat by default."""
        self._parts, self._shapes = parts, shapes
        self._known: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def of(self, memory: torch.Tensor, arena: Arena) -> list[torch.Tensor]:
        """The tensors over flat memory. They serve whoever has the memory next, too, if it is the arena's."""
        place = memory.data_ptr(), memory.dtype
        if (known := self._known.get(place)) is not None:
            return known
        with torch.inference_mode(False), torch.no_grad():
            tensors = [memory[part] for part in self._parts]
            if self._shapes is not None:
                tensors = [tensor.view(shape) for tensor, shape in zip(tensors, self._shapes, strict=True)]
        if arena.holds(memory) and memory.numel():
            if len(self._known) == _PLACES:
                self._known.clear()
            self._known[place] = tensors
        return tensors
