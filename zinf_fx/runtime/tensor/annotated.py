"""Frozen parameters of bitsandbytes: codes, whose scales and format are attributes of the parameter.

A stored parameter keeps these attributes, and its bytes are the codes. The modules of bitsandbytes compute from both as
they do in memory, and their operations gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LIBRARY = "bitsandbytes."
# By the name of a class, whether one of its parameters has codes by now: they get them when they move to a device.
_HAVE_CODES = {
    "Params4bit": lambda parameter: parameter.quant_state is not None,
    "Int8Params": lambda parameter: parameter.dtype == torch.int8,
}
# Attributes of modules that let them lay out the codes for an instruction set, in evaluation on a CPU.
_LAYOUTS = {"support_avx512bf16_for_cpu"}


def has_annotated_codes(parameter: torch.Tensor | None) -> bool:
    """Whether this is a frozen parameter of bitsandbytes in memory, with codes."""
    kind = type(parameter)  # of a name that a module has no parameter under, NoneType
    is_known = kind.__name__ in _HAVE_CODES and kind.__module__.startswith(_LIBRARY)
    return is_known and not parameter.requires_grad and _HAVE_CODES[kind.__name__](parameter)


def annotations_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that say what the codes of a parameter mean. The parameter itself stands for what has its codes.
    Of any other parameter, none."""
    if not has_annotated_codes(parameter):
        return {name: vars(parameter)[name] for name in getattr(parameter, "_annotated", ())}
    return {name: parameter if is_codes_of(parameter, value) else value for name, value in vars(parameter).items()}


def is_codes_of(parameter: torch.Tensor, value: object) -> bool:
    """Whether a tensor in memory is the codes of a parameter in memory, under another name."""
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (parameter.dtype, parameter.shape):
        return False
    return value.device == parameter.device and value.data_ptr() == parameter.data_ptr()


def annotate(tensor: torch.Tensor, annotations: dict[str, Any], of: torch.Tensor) -> None:
    """Let a stored tensor have the annotations `of` a parameter, in whose place it is."""
    if annotations:
        vars(tensor).update({name: tensor if value is of else value for name, value in annotations.items()})
        tensor._annotated = tuple(annotations)


@contextmanager
def codes_kept(model: torch.nn.Module) -> Iterator[None]:
    """For a block that stores the parameters of a model: its modules then compute from what is stored, too, where they
    have the codes in another place or would lay them out anew."""
    held = list(_codes_beside(model))
    modules = [m for m in model.modules() if any(map(has_annotated_codes, m._parameters.values()))]
    yield
    for holder, name, parameter in held:
        setattr(holder, name, parameter)
    for module in modules:
        keep_layout(module)


def keep_layout(module: torch.nn.Module) -> None:
    """Let a module compute from codes as they are stored."""
    for name in _LAYOUTS & vars(module).keys():
        setattr(module, name, False)


def _codes_beside(model: torch.nn.Module) -> Iterator[tuple[object, str, torch.nn.Parameter]]:
    """What modules keep beside their parameters, which attribute of it, and of which parameter that is the codes: once
    it was called, a module of int8 has them in a state of its own."""
    for module in model.modules():
        for parameter in filter(has_annotated_codes, module._parameters.values()):
            for holder in vars(module).values():
                if type(holder).__module__.startswith(_LIBRARY):
                    names = [name for name, value in vars(holder).items() if is_codes_of(parameter, value)]
                    yield from ((holder, name, parameter) for name in names)
