"""bitsandbytes (0.48 to 0.50): frozen parameters that are codes, whose scales and format are attributes of them.

A stored parameter has the codes for its bytes, and carries these attributes. The modules of bitsandbytes compute from
both as they do in memory, and their operations gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch

_LIBRARY = "bitsandbytes."
# By the name of a class, whether one of its parameters has codes by now: they get them when they move to a device.
_HAVE_CODES = {
    "Params4bit": lambda parameter: parameter.quant_state is not None,
    "Int8Params": lambda parameter: parameter.dtype == torch.int8,
}
# Attributes of modules that let them lay out the codes for an instruction set, in evaluation on a CPU.
_LAYOUTS = {"support_avx512bf16_for_cpu"}


def has_codes(parameter: torch.Tensor | None) -> TypeGuard[torch.nn.Parameter]:
    """Whether this is a frozen parameter of bitsandbytes in memory, with codes."""
    kind = type(parameter)
    is_known = kind.__name__ in _HAVE_CODES and kind.__module__.startswith(_LIBRARY)
    return is_known and parameter is not None and not parameter.requires_grad and _HAVE_CODES[kind.__name__](parameter)


def attributes_of(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """The attributes that say what the codes of a parameter mean. The parameter itself stands for what has its
    codes."""
    return {name: parameter if _is_codes_of(parameter, value) else value for name, value in vars(parameter).items()}


@contextmanager
def codes_kept(model: torch.nn.Module) -> Iterator[None]:
    """A block that stores the parameters of a model, whose modules then compute from what is stored, too, where they
    have the codes in another place or would lay them out anew."""
    codes_elsewhere = list(_codes_in_states(model))
    modules = [module for module in model.modules() if any(map(has_codes, module._parameters.values()))]
    yield
    for state, name, parameter in codes_elsewhere:
        setattr(state, name, parameter)
    for module in modules:
        keep_layout(module)


def keep_layout(module: torch.nn.Module) -> None:
    """Let a module compute from codes as they are stored."""
    for name in _LAYOUTS & vars(module).keys():
        setattr(module, name, False)


def _codes_in_states(model: torch.nn.Module) -> Iterator[tuple[object, str, torch.nn.Parameter]]:
    """The states that modules keep beside their parameters, the attributes of these that are codes, and the parameters
    that they are the codes of. A module of int8 has such a state once it was called."""
    for module in model.modules():
        for parameter in filter(has_codes, module._parameters.values()):
            for state in vars(module).values():
                if type(state).__module__.startswith(_LIBRARY):
                    names = [name for name, value in vars(state).items() if _is_codes_of(parameter, value)]
                    yield from ((state, name, parameter) for name in names)


def _is_codes_of(parameter: torch.Tensor, value: object) -> bool:
    """Whether a tensor in memory is the codes of a parameter in memory, under another name."""
    if not isinstance(value, torch.Tensor) or (value.dtype, value.shape) != (parameter.dtype, parameter.shape):
        return False
    return value.device == parameter.device and value.data_ptr() == parameter.data_ptr()
