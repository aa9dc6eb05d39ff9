"""AdamW with fp32 master weights in plain PyTorch: the arithmetic that zinf_fx.optim.AdamW does, all in memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import AdamW


class MasterAdamW(AdamW):
    """Steps fp32 copies of low-precision parameters with upcast gradients, then rounds them back.

    ``param_groups`` holds the copies, so schedulers work as usual; ``zero_grad`` clears the parameters' own gradients.
    """

    def __init__(self, parameters: Iterable[Tensor], **options: float | tuple[float, float]) -> None:
        self.parameters = list(parameters)
        super().__init__([p.detach().float().clone() for p in self.parameters], fused=True, **options)
        self.masters = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step(closure)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def adamw(parameters: Iterable[Tensor], dtype: torch.dtype, **options: float | tuple[float, float]) -> AdamW:
    """AdamW whose weights and moments are fp32, for parameters of ``dtype``."""
    if dtype == torch.float32:
        return AdamW(parameters, fused=True, **options)
    return MasterAdamW(parameters, **options)
