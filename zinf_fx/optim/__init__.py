"""torch.optim optimizers whose states live in the store: each takes the options of the torch class of its name.

Low-precision parameters are updated through an fp32 master copy. Plain optimizers that treat each parameter by itself
work on stored parameters too, without one: see `zinf_fx.optim.plain`.

`Streamed` makes one of any other optimizer class that treats each parameter by itself, element by element or whole:
`class Lion(Streamed, some_library.Lion): ...`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

import zinf_fx.optim.gradients  # registers what GradScaler and clipping need
import zinf_fx.optim.plain  # noqa: F401  (registers what plain torch.optim classes need)
from zinf_fx.optim.formats import MasterDtype, StateDtype
from zinf_fx.optim.partial_step import TornStep
from zinf_fx.optim.streamed import Streamed, reserve_states

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Streamed",
    "TornStep",
    "reserve_states",
]


class OptimizerOptions(TypedDict, total=False):
    """All options of the classes here by name, for type checkers: those of `Streamed`, and those of torch's classes."""

    overlap: bool
    step_in_backward: bool
    state_dtype: StateDtype | None
    master_dtype: MasterDtype | None

    lr: float | torch.Tensor
    betas: tuple[float | torch.Tensor, float | torch.Tensor]
    eps: float | tuple[float | None, float]
    weight_decay: float | torch.Tensor
    momentum: float
    dampening: float
    nesterov: bool
    amsgrad: bool
    decoupled_weight_decay: bool
    rho: float
    alpha: float
    centered: bool
    lr_decay: float
    initial_accumulator_value: float
    momentum_decay: float
    beta2_decay: float
    d: float
    lambd: float
    t0: float
    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    adjust_lr_fn: str | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


if TYPE_CHECKING:

    class _Streamed(Streamed):
        def __init__(self, params: Iterable[Any], *args: Any, **options: Unpack[OptimizerOptions]) -> None: ...

else:
    _Streamed = Streamed


class Adadelta(_Streamed, torch.optim.Adadelta):
    """`torch.optim.Adadelta` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Adafactor(_Streamed, torch.optim.Adafactor):
    """`torch.optim.Adafactor` over stored parameters, each updated whole.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Adagrad(_Streamed, torch.optim.Adagrad):
    """`torch.optim.Adagrad` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Adam(_Streamed, torch.optim.Adam):
    """`torch.optim.Adam` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Adamax(_Streamed, torch.optim.Adamax):
    """`torch.optim.Adamax` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class AdamW(_Streamed, torch.optim.AdamW):
    """`torch.optim.AdamW` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class ASGD(_Streamed, torch.optim.ASGD):
    """`torch.optim.ASGD` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Muon(_Streamed, torch.optim.Muon):
    """`torch.optim.Muon` over stored parameters, matrices all, each updated whole.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class NAdam(_Streamed, torch.optim.NAdam):
    """`torch.optim.NAdam` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class RAdam(_Streamed, torch.optim.RAdam):
    """`torch.optim.RAdam` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class RMSprop(_Streamed, torch.optim.RMSprop):
    """`torch.optim.RMSprop` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class Rprop(_Streamed, torch.optim.Rprop):
    """`torch.optim.Rprop` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """


class SGD(_Streamed, torch.optim.SGD):
    """`torch.optim.SGD` over stored parameters.

    Takes `state_dtype`, `master_dtype`, `step_in_backward` and `overlap`, too: see `Streamed`.
    """
