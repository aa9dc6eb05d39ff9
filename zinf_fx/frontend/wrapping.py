"""Who wraps a stored model in DistributedDataParallel is told what that costs, before anything is held.

Its `no_sync` holds for the stored parameters, too: accelerate and transformers accumulate gradients by it.
"""

from __future__ import annotations

import warnings
import weakref

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from zinf_fx.runtime.tensor.local_parameter import stored_parameter
from zinf_fx.sizes import in_words


@register_module_module_registration_hook
def _wrapped(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if name != "module" or module is None or not isinstance(parent, DistributedDataParallel):
        return
    trained = [
        parameter
        for own, parameter in module.named_parameters()
        if parameter.requires_grad
        and own not in parent.parameters_to_ignore
        and stored_parameter(parameter) is not None
    ]
    for parameter in trained:
        stored_parameter(parameter).storage.share.wrapper = weakref.ref(parent)
    if trained:
        nbytes = in_words(sum(one.numel() * one.dtype.itemsize for one in trained))
        warnings.warn(
            f"DistributedDataParallel wraps {len(trained)} stored parameters, and holds {nbytes} of memory for their "
            "gradients, which zinf_fx reduces itself: train the model without the wrapper. With accelerate, wrap "
            "nothing by accelerator.prepare_model(model, evaluation_mode=True); with transformers' Trainer, set "
            "trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True) before "
            "train()",
            stacklevel=3,
        )
