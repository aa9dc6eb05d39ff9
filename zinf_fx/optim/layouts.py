"""What an optimizer's class keeps for each stored parameter, found by trying, once for what is alike."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch.optim import Optimizer

from zinf_fx.optim.arithmetic import Group, NotElementwise, StateLayout, probe
from zinf_fx.optim.blockwise import check_can_be_coded
from zinf_fx.optim.forms import EIGHT_BITS, KeptAs
from zinf_fx.optim.rehearsal import check_honoured
from zinf_fx.optim.split import check_can_be_split
from zinf_fx.optim.whole import check_can_be_whole, whole_layout
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

# Options whose value has nothing to do with what a class keeps, and those of which only whether they are zero has: a
# class may leave something out then. Schedules change them at every step.
_ANY_VALUE = {"params", "param_names", "lr", "initial_lr"}
_ZERO_OR_NOT = {"momentum", "betas", "weight_decay"}
# Options of groups that are remembered; a schedule of other ones makes new ones at every step.
_REMEMBERED = 64

OfShapes = dict[torch.Size | None, StateLayout | None]
"""Layouts of whole parameters by shape; under None that of pieces, if the class can update pieces."""


class Layouts:
    """Layouts of the states of class `kind`, by what they depend on."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        # By the options of a group and the dtype: of pieces under None, of whole parameters by shape, as many as a
        # model has.
        self._known: dict[tuple[str, torch.dtype], OfShapes] = {}

    def under(
        self, optimizer: Optimizer, group: Group, kept: KeptAs, moving: Set[str], *, in_backward: bool
    ) -> GroupLayouts:
        """Those under the present options of `group`, but for the `moving` ones, which the class changes at each step.
        `in_backward`: whether backward is to update parameters.

        Raises: OptimizerError for options that can't be honoured.
        """
        check_honoured(group)
        kept_alike = _ANY_VALUE | moving
        options = repr(
            [(k, _zero_or_not(v) if k in _ZERO_OR_NOT else v) for k, v in group.items() if k not in kept_alike]
        )

        def known(dtype: torch.dtype) -> OfShapes:
            found = self._known.get((options, dtype))
            if found is None:
                found = {None: _of_pieces(optimizer, self._kind, group, dtype, kept)}
                self._known = {(options, dtype): found, **dict(list(self._known.items())[: _REMEMBERED - 1])}
            return found

        return GroupLayouts(optimizer, self._kind, group, known, kept, in_backward=in_backward)


def _zero_or_not(value: object) -> object:
    """What is left of an option's number, or of several, when it matters only whether they are zero."""
    return [one and True for one in value] if isinstance(value, (tuple, list)) else value and True


def _of_pieces(
    optimizer: Optimizer, kind: type[Optimizer], group: Group, dtype: torch.dtype, kept: KeptAs
) -> StateLayout | None:
    try:
        layout = probe(optimizer, kind, group, dtype)
    except NotElementwise:
        return None
    return layout.stored_as(kept)


class GroupLayouts:
    """Layouts under the options that a group has at a moment."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        group: Group,
        find: Callable[[torch.dtype], OfShapes],
        kept: KeptAs,
        *,
        in_backward: bool,
    ) -> None:
        """`find`: what is known of updates in a dtype."""
        self._optimizer, self._kind, self._group, self._find = optimizer, kind, group, find
        self._kept, self._in_backward = kept, in_backward

    def of_pieces(self, dtype: torch.dtype) -> StateLayout | None:
        """That of parameters which are updated in `dtype`, each element by itself; None where the class updates whole
        parameters."""
        return self._find(dtype)[None]

    def of(self, parameter: StoredTensor, dtype: torch.dtype) -> StateLayout:
        """That of `parameter`, updated in `dtype`. Raises: OptimizerError for what can't be streamed."""
        if (layout := self.of_pieces(dtype)) is not None:
            if self._kept.state_dtype == EIGHT_BITS:
                check_can_be_coded(parameter, dtype)
            if layout.of_master(parameter.dtype, dtype) and self._kept.splits:
                check_can_be_split(parameter)
            return layout
        check_can_be_whole(self._kind, parameter, in_backward=self._in_backward, narrowed=self._kept.narrowed)
        known, shape = self._find(dtype), parameter.shape
        if shape not in known:
            known[shape] = whole_layout(self._optimizer, self._kind, self._group, parameter, dtype)
        return known[shape]
