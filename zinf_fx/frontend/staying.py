"""Which parameters offloading leaves where they are, and which it lays out anew."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from zinf_fx.frontend.graph_inputs import bytes_in_memory
from zinf_fx.runtime.tensor.local_parameter import local_part, stored_in, stored_parameter
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import in_words


def is_ordinary(value: object) -> bool:
    """Whether this is a parameter that offloading would move."""
    return isinstance(value, torch.nn.Parameter) and stored_parameter(value) is None and not stays(value)


def stays(value: object) -> bool:
    """Whether this is a parameter that offloading leaves where it is: a frozen one of a class of its own. Quantised
    parameters are such, whose bytes say nothing without what the class knows about them."""
    if not isinstance(value, torch.nn.Parameter) or isinstance(value, (StoredTensor, DTensor)):
        return False
    return type(value) is not torch.nn.Parameter and not value.requires_grad and not is_lazy(value)


def note_staying(parameters: Mapping[str, object]) -> None:
    """Warn of those that stay in memory, if any. Python shows a warning with the same text once."""
    parameters = {name: one for name, one in parameters.items() if stays(one) and not stored_in(one)}
    if not parameters:
        return
    (name, parameter), *_ = parameters.items()
    warnings.warn(
        f"{len(parameters)} frozen parameter(s), {in_words(sum(map(bytes_in_memory, parameters.values())))}, stay on "
        f"their device, such as '{name}', a {type(parameter).__name__}: only plain nn.Parameter can be stored, and "
        "what offload() knows: traceable wrapper subclasses, and codes of bitsandbytes, which its layers have once "
        "they were moved to a device. Plans count them in device_memory. To store them, offload the model before it "
        "is quantised",
        stacklevel=3,
    )


def note_layouts(parameters: Mapping[str, torch.Tensor]) -> None:
    """Warn of those that will be contiguous, and are not, if any. Elements that are there once for several are not
    meant: kernels read them in one order in any case."""
    names = [name for name, one in parameters.items() if not is_lazy(one) and _has_another_order(local_part(one))]
    if names:
        warnings.warn(
            f"{len(names)} parameter(s), such as '{names[0]}', are not contiguous (transposed, or channels_last, say), "
            "and are stored contiguous: convolutions and products may take other kernels for that, and results differ "
            "from plain PyTorch's in the last bits. To compare both, make them contiguous before",
            stacklevel=3,
        )


def _has_another_order(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_meta and 0 not in tensor.stride()
    return is_dense and not tensor.is_contiguous()
