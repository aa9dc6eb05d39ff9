"""Updates by the native kernels (native/update.h): the classes, options and formats that they know, and the call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_fx.native import kernels
from zinf_fx.optim.arithmetic import Group, State
from zinf_fx.optim.formats import (
    CODES,
    LOWER,
    MASTER,
    MASTER_UP,
    companion_of,
    kind_of,
    numbers_of_codes,
    places_of_codes,
)

_KINDS = {
    torch.float32: kernels.FP32,
    torch.bfloat16: kernels.BF16,
    torch.float16: kernels.FP16,
    CODES: kernels.CODES,
    LOWER: kernels.SPLIT,
}

_MOMENTS = ("exp_avg", "exp_avg_sq")

_LARGEST = "max_exp_avg_sq"


@dataclass
class Operands:
    """Elements of one parameter, [n] each, as they are stored, and what else the class has of it.

    Attributes:
        parameter: in its own dtype.
        gradient: in the dtype in which it was reduced.
        master: nothing; "master" in the dtype of the update; or the two parts of a split one: see [Note: split
            masters].
        states: by name, in the dtypes or formats in which they are kept, with their scales.
        present: the names of states that hold values; the class makes the others.
        numbers: states that aren't stored, such as a count of steps. The class changes them, or leaves others.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    master: Mapping[str, torch.Tensor]
    states: Mapping[str, torch.Tensor]
    present: Collection[str]
    numbers: State


def has_kernel(inner: Optimizer) -> bool:
    """Whether there is a kernel for a class with the options of its group, to the bits of PyTorch's."""
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    (group,) = inner.param_groups
    if not group.get("fused") or group["differentiable"]:
        return False
    if getattr(inner, "grad_scale", None) is not None or getattr(inner, "found_inf", None) is not None:
        return False
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        return False
    numbers = (*group["betas"], group["eps"], group["weight_decay"])
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in (*numbers, float(lr))):
        return False
    return _rounds_alike(group["decoupled_weight_decay"])


class NativeOperands:
    """Operands that a kernel updates, in one pass over memory and without the GIL, from step to step."""

    def __init__(self, operands: Sequence[Operands]) -> None:
        self._operands = operands
        states = [state for of_parameter in operands for state in of_parameter.states.items()]
        self._maps = {name: _Map(name) for name in {name for name, values in states if values.dtype == CODES}}
        self._native = kernels.new_operands([_native(of_parameter, self._maps) for of_parameter in operands])
        self._repeats = all(
            kind_of(name, of_parameter.states) is not None or name in of_parameter.present
            for of_parameter in operands
            for name in of_parameter.states
        )

    @staticmethod
    def of(inner: Optimizer, operands: Sequence[Operands]) -> NativeOperands | None:
        """None where there is no kernel for what the elements are kept in by `inner`, for which there is one."""
        names = {*_MOMENTS, _LARGEST} if inner.param_groups[0]["amsgrad"] else {*_MOMENTS}
        return NativeOperands(operands) if all(_are_known(of_parameter, names) for of_parameter in operands) else None

    def update(self, inner: Optimizer, instructions: int | None = None) -> bool:
        """Update them as `inner` does, for which there is a kernel.

        Args:
            instructions: one of `kernels.INSTRUCTIONS`; None: the best that the processor has.

        Returns:
            Whether these serve in the next step: all states held values before.
        """
        (group,) = inner.param_groups
        steps = [of_parameter.numbers.get("step") for of_parameter in self._operands]
        for native, step in zip(self._native, steps, strict=True):
            _set_step(native, group, 1.0 if step is None else float(step) + 1)
        if instructions is None:
            instructions = kernels.best_instructions()
        kernels.update_adam(_options(group), self._native, instructions, torch.get_num_threads())
        counted = [step for step in steps if step is not None]
        if counted:
            torch._foreach_add_(counted, 1)
        for of_parameter, step in zip(self._operands, steps, strict=True):
            if step is None:
                of_parameter.numbers = {"step": torch.ones((), dtype=torch.float32, device="cpu")}
        return self._repeats


def _are_known(operands: Operands, names: Collection[str]) -> bool:
    """Whether there is a kernel for elements that are kept so. `names`: those of the states that the class has."""
    parameter, master, states = operands.parameter, operands.master, operands.states
    if {name for name in states if kind_of(name, states) is None} != names or operands.numbers.keys() - {"step"}:
        return False
    updated = master.get(MASTER, parameter).dtype
    if MASTER_UP in master:
        computed_in_fp32 = parameter.dtype == torch.bfloat16
    else:
        computed_in_fp32 = updated == torch.float32 and parameter.dtype in _KINDS
    moments = [states[name] for name in names]
    arrays = (parameter, operands.gradient, *master.values(), *states.values())
    return (
        computed_in_fp32
        and operands.gradient.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(moment.dtype in (torch.float32, torch.bfloat16, CODES) for moment in moments)
        and all(array.device.type == "cpu" and array.is_contiguous() for array in arrays)
    )


def _options(group: Group) -> dict[str, float]:
    """The `struct zinf_adam` of a group."""
    (beta1, beta2), decay, decoupled = group["betas"], group["weight_decay"], group["decoupled_weight_decay"]
    return {
        "direction": -1 if group["maximize"] else 1,
        "weight_decay": 0 if decoupled else decay,
        "shrinking": float(1 - Fraction(float(group["lr"])) * Fraction(decay)) if decoupled and decay else 1,
        "exp_avg_rate": 1 - beta1,
        "beta2": beta2,
        "exp_avg_sq_rate": 1 - beta2,
        "eps": group["eps"],
        "amsgrad": group["amsgrad"],
        "vector": 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8,
    }


def _set_step(native: Any, group: Group, step: float) -> None:
    """Set what a `struct zinf_operands` has of the step of this number."""
    beta1, beta2 = group["betas"]
    native.step_size = -float(group["lr"]) / (1 - beta1**step)
    native.root = math.sqrt(1 - beta2**step)


def _native(operands: Operands, maps: Mapping[str, _Map]) -> dict[str, object]:
    """The `struct zinf_operands` of some elements, without what it has of a step."""
    master, parameter = operands.master, operands.parameter
    return {
        "count": parameter.numel(),
        "gradient": _kept(operands.gradient),
        "master": _kept(master.get(MASTER, parameter), master.get(MASTER_UP)),
        "weight": _kept(parameter) if master else kernels.kept(kernels.FP32),
        **{name: _state(operands, name, maps) for name in (*_MOMENTS, _LARGEST) if name in operands.states},
    }


def _state(operands: Operands, name: str, maps: Mapping[str, _Map]) -> dict[str, object]:
    values = operands.states[name]
    fields = {**_kept(values, operands.states.get(companion_of(name))), "is_new": name not in operands.present}
    return {**fields, "map": maps[name].native} if values.dtype == CODES else fields


def _kept(values: torch.Tensor, companion: torch.Tensor | None = None) -> dict[str, object]:
    return kernels.kept(_KINDS[values.dtype], values.data_ptr(), 0 if companion is None else companion.data_ptr())


class _Map:
    """What the codes of a state stand for, to be held as long as a kernel may read it."""

    def __init__(self, name: str) -> None:
        self._arrays = numbers_of_codes(name), places_of_codes(name)
        self.native = kernels.new_map(*(array.data_ptr() for array in self._arrays))


@cache
@torch.inference_mode(False)
@torch.no_grad()
def _rounds_alike(decoupled: bool) -> bool:
    """Whether PyTorch's fused kernel rounds as the native one on this processor: which products are rounded before they
    are added is its compiler's choice."""
    options = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    count, generator = 1 << 10 | 15, torch.Generator("cpu").manual_seed(0)
    weight, gradient, first, second = torch.randn(4, count, generator=generator, dtype=torch.float32, device="cpu")
    second.square_()
    group = {**options, "betas": (0.9, 0.999), "decoupled_weight_decay": decoupled}
    mine = [tensor.clone() for tensor in (weight, first, second)]
    operands = Operands(mine[0], gradient, {}, dict(zip(_MOMENTS, mine[1:], strict=True)), _MOMENTS, {})
    native = kernels.new_operands([_native(operands, {})])
    _set_step(native[0], group, 4.0)
    kernels.update_adam(_options(group), native, kernels.best_instructions(), 1)
    update, step = torch._fused_adamw_ if decoupled else torch._fused_adam_, torch.tensor(4.0, device="cpu")
    update([weight], [gradient], [first], [second], [], [step], beta1=0.9, beta2=0.999, **options)
    return all(map(torch.equal, mine, (weight, first, second)))
