"""What an optimizer keeps in another form in the store than it computes with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zinf_fx.adam import SPLIT
from zinf_fx.arguments import did_you_mean
from zinf_fx.errors import OptimizerError

EIGHT_BITS = "8bit"
"""The name of states of 8 bits among the values of `state_dtype`."""

StateDtype = torch.dtype | Literal["8bit"]
"""Of element-wise states in the store: a dtype, or codes of 8 bits with scales of blocks."""

MasterDtype = torch.dtype | Literal["split"]
"""Of the masters of bf16 parameters in the store: torch.float32, or what the weights don't have of that."""


@dataclass(frozen=True)
class KeptAs:
    """What an optimizer keeps in another form in the store than it computes with.

    Attributes:
        state_dtype: of element-wise states; None: the class's own.
        master_dtype: of masters; None: fp32.
    """

    state_dtype: StateDtype | None = None
    master_dtype: MasterDtype | None = None

    @classmethod
    def of(cls, state_dtype: object, master_dtype: object) -> KeptAs:
        """What the options of an optimizer say. Raises: OptimizerError for what isn't accepted."""
        accepted = {
            "state_dtype": (state_dtype, (None, torch.float32, torch.bfloat16, EIGHT_BITS)),
            "master_dtype": (master_dtype, (None, torch.float32, SPLIT)),
        }
        for option, (given, values) in accepted.items():
            if given not in values:
                meant = did_you_mean(given, [one for one in values if isinstance(one, str)])
                raise OptimizerError(f"{option}={given!r} is not accepted: {', '.join(map(repr, values))} are{meant}")
        return cls(state_dtype, master_dtype)

    @property
    def splits(self) -> bool:
        """Whether masters are split."""
        return self.master_dtype == SPLIT

    @property
    def narrowed(self) -> list[str]:
        """The options that ask for another form than the class's own."""
        return [name for name, value in vars(self).items() if value is not None and value != torch.float32]
