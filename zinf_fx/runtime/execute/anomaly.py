"""What `torch.autograd.detect_anomaly` is to see of gradients that leave for their tier, as autograd gets None.

Autograd checks what its nodes return, and a compiled graph is one node. So the gradients of a backward graph are
checked as they leave, and the operation that first computed a NaN is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from zinf_fx.errors import ZinfError
from zinf_fx.lines import line_of


def looks_for_nan() -> bool:
    """Whether gradients are to be checked."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


class NanSearch:
    """The search for NaN in one run of a backward graph."""

    def __init__(self) -> None:
        self._first: str | None = None  # what computed it

    def note(self, where: str, value: object) -> None:
        """An operation has computed a value. `where`: which one."""
        if self._first is None and _has_nan(value):
            self._first = where

    def check(self, names: Sequence[str], gradients: object) -> None:
        """Raises: ZinfError for NaN in the gradients of the parameters with these names."""
        for name, gradient in zip(names, tree_leaves(gradients), strict=True):
            if _has_nan(gradient):
                raise ZinfError(
                    f"detect_anomaly(check_nan=True): the gradient of '{name}' has nan values in compiled code; the "
                    f"first nan values of backward come from {self._first or 'what it was given'}"
                )


def where_computed(node: fx.Node, operator: int) -> str:
    """Names an operation of a backward graph."""
    return f"{node.target} in operator {operator} of the backward graph ({line_of(node)})"


def _has_nan(value: object) -> bool:
    """Whether a value, or a member of it, has a NaN."""
    return any(
        isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()) and bool(leaf.isnan().any())
        for leaf in tree_leaves(value)
    )
