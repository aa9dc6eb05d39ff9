"""Buffers and inputs that forward writes to: backward computes with what forward computed with, whatever is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gate import slow
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as spectral_norm_by_hooks
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import zinf_fx

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WIDTH = 8


class Centred(nn.Module):
    """Subtracts a running mean, which it updates first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return torch.tanh(x - self.mean)


class CentredBefore(Centred):
    """The same, with the update behind the use, by `.data`, and another use behind that."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = torch.tanh(x - self.mean)
        self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return y * torch.sigmoid(x * self.mean.clone())


class Decayed(Centred):
    """Writes to a buffer between its uses, and again behind them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        y = torch.tanh(x - self.mean.clone())
        self.mean.mul_(0.9)
        y = y * torch.sigmoid(x * self.mean.clone())
        self.mean.add_(0.1)
        return y


class Codebook(nn.Module):
    """Vector quantisation with averages of what is assigned to each code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantised = self.codes[nearest]
        with torch.no_grad():
            self.counts.mul_(0.9).index_add_(0, nearest, torch.full((len(x),), 0.1))
            self.codes.mul_(0.9).index_add_(0, nearest, 0.1 * x.detach())
            self.codes.div_(self.counts[:, None])
        return x + (quantised - x).detach() + (x - quantised).square()


class Queue(nn.Module):
    """Negative samples in a queue with a pointer, as momentum contrast has them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.randn(12, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        similar = torch.tanh(x @ self.queue.clone().T).mean(1, keepdim=True)
        with torch.no_grad():
            self.queue[(self.pointer + torch.arange(len(x))) % 12] = x.detach()
            self.pointer.copy_((self.pointer + len(x)) % 12)
        return (similar * x).sin()


class Views(nn.Module):
    """Views of a buffer that are written to and read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.zeros(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, row = self.linear(x), self.rows[1]
        row.lerp_(x.detach().mean(0), 0.5)
        self.rows.view(-1)[::2].add_(0.1)
        return torch.tanh(x - row - self.rows.sum(0)) * self.rows.T.flatten()[:WIDTH].sin()


class Counted(Centred):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        x = F.dropout(self.linear(x), 0.3) / self.calls.clone()
        self.mean.uniform_().add_(torch.rand(WIDTH))
        return torch.tanh(x - self.mean) * torch.rand_like(x)


class Normed(nn.Module):
    """BatchNorm, whose running statistics are used after they are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        return torch.tanh(x - self.norm.running_mean * self.norm.running_var)


class Reparametrised(nn.Module):
    """A layer whose weight is computed from what is stored."""

    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = how(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Clamped(Centred):
    """Writes to a parameter, and computes with it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Mutating(nn.Module):
    """Writes to what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.clone())
        x.mul_(1.5)
        z = torch.tanh(y - x)
        x.add_(1)
        return z.clone()


class _Observed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x - seen

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.seen.lerp_(gradient.mean(0), 0.5)
        return gradient + ctx.seen, None


class Observed(Centred):
    """Writes to a buffer in backward, too."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_Observed.apply(self.linear(x), self.mean))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "running mean": Centred,
    "used before and after": CentredBefore,
    "written between uses": Decayed,
    "codebook": Codebook,
    "queue": Queue,
    "views": Views,
    "counter and random numbers": Counted,
    "BatchNorm": Normed,
    "spectral_norm": lambda: Reparametrised(spectral_norm),
    "spectral_norm by hooks": lambda: Reparametrised(spectral_norm_by_hooks),
    "weight_norm": lambda: Reparametrised(weight_norm),
    "parameter": Clamped,
    "input": Mutating,
    "written in backward": Observed,
}
SETTINGS: dict[str, dict[str, object]] = {
    "keep": {"activations": "keep"},
    "recompute": {"activations": "recompute"},
    "a number": {"activations": 1},
    "auto": {"activations": "auto", "device_memory": "64KiB", "tile": None},
}
# Eager code refuses two (a counter, a parameter that forward writes to), or adds gradients in another order.
_ONE_PASS = {"BatchNorm", "parameter", "spectral_norm", "spectral_norm by hooks"}
_IN_THE_SLOW_TESTS = {"used before and after", "queue", "weight_norm", "spectral_norm by hooks"}
_IN_THE_GATE = {
    "recompute": set(KINDS) - _IN_THE_SLOW_TESTS,
    "a number": {"codebook"},
    "auto": set(),
    "keep": set(),
}


def _cases() -> list[object]:
    cases = [(kind, setting) for kind in KINDS for setting in SETTINGS]
    return [case if case[0] in _IN_THE_GATE[case[1]] else slow(*case) for case in cases]


def _train(model: nn.Module, call: Callable[[Tensor], Tensor], passes: int) -> list[Tensor]:
    """Two steps of so many forward passes before a backward pass: gradients, buffers and inputs, as they are then."""
    torch.manual_seed(1)
    values: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        batches = [torch.randn(6, WIDTH) for _ in range(passes)]
        sum(call(batch).square().sum() for batch in batches).backward()
        values += [_whole(parameter.grad).clone() for parameter in model.parameters()]
        values += [buffer.clone() for buffer in model.buffers()] + batches
        values += [_whole(parameter.detach()).clone() for parameter in model.parameters()]
    return values


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _assert_equal(plain: nn.Module, model: nn.Module, passes: int) -> None:
    expected = _train(plain, plain, passes)
    actual = _train(model, torch.compile(model, backend="zinf", dynamic=False), passes)
    assert [torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True)] == [True] * len(expected)


def layers(build: Callable[[], nn.Module]) -> nn.Module:
    """Return as many layers as have one that is recomputed."""
    torch.manual_seed(0)
    return nn.Sequential(*(build() for _ in range(3)))


@pytest.mark.parametrize(("kind", "setting"), _cases())
def test_gradients_and_buffers_are_those_of_plain_pytorch(tmp_path: Path, kind: str, setting: str) -> None:
    plain = layers(KINDS[kind])
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme", **SETTINGS[setting])
    _assert_equal(plain, model, 1 if kind in _ONE_PASS else 2)


class _Checkpointed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=False)


_CHECKPOINTED = [slow("running mean"), "written between uses", "codebook", slow("queue"), slow("views")]


@pytest.mark.parametrize("kind", _CHECKPOINTED)
@pytest.mark.parametrize("uses", [1, slow(2)])
def test_what_the_user_has_recomputed_too(tmp_path: Path, kind: str, uses: int) -> None:
    """Forward alone writes to buffers, unlike in eager code, where checkpointing repeats its writes in backward."""
    plain = nn.Sequential(*[*layers(KINDS[kind])] * uses)
    model = nn.Sequential(*[*map(_Checkpointed, copy.deepcopy(plain[:3]))] * uses)
    _assert_equal(plain, zinf_fx.offload(model, store=tmp_path, placement="nvme"), 2 if uses == 1 else 1)


class DifferentiatedInput(nn.Module):
    """Writes to what the caller differentiates, which AOTAutograd does behind the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x.clone().sin())
        x.mul_(1.5)
        return torch.tanh(self.linear(y) - x.clone()).clone()


@pytest.mark.parametrize("activations", ["recompute", slow(1), slow("keep")])
def test_an_input_that_is_differentiated(tmp_path: Path, activations: object) -> None:
    plain = layers(DifferentiatedInput)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme", activations=activations)
    results = []
    for call in (plain, torch.compile(model, backend="zinf")):
        torch.manual_seed(1)
        x = torch.randn(6, WIDTH, requires_grad=True)
        y = x * 2
        call(y).square().sum().backward()
        results.append([x.grad, y.detach()])
    assert all(map(torch.equal, *results))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("kind", ["running mean", slow("queue"), slow("spectral_norm"), slow("BatchNorm")])
@pytest.mark.parametrize("activations", ["recompute", slow("keep")])
def test_micro_batches_refuse_them(tmp_path: Path, kind: str, activations: str) -> None:
    options = {"placement": "nvme", "activations": activations, "store": str(tmp_path), "micro_batches": 2}
    call = torch.compile(layers(KINDS[kind]), backend="zinf", dynamic=True, options=options)
    with pytest.raises(Exception, match="the model writes to a buffer"):
        call(torch.randn(6, WIDTH)).sum()


class Overlapping(nn.Module):
    """Writes to one of two inputs that may overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return (torch.tanh(self.linear(x.clone())) * y.clone()).sum()


OVERLAPS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "columns": lambda: (lambda base: (base[:, :WIDTH], base[:, 2:]))(torch.ones(2, WIDTH + 2)),
    "rows": lambda: (lambda base: (base[:2], base[1:]))(torch.ones(3, WIDTH)),
    "transposed": lambda: (lambda base: (base, base.T))(torch.arange(1.0 * WIDTH * WIDTH).view(WIDTH, WIDTH) / 64),
    "side by side": lambda: (lambda base: (base[:2], base[2:]))(torch.ones(4, WIDTH)),
}


@pytest.mark.parametrize("name", ["columns", slow("rows"), slow("transposed"), "side by side"])
@pytest.mark.parametrize("one_line", [False, slow(True)])
def test_inputs_that_overlap(tmp_path: Path, name: str, one_line: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Run uncompiled where they do, with a warning; and the same model is compiled where they don't."""
    torch.manual_seed(0)
    plain = Overlapping()
    model, options = copy.deepcopy(plain), {"store": tmp_path, "placement": "nvme"}
    if not one_line:
        zinf_fx.offload(model, **options)
    run = torch.compile(model, backend="zinf", options=options if one_line else None)
    for kind in (name, name, "side by side"):
        results = []
        for call in (plain, run):
            inputs = OVERLAPS[kind]()
            loss = call(*inputs)
            loss.backward()
            results.append([loss.detach(), *inputs])
        assert all(map(torch.equal, *results))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)
    assert ("overlap in memory (L['x'] and L['y'])" in caplog.text) == (name != "side by side")
