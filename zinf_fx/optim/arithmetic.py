"""PyTorch's own optimizers do the arithmetic: on flat pieces of parameters, and once on a few elements as a probe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.errors import OptimizerError

Group = dict[str, Any]
"""One of an optimizer's `param_groups`: its options, and the parameters under "params"."""


def borrow(optimizer: Optimizer, kind: type[Optimizer], group: Group, parameters: Sequence[torch.Tensor]) -> Optimizer:
    """An optimizer of class `kind` over `parameters`, with everything else as `optimizer` has it at this moment.

    So options, GradScaler's `grad_scale` and whatever else the class keeps on the object are in force. Its state is
    empty. Hooks belong to `optimizer`: run it with `step_without_hooks`.
    """
    inner = object.__new__(kind)
    inner.__dict__.update(optimizer.__dict__)
    inner.param_groups = [{**group, "params": list(parameters)}]
    inner.state = defaultdict(dict)
    return inner


def step_without_hooks(inner: Optimizer) -> None:
    """`inner.step()` as its class wrote it: torch wraps `step` so that it runs hooks, which are for whole steps."""
    step = type(inner).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(inner)


@dataclass(frozen=True)
class StateLayout:
    """What a class keeps for each parameter under the options of one group.

    Attributes:
        elementwise: names of the states of the parameter's shape, and their dtypes. They are streamed.
        scalars: names and dtypes of those that are one number for the whole parameter (None: a Python number).
    """

    elementwise: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.dtype | None]

    def stored_as(self, narrow: torch.dtype) -> StateLayout:
        """The same, with floating-point element-wise states no wider than `narrow`."""

        def narrowed(dtype: torch.dtype) -> torch.dtype:
            return narrow if dtype.is_floating_point and dtype.itemsize > narrow.itemsize else dtype

        elementwise = {name: narrowed(dtype) for name, dtype in self.elementwise.items()}
        return StateLayout(MappingProxyType(elementwise), self.scalars)


def probe(optimizer: Optimizer, kind: type[Optimizer], group: Group, dtype: torch.dtype) -> StateLayout:
    """The layout of `kind`'s states, from three steps over a matrix of `dtype` and over the same matrix in two pieces.

    Raises: OptimizerError when the pieces don't come out as the whole does: the class can't be streamed.
    """
    elements, steps = 24, 3
    options = {k: v for k, v in group.items() if k != "params"}
    options |= {"lr": 0.01} if "lr" in options else {}  # a warm-up may start from 0, where every class looks alike
    flat = torch.linspace(-1, 1, elements, dtype=dtype).exp()
    whole = borrow(optimizer, kind, options, [flat.view(4, -1).clone()])
    pieces = borrow(optimizer, kind, options, [piece.clone() for piece in flat.chunk(2)])
    try:
        for step in range(steps):
            gradient = torch.linspace(-1, 3, elements, dtype=dtype).roll(5 * step)
            for inner in (whole, pieces):
                parameters = inner.param_groups[0]["params"]
                for parameter, part in zip(parameters, gradient.chunk(len(parameters)), strict=True):
                    parameter.grad = part.clone().view(parameter.shape)
                step_without_hooks(inner)
    except Exception as error:
        raise _refusal(kind, f"a step over a piece of a parameter failed ({type(error).__name__}: {error})") from error
    for inner in (whole, pieces):
        left = inner.param_groups[0]
        changed = [k for k in left if k != "params" and (k not in options or left[k] is not options[k])]
        if changed:
            raise _refusal(kind, f"it keeps state in its parameter group ({', '.join(changed)})")
    return _compare(kind, whole, pieces)


def _compare(kind: type[Optimizer], whole: Optimizer, pieces: Optimizer) -> StateLayout:
    (parameter,) = whole.param_groups[0]["params"]
    parts = pieces.param_groups[0]["params"]
    if not _same(parameter, parts):
        raise _refusal(kind, "its update of an element depends on other elements")
    elementwise: dict[str, torch.dtype] = {}
    scalars: dict[str, torch.dtype | None] = {}
    for name, value in whole.state[parameter].items():
        of_parts = [pieces.state[part].get(name) for part in parts]
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            if not all(isinstance(v, torch.Tensor) for v in of_parts) or not _same(value, of_parts):
                raise _refusal(kind, f"its state '{name}' isn't the same for a part of a parameter")
            elementwise[name] = value.dtype
        elif isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            if not all(isinstance(v, (Number, torch.Tensor)) and math.isclose(v, value) for v in of_parts):
                raise _refusal(kind, f"its state '{name}' depends on all elements of a parameter")
            scalars[name] = value.dtype if isinstance(value, torch.Tensor) else None
        elif value is not None:
            raise _refusal(kind, f"its state '{name}' is neither a number nor of the parameter's shape")
    return StateLayout(MappingProxyType(elementwise), MappingProxyType(scalars))


def _same(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    together = torch.cat([part.flatten() for part in parts])
    return together.numel() == whole.numel() and torch.allclose(whole.flatten(), together, rtol=1e-4, equal_nan=True)


def _refusal(kind: type[Optimizer], reason: str) -> OptimizerError:
    return OptimizerError(
        f"{kind.__module__}.{kind.__qualname__} can't step over stored parameters: {reason}, and only optimizers that "
        "treat each element alone can be streamed; use one of zinf_fx.optim, or keep the parameters on the device with "
        "the plain optimizer"
    )


def snapshot(group: Group) -> Group:
    """The group's options at this moment: a scheduler may change them while the step goes on."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def as_groups(params: Iterable[Any]) -> list[Group]:
    """Parameters, as every torch optimizer takes them, in groups."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of tensors or of dicts, but got a tensor")
    params = list(params)
    if not params:
        raise ValueError("optimizer got an empty parameter list")
    return params if isinstance(params[0], dict) else [{"params": params}]
