"""torch.optim optimizers whose states live in the store: each takes the options of the torch class of its name.

`Streamed` makes one of any other element-wise optimizer class: `class Lion(Streamed, some_library.Lion): ...`.
"""

from __future__ import annotations

import torch

from zinf_fx.optim.streamed import Streamed


class AdamW(Streamed, torch.optim.AdamW):
    """`torch.optim.AdamW` over stored parameters."""
