"""Eager and compiled code compute with complex parameters, and these train on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import Tensor, nn

import zinf_fx
from zinf_fx.errors import OptimizerError, StoredTensorError

TIERS = ["nvme", "host", "device"]
USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conj": lambda w, x: w.conj() * x,
    "conj twice": lambda w, x: w.conj().conj() * x,
    "adjoint": lambda w, x: w.adjoint() + x,
    "product": lambda w, x: x @ w.mH,
    "view of conj": lambda w, x: w.conj().view(-1)[2:] * 2,
    "detached": lambda w, x: w.conj().detach() * x,
    "resolved": lambda w, x: w.conj().resolve_conj() + x,
    "real": lambda w, x: w.real * 2,
    "imag": lambda w, x: w.imag * 2,
    "imag of conj": lambda w, x: w.conj().imag * 2,
    "as real": lambda w, x: torch.view_as_real(w) * 2,
    "dot": lambda w, x: torch.vdot(w.view(-1), x.view(-1)),
    "stacked": lambda w, x: torch.stack([w.conj(), w]),
    "chosen": lambda w, x: torch.where(x.real > 0, w.conj(), x),
    "angle": lambda w, x: w.conj().angle(),
    "converted": lambda w, x: w.conj().to(torch.complex128),
}


def twins(store: Path, tier: str, dtype: torch.dtype = torch.complex64) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Complex(dtype)
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=store, placement=tier)


class Complex(nn.Module):
    """Has complex parameters beside a real one, conjugated in forward and by autograd."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=dtype))
        self.scale = nn.Parameter(torch.randn(5, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype) @ self.weight * self.scale
        return x.abs().square().sum() + self.bias.square().sum() + (self.scale * self.scale.conj()).real.sum()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("grad", [False, True])
def test_uses_in_eager_code(tmp_path: Path, tier: str, grad: bool) -> None:
    plain, model = twins(tmp_path, tier)
    x = torch.randn(5, 5, dtype=torch.complex64)
    with torch.set_grad_enabled(grad):
        for name, use in USES.items():
            result = use(model.weight, x).detach()
            result = result.full_tensor() if isinstance(result, zinf_fx.StoredTensor) else result
            assert torch.equal(result, use(plain.weight, x).detach()), name


@pytest.mark.parametrize("tier", TIERS)
def test_views_are_written_to_or_refused(tmp_path: Path, tier: str) -> None:
    models = twins(tmp_path, tier)
    with torch.no_grad():
        for model in models:
            torch.view_as_real(model.weight).add_(1.5)
            model.weight.real.mul_(2)
            model.weight.imag.sub_(1)
        before = models[1].weight.full_tensor()
        assert torch.equal(before, models[0].weight)
        for view in (models[1].weight.conj(), models[1].weight.conj()[0]):
            with pytest.raises(StoredTensorError, match="writes to a conjugate"):
                view.mul_(2)
        models[1].weight.copy_(models[1].weight.conj())
    assert torch.equal(models[1].weight.full_tensor(), before.conj())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_gradients(tmp_path: Path, tier: str, compiled: bool) -> None:
    plain, model = twins(tmp_path, tier)
    run = torch.compile(model, backend="zinf") if compiled else model
    for _ in range(2):
        x = torch.randn(4, 5)
        plain(x).backward()
        run(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = ours.grad
        assert torch.equal(getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)(), theirs.grad)


ON_THE_DEVICE = {
    "device": "device",
    "activations leave": {"activations": "nvme"} | dict.fromkeys(("parameters", "gradients", "optimizer"), "device"),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("placement", ON_THE_DEVICE)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, slow(torch.complex128)])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, slow(torch.optim.SGD)])
def test_training_on_the_device(
    tmp_path: Path, placement: str, compiled: bool, dtype: torch.dtype, kind: type[torch.optim.Optimizer]
) -> None:
    plain, model = twins(tmp_path, ON_THE_DEVICE[placement], dtype)
    run = torch.compile(model, backend="zinf") if compiled else model
    optimizers = [kind(net.parameters(), lr=0.1) for net in (plain, model)]
    for _ in range(3):
        x = torch.randn(4, 5)
        for call, optimizer in zip((plain, run), optimizers, strict=True):
            call(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


@pytest.mark.parametrize("kind", [zinf_fx.optim.AdamW, torch.optim.AdamW])
def test_optimizers_that_stream_refuse_them(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    _, model = twins(tmp_path, "nvme")
    model(torch.randn(4, 5)).backward()
    with pytest.raises(OptimizerError, match=r"complex64.*torch\.optim.*on the device"):
        kind(model.parameters(), lr=0.1).step()
