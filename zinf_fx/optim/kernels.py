"""Updates by the native kernels (native/update.h): the classes, options and formats that they know, and the call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

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

_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


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
    if type(inner) not in _CLASSES:
        return False
    (group,) = inner.param_groups
    if not group.get("fused") or group["differentiable"]:
        return False
    if getattr(inner, "grad_scale", None) is not None or getattr(inner, "found_inf", None) is not None:
        return False
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        return False
    if _is_sgd(group):
        numbers = (group["momentum"], group["dampening"], group["weight_decay"])
    else:
        numbers = (*group["betas"], group["eps"], group["weight_decay"])
    if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in (*numbers, float(lr))):
        return False
    return _rounds_alike(None if _is_sgd(group) else group["decoupled_weight_decay"])


class NativeOperands:
    """Operands that a kernel updates, in one pass over memory and without the GIL, from step to step."""

    def __init__(self, operands: Sequence[Operands], names: Sequence[str]) -> None:
        self._operands = operands
        states = [state for of_parameter in operands for state in of_parameter.states.items()]
        self._maps = {name: _Map(name) for name in {name for name, values in states if values.dtype == CODES}}
        self._native = kernels.new_operands([_native(of_parameter, names, self._maps) for of_parameter in operands])
        self._repeats = all(
            kind_of(name, of_parameter.states) is not None or name in of_parameter.present
            for of_parameter in operands
            for name in of_parameter.states
        )

    @staticmethod
    def of(inner: Optimizer, operands: Sequence[Operands]) -> NativeOperands | None:
        """Return operands for `inner`, for which there is a kernel; None where that doesn't know their formats."""
        names = _states_of(inner.param_groups[0])
        are_known = all(_are_known(of_parameter, names) for of_parameter in operands)
        return NativeOperands(operands, names) if are_known else None

    def update(self, inner: Optimizer, instructions: int | None = None, *, threads: int = 1) -> bool:
        """Update them as `inner` does, for which there is a kernel.

        Args:
            threads: how many share the elements at most.
            instructions: one of `kernels.INSTRUCTIONS`; None: the best that the processor has.

        Returns:
            Whether these serve in the next step: all states held values before.
        """
        (group,) = inner.param_groups
        counts_steps = not _is_sgd(group)
        steps = [of_parameter.numbers.get("step") for of_parameter in self._operands]
        counted = [step for step in steps if step is not None]
        numbers = iter(torch.stack(counted).flatten().tolist() if counted else ())  # some have a dimension of one
        factors: dict[float, tuple[float, float]] = {}  # as a rule, all parameters come to the same step
        for native, step in zip(self._native, steps, strict=True):
            number = 1.0 if step is None else next(numbers) + 1
            if number not in factors:
                factors[number] = _factors(group, number)
            native.step_size, native.root = factors[number]
        if instructions is None:
            instructions = kernels.best_instructions()
        kernels.update(_options(group), self._native, instructions, threads)
        if counted:
            torch._foreach_add_(counted, 1)
        for of_parameter, step in zip(self._operands, steps, strict=True):
            if counts_steps and step is None:
                of_parameter.numbers = {"step": torch.ones((), dtype=torch.float32, device="cpu")}
        return self._repeats


def _are_known(operands: Operands, names: Collection[str]) -> bool:
    """Whether there is a kernel for elements that are kept so. `names` are those of the states that the class has."""
    parameter, master, states = operands.parameter, operands.master, operands.states
    if {name for name in states if kind_of(name, states) is None} != set(names) or operands.numbers.keys() - {"step"}:
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


def _is_sgd(group: Group) -> bool:
    """Whether a group is of SGD, not of Adam or AdamW."""
    return "momentum" in group


def _states_of(group: Group) -> tuple[str, ...]:
    """Return the names of the states that the class of a group has, in the order of a `struct zinf_operands`."""
    if _is_sgd(group):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


def _options(group: Group) -> dict[str, float]:
    """Return the `struct zinf_options` of a group."""
    if _is_sgd(group):
        return {
            "rule": kernels.SGD,
            "direction": -1 if group["maximize"] else 1,
            "weight_decay": group["weight_decay"],
            "momentum": group["momentum"],
            "momentum_rate": 1 - group["dampening"],
            "nesterov": group["nesterov"],
            "vector": 1,
        }
    (beta1, beta2), decay, decoupled = group["betas"], group["weight_decay"], group["decoupled_weight_decay"]
    return {
        "rule": kernels.ADAM,
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


def _factors(group: Group, step: float) -> tuple[float, float]:
    """Return the `step_size` and `root` of a `struct zinf_operands` in the step of this number."""
    if _is_sgd(group):
        return -float(group["lr"]), 1.0
    beta1, beta2 = group["betas"]
    return -float(group["lr"]) / (1 - beta1**step), math.sqrt(1 - beta2**step)


def _native(operands: Operands, names: Sequence[str], maps: Mapping[str, _Map]) -> dict[str, object]:
    """Return the `struct zinf_operands` of some elements with the states `names`, without what it has of a step."""
    master, parameter = operands.master, operands.parameter
    return {
        "count": parameter.numel(),
        "gradient": _kept(operands.gradient),
        "master": _kept(master.get(MASTER, parameter), master.get(MASTER_UP)),
        "weight": _kept(parameter) if master else kernels.kept(kernels.FP32),
        "states": [_state(operands, name, maps) for name in names],
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
def _rounds_alike(decoupled: bool | None) -> bool:
    """Whether PyTorch's fused kernel rounds as the native one on this processor: which products are rounded before they
    are added is its compiler's choice. `decoupled`: AdamW's kernel; False: Adam's; None: SGD's."""
    count, generator = 1 << 10 | 15, torch.Generator("cpu").manual_seed(0)
    weight, gradient, first, second = torch.randn(4, count, generator=generator, dtype=torch.float32, device="cpu")
    states, options = {}, {"lr": 1e-2, "weight_decay": 0.1, "maximize": False}
    if decoupled is None:
        states["momentum_buffer"] = first
        options |= {"momentum": 0.9, "dampening": 0.1, "nesterov": True}
        group = options
    else:
        states |= {"exp_avg": first, "exp_avg_sq": second.square_()}
        options |= {"eps": 1e-8, "amsgrad": False}
        group = {**options, "betas": (0.9, 0.999), "decoupled_weight_decay": decoupled}
    mine = {name: values.clone() for name, values in states.items()}
    operands = Operands(weight.clone(), gradient, {}, mine, tuple(mine), {})
    native = kernels.new_operands([_native(operands, tuple(mine), {})])
    native[0].step_size, native[0].root = _factors(group, 4.0)
    kernels.update(_options(group), native, kernels.best_instructions(), 1)
    if decoupled is None:
        torch._fused_sgd_([weight], [gradient], [first], **options, is_first_step=False)
    else:
        update, step = torch._fused_adamw_ if decoupled else torch._fused_adam_, torch.tensor(4.0, device="cpu")
        update([weight], [gradient], [first], [second], [], [step], beta1=0.9, beta2=0.999, **options)
    return torch.equal(operands.parameter, weight) and all(torch.equal(mine[name], states[name]) for name in mine)
