"""torch.optim optimizers whose states live in the store: each takes the options of the torch class of its name.

Low-precision parameters are updated through an fp32 master copy. Plain optimizers that treat each parameter by itself
work on stored parameters too, without one: see `zinf_fx.optim.plain`.

`Streamed` makes one of any other optimizer class that treats each parameter by itself, element by element or whole:
`class Lion(Streamed, some_library.Lion): ...`.
"""

from __future__ import annotations

import torch

import zinf_fx.optim.gradients  # registers what GradScaler and clipping need
import zinf_fx.optim.plain  # noqa: F401  (registers what plain torch.optim classes need)
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


class Adadelta(Streamed, torch.optim.Adadelta):
    """`torch.optim.Adadelta` over stored parameters."""


class Adafactor(Streamed, torch.optim.Adafactor):
    """`torch.optim.Adafactor` over stored parameters, each updated whole."""


class Adagrad(Streamed, torch.optim.Adagrad):
    """`torch.optim.Adagrad` over stored parameters."""


class Adam(Streamed, torch.optim.Adam):
    """`torch.optim.Adam` over stored parameters."""


class Adamax(Streamed, torch.optim.Adamax):
    """`torch.optim.Adamax` over stored parameters."""


class AdamW(Streamed, torch.optim.AdamW):
    """`torch.optim.AdamW` over stored parameters."""


class ASGD(Streamed, torch.optim.ASGD):
    """`torch.optim.ASGD` over stored parameters."""


class Muon(Streamed, torch.optim.Muon):
    """`torch.optim.Muon` over stored parameters, matrices all, each updated whole."""


class NAdam(Streamed, torch.optim.NAdam):
    """`torch.optim.NAdam` over stored parameters."""


class RAdam(Streamed, torch.optim.RAdam):
    """`torch.optim.RAdam` over stored parameters."""


class RMSprop(Streamed, torch.optim.RMSprop):
    """`torch.optim.RMSprop` over stored parameters."""


class Rprop(Streamed, torch.optim.Rprop):
    """`torch.optim.Rprop` over stored parameters."""


class SGD(Streamed, torch.optim.SGD):
    """`torch.optim.SGD` over stored parameters."""
