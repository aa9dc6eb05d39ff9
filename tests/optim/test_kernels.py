"""The native kernels compute to the bit what PyTorch's class computes with the same formats."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch

from zinf_fx.native.kernels import INSTRUCTIONS, best_instructions
from zinf_fx.optim import kernels, update
from zinf_fx.optim.arithmetic import borrow
from zinf_fx.optim.formats import MASTER, MASTER_UP, SCALES, UPS, companion_of, encode, split
from zinf_fx.optim.kernels import NativeOperands, Operands, has_kernel
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HERE = [name for name, number in INSTRUCTIONS.items() if number <= best_instructions()]
COUNTS = (1, 7, 8, 255, 256, 257, 4096 + 31)
SPECIAL = (0.0, -0.0, 1e-40, -3e-42, torch.inf, -torch.inf, torch.nan, 1e-30, 1e-19, -1e30, 3e38)
MOMENTS = ("exp_avg", "exp_avg_sq")


class Values:
    """Draws random values over many magnitudes, with some special ones."""

    def __init__(self, seed: int, special: bool) -> None:
        self.generator, self.special = torch.Generator().manual_seed(seed), special

    def __call__(self, count: int, scale: float = 1.0) -> torch.Tensor:
        magnitudes = torch.exp(2 * torch.randn(count, generator=self.generator))
        values = scale * magnitudes * torch.randn(count, generator=self.generator)
        if self.special:
            places = torch.randint(count, (count // 100 + 1,), generator=self.generator)
            which = torch.randint(len(SPECIAL), places.shape, generator=self.generator)
            values[places] = torch.tensor(SPECIAL)[which]
        return values


def made(
    values: Values,
    count: int,
    weight: torch.dtype,
    gradient: torch.dtype,
    state: object,
    splits: bool,
    names: tuple[str, ...] = MOMENTS,
) -> Operands:
    """Make elements in these formats, after three steps, with these states: Adam's, or SGD's."""
    masters = values(count)
    parameter = masters.to(weight)
    master: dict[str, torch.Tensor] = {}
    if splits:
        master = {
            MASTER: torch.empty(count, dtype=torch.int16),
            MASTER_UP: torch.empty(UPS.shape([count]), dtype=UPS.dtype),
        }
        split(masters, parameter, master[MASTER], master[MASTER_UP])
    elif weight != FP32:
        master = {MASTER: masters}
    states = {}
    for name, moment in zip(names, (values(count, 0.1), values(count, 0.01).abs()), strict=False):
        if state == "8bit":
            codes, scales = torch.empty(count, dtype=torch.uint8), torch.empty(SCALES.shape([count]))
            encode(name, moment, codes, scales)
            states |= {name: codes, companion_of(name): scales}
        else:
            states[name] = moment.to(state)
    numbers = {"step": torch.tensor(3.0)} if names == MOMENTS else {}
    return Operands(parameter, values(count).to(gradient), master, states, names, numbers)


def borrowed(kind: str, **options: object) -> torch.optim.Optimizer:
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], fused=True, **options)
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return borrow(optimizer, type(optimizer), group, [])


def by_class(inner: torch.optim.Optimizer, operands: list[Operands], monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(round_up(operand.parameter.numel(), WINDOW_ALIGNMENT) for operand in operands)
    with monkeypatch.context() as patch:
        patch.setattr(update, "has_kernel", lambda inner: False)
        update.update_elements(inner, operands, torch.empty(6, count))


def tensors(operands: Operands) -> Iterator[tuple[str, torch.Tensor]]:
    yield "parameter", operands.parameter
    yield from operands.master.items()
    yield from operands.states.items()
    yield from operands.numbers.items()


def with_largest(operands: list[Operands], inner: torch.optim.Optimizer) -> list[Operands]:
    """Operands that have the states of an optimizer, amsgrad's among them where it has that."""
    for of_parameter in operands if inner.param_groups[0].get("amsgrad") else ():
        for name in [name for name in of_parameter.states if name.startswith("exp_avg_sq")]:
            of_parameter.states[f"max_{name}"] = of_parameter.states[name].clone()
        of_parameter.present = (*MOMENTS, "max_exp_avg_sq")
    return operands


def any_of_each(flags: torch.Tensor, size: int) -> torch.Tensor:
    """Return whether any of so many flags in a row is set."""
    padded = torch.nn.functional.pad(flags, (0, -flags.numel() % size))
    return padded.view(-1, size).any(1)


def check_same(mine: list[Operands], theirs: list[Operands]) -> None:
    for operands, other in zip(mine, theirs, strict=True):
        expected = OrderedDict(tensors(other))
        for name, value in tensors(operands):
            assert value.dtype == expected[name].dtype
            if value.is_floating_point():  # of which NaN has many
                same = (value == expected[name]) & (value.signbit() == expected[name].signbit())
                same |= value.isnan() & expected[name].isnan()
            else:
                same = value == expected[name]
                if name in (MASTER, MASTER_UP):  # the rest of NaN, which are any bits
                    same |= any_of_each(operands.parameter.isnan(), 8 if name == MASTER_UP else 1)
            assert same.all(), (
                name,
                (~same).nonzero().flatten()[:5].tolist(),
                value[~same][:5],
                expected[name][~same][:5],
            )


FORMATS = [
    (weight, gradient, state, splits)
    for weight, gradient, state, splits in itertools.product(
        (FP32, BF16, FP16), (FP32, BF16, FP16), (FP32, BF16, "8bit"), (False, True)
    )
    if weight == BF16 or not splits
]
OPTIONS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.0, "maximize": True, "betas": (0.4, 0.9)}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {"lr": 1e-2}),
    ("Adam", {"weight_decay": 0.1, "betas": (0.5, 0.99), "eps": 1e-6, "lr": torch.tensor(1e-2)}),
    ("SGD", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": torch.tensor(1e-2), "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
]


def names_of(inner: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the states that `made` makes for an optimizer."""
    if isinstance(inner, torch.optim.SGD):
        return ("momentum_buffer",) if inner.param_groups[0]["momentum"] else ()
    return MOMENTS


@pytest.mark.parametrize("instructions", HERE)
@pytest.mark.parametrize(("kind", "options"), OPTIONS, ids=str)
def test_every_format_is_updated_as_by_the_class(kind: str, options: dict[str, object], instructions: str, monkeypatch):
    inner = borrowed(kind, **options)
    for seed, (weight, gradient, state, splits) in enumerate(FORMATS):
        values = Values(seed, special=bool(seed % 2))
        names = names_of(inner)
        mine = with_largest([made(values, count, weight, gradient, state, splits, names) for count in COUNTS], inner)
        theirs = copy.deepcopy(mine)
        for _ in range(2):
            native = NativeOperands.of(inner, mine) if has_kernel(inner) else None
            assert native is not None and native.update(inner, INSTRUCTIONS[instructions])
            by_class(inner, theirs, monkeypatch)
            check_same(mine, theirs)


@pytest.mark.parametrize("state", [FP32, BF16, "8bit"])
@pytest.mark.parametrize(("kind", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9, "dampening": 0.5})], ids=str)
def test_first_step(kind: str, options: dict[str, object], state: object, monkeypatch):
    inner, values = borrowed(kind, **options), Values(0, special=False)
    mine = [made(values, count, BF16, BF16, state, False, names_of(inner)) for count in COUNTS]
    for operands in mine:
        operands.present, operands.numbers = (), {}
    theirs = copy.deepcopy(mine)
    assert update.update_elements(inner, mine, None) is None
    for operands in mine:
        operands.present = names_of(inner)
    by_class(inner, theirs, monkeypatch)
    check_same(mine, theirs)
    native = update.update_elements(inner, mine, None)
    assert isinstance(native, NativeOperands) and update.update_elements(inner, mine, None, native) is native
    for operands in theirs:
        operands.present = names_of(inner)
    by_class(inner, theirs, monkeypatch)
    by_class(inner, theirs, monkeypatch)
    check_same(mine, theirs)


def test_any_number_of_threads():
    results = []
    for threads in (1, 2, 5):
        mine = [made(Values(1, special=False), 1 << 18 | 77, BF16, BF16, "8bit", True)]
        update.update_elements(borrowed("AdamW"), mine, None, threads=threads)
        results.append(mine)
    for mine in results[1:]:
        check_same(mine, results[0])


@pytest.mark.parametrize("flushes", [True, False])
def test_threads_flush_subnormal_numbers_as_the_caller_does(flushes: bool):
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor can't")
    count = 1 << 20
    parameter, gradient = torch.zeros(count), torch.full((count,), 1e-40)
    states = {"momentum_buffer": torch.full((count,), 1e-40)}
    operands = [Operands(parameter, gradient, {}, states, ("momentum_buffer",), {})]
    native = NativeOperands.of(borrowed("SGD", momentum=0.9), operands)
    assert native is not None
    torch.set_flush_denormal(flushes)
    try:
        for _ in range(3):
            native.update(borrowed("SGD", momentum=0.9), threads=4)
    finally:
        torch.set_flush_denormal(False)
    assert bool((states["momentum_buffer"] == 0).all() if flushes else (states["momentum_buffer"] > 1e-40).all())


@pytest.mark.parametrize("instructions", HERE)
def test_flushed_subnormal_numbers_are_those_of_fp32(instructions: str, monkeypatch):
    """All of fp16 are normal numbers of fp32."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor can't")
    bits = torch.arange((1 << 15) - 1, -(1 << 15), -1, dtype=torch.int32).to(torch.int16)
    gradient = bits.view(torch.float16)  # whose last block is not whole, and has subnormal numbers
    inner, masters = borrowed("SGD", lr=1e-2), torch.zeros(gradient.numel())
    mine = [Operands(masters.to(torch.float16), gradient, {MASTER: masters}, {}, (), {})]
    theirs = copy.deepcopy(mine)
    native = NativeOperands.of(inner, mine) if has_kernel(inner) else None
    assert native is not None
    torch.set_flush_denormal(True)
    try:
        native.update(inner, INSTRUCTIONS[instructions])
        by_class(inner, theirs, monkeypatch)
    finally:
        torch.set_flush_denormal(False)
    check_same(mine, theirs)


class Other(torch.optim.AdamW):
    pass


def test_what_no_kernel_knows_is_the_class_business():
    for kind, options in (("AdamW", {"fused": False}), ("RMSprop", {})):
        optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.zeros(1))], **options)
        assert not has_kernel(borrow(optimizer, type(optimizer), {**optimizer.param_groups[0]}, []))
    inner = borrowed("AdamW")
    assert has_kernel(inner)
    inner.grad_scale = torch.ones(())
    assert not has_kernel(inner)
    inner = borrowed("AdamW")
    inner.__class__ = Other
    assert not has_kernel(inner)
    operands = made(Values(0, special=False), 8, torch.float64, FP32, FP32, False)
    operands.master = {}
    assert NativeOperands.of(borrowed("AdamW"), [operands]) is None


def test_kernels_are_used_here():
    capability = torch.backends.cpu.get_cpu_capability()
    assert capability not in ("AVX2", "AVX512") or all(map(kernels._rounds_alike, (False, True, None)))
