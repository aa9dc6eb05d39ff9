"""Gradients of compiled code reach whoever wants to see them, or the call is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import named
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from twins import Net, assert_nothing_leaked, assert_same_gradients, pair, x

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import StoredTensorError, ZinfError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

__all__ = ["pair"]  # a fixture


def test_hooks_run_with_the_whole_gradient(pair: tuple[Net, Net]) -> None:
    """They do on parameters of graphs that are cut in two, as well: autograd adds the parts up first."""

    def break_graph(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    seen: list[list[Tensor]] = [[], []]
    for net, notes in zip(pair, seen, strict=True):
        net.layers[3].weight = net.layers[0].weight
        net.hook = break_graph
        weight = net.layers[0].weight
        weight.register_hook(lambda gradient, notes=notes: (notes.append(gradient.clone()), gradient * 2)[1])
        net.scale.register_post_accumulate_grad_hook(lambda p, notes=notes: notes.append(torch.clone(p.grad)))
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(2):
        batch = x()
        plain(batch).backward()
        call(batch).backward()
    assert len(seen[0]) == 4 and all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


def test_hooks_that_were_registered_before_the_one_line_use(tmp_path: Path) -> None:
    nets, seen = (Net(), Net()), ([], [])
    nets[1].load_state_dict(nets[0].state_dict())
    for net, notes in zip(nets, seen, strict=True):
        net.layers[0].weight.register_hook(lambda gradient: gradient * 0.5)
        net.layers[1].bias.register_post_accumulate_grad_hook(lambda p, notes=notes: notes.append(torch.clone(p.grad)))
    plain, model = nets
    call = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    for _ in range(2):
        batch = x()
        plain(batch).backward()
        call(batch).backward()
    assert len(seen[0]) == 2 and all(map(torch.equal, *seen)) and isinstance(model.layers[0].weight, StoredTensor)
    assert_same_gradients(model, plain)


def test_an_update_in_a_hook_needs_no_gradient_afterwards(pair: tuple[Net, Net]) -> None:
    def update(parameter: Tensor) -> None:
        parameter.data.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    for net in pair:
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(3):
        batch = x()
        plain(batch).backward()
        call(batch).backward()
    assert all(
        torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_a_hook_that_comes_after_the_compiler_is_refused(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    call(x()).backward()
    model.zero_grad()
    for net in pair:
        net.layers[1].bias.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(StoredTensorError, match=r"'layers\.1\.bias' after its graph was compiled.*compiler\.reset"):
        call(x()).backward()
    model.zero_grad()
    torch.compiler.reset()
    batch = x()
    plain(batch).backward()
    call(batch).backward()
    assert_same_gradients(model, plain)


def test_gradients_of_some_tensors_only(pair: tuple[Net, Net]) -> None:
    batch = x().requires_grad_()
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    expected, result = (torch.autograd.grad(run(batch), batch) for run in (plain, call))
    assert torch.equal(result[0], expected[0])
    for net, run in ((plain, plain), (model, call)):
        run(batch).backward(inputs=[net.layers[1].weight])
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert_same_gradients(model, plain)


class TwoLosses(nn.Module):
    """What multi-task training takes gradients of by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.left(x).square().mean(), self.right(x.sin()).sum()


def projected(model: nn.Module, run: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Tensor]:
    """Step with gradients of each loss, less what contradicts the other's (PCGrad). Return the gradients."""
    losses = run(batch)
    parameters = list(model.trunk.parameters())
    grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    sum(losses).backward()
    for parameter, gradient, other in zip(parameters, *grads, strict=True):
        overlap = (gradient * other).sum().clamp(max=0)
        parameter.grad = gradient + other - overlap * other / other.square().sum()
    optimizer.step()
    optimizer.zero_grad()
    return [value for of_loss in grads for value in of_loss]


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "nvme"},
        {"placement": "host"},
        {"placement": "device"},
        {"placement": "infinity-nvme", "pack": None, "activations": "recompute"},
    ],
    ids=["nvme", "host", "device", "unpacked and recomputed"],
)
def test_gradients_that_are_returned(tmp_path: Path, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    plain = TwoLosses()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, **options)
    results = []
    for net, run, kind in (
        (plain, plain, torch.optim.AdamW),
        (model, torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW),
    ):
        optimizer = kind(net.parameters(), lr=0.1, fused=True)
        torch.manual_seed(1)
        results.append([gradient for _ in range(3) for gradient in projected(net, run, optimizer, x())])
    for ours, theirs in zip(*reversed(results), strict=True):
        assert torch.equal(getattr(ours, "full_tensor", lambda ours=ours: ours)(), theirs)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


def test_gradients_that_are_returned_leave_those_that_are_there(pair: tuple[Net, Net]) -> None:
    """They do also with an optimizer that steps in backward, which is not to take them, and after an error."""
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    batch = x()
    for net, run in ((plain, plain), (model, call)):
        run(batch).backward()
        torch.autograd.grad(run(batch), [net.layers[0].weight, net.scale])
    assert_same_gradients(model, plain)
    model.zero_grad()
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=0.1, step_in_backward=True)
    before = model.scale.full_tensor()
    gradients = torch.autograd.grad(call(batch), [model.layers[0].weight, model.scale])
    expected = torch.autograd.grad(plain(batch), [plain.layers[0].weight, plain.scale])
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours.full_tensor(), theirs)
    assert torch.equal(model.scale.full_tensor(), before) and model.scale.grad is None
    assert not optimizer.state


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("how", ["backward", "grad"])
def test_second_derivatives_of_compiled_code_are_refused(pair: tuple[Net, Net], how: str, views: bool) -> None:
    _, model = pair
    model.hook = (lambda x: x.view(-1).view(x.shape)) if views else None
    loss = torch.compile(model, backend="zinf")(x())
    with pytest.raises(StoredTensorError, match=r"create_graph=True asks for .* uncompiled"):
        if how == "backward":
            loss.backward(create_graph=True)
        else:
            torch.autograd.grad(loss, [model.scale], create_graph=True)
    assert all(parameter.grad is None for parameter in model.parameters())


class Bypassed(nn.Module):
    """A layer, and what is made of the input beside it."""

    def __init__(self, how: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> object:
        return self.how(x, torch.tanh(self.linear(x.detach().clone())))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return gradient * 3 * x**2


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view": lambda x: x.view(2, 2),
    "views of views": lambda x: x.view(2, 2).T[1],
    "a part": lambda x: x[1:],
    "the input": lambda x: x,
}
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": Cube.apply,
    "a view of a function's result": lambda x: Cube.apply(x).unsqueeze(0)[0],
    "eager code": lambda x: x**3,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_result_that_is_a_view_of_an_input_has_second_derivatives(source: str, view: str) -> None:
    """None of them goes through a stored parameter, and graphs of the user's are left as they were."""
    model = zinf_fx.offload(Bypassed(lambda x, y: (y, VIEWS[view](x))), placement="host")
    call = torch.compile(model, backend="zinf", dynamic=False)
    x = torch.ones(4, requires_grad=True)
    cubed, derivatives = SOURCES[source](x), []
    for _ in range(3):
        for viewed in (call(cubed)[1], VIEWS[view](cubed)):
            (gradient,) = torch.autograd.grad(viewed.sum(), x, create_graph=True)
            derivatives.append(torch.autograd.grad(gradient.sum(), x, retain_graph=True)[0])
    assert all(torch.equal(derivative, derivatives[0]) for derivative in derivatives) and derivatives[0].sum()


def test_a_view_of_what_another_compiled_function_computed_is_left_alone() -> None:
    model = zinf_fx.offload(Bypassed(lambda x, y: (y, x.view(2, 2))), placement="host")
    x = torch.ones(4, requires_grad=True)
    cubed = torch.compile(lambda x: x**3, backend="aot_eager")(x)
    layer, viewed = torch.compile(model, backend="zinf")(cubed)
    (gradient,) = torch.autograd.grad(viewed.sum(), x, create_graph=True)
    assert torch.equal(gradient, torch.full((4,), 3.0))
    with pytest.raises(StoredTensorError, match=r"create_graph=True"):
        layer.sum().backward(create_graph=True)


def _computed(x: Tensor, y: Tensor) -> object:
    written = y.clone()
    written[1:].mul_(2)
    return y, y.view(2, 2), y.chunk(2), written[1:], torch.view_as_real(torch.complex(y, y))


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "results": _computed,
    "an input": lambda x, y: (x.mul_(y), None)[1],
    "an input and its view": lambda x, y: x.mul_(y).view(2, 2),
    "a part of an input": lambda x, y: (x[:2].copy_(y[:2]), None)[1],
}
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a whole": lambda x: x * 2,
    "a view": lambda x: (x * 2).view(2, 2).view(4),
    "no gradient": lambda x: x.detach() * 2,
}


@pytest.mark.parametrize("given", named(GIVEN, {"a whole"}))
@pytest.mark.parametrize("written", WRITES)
def test_second_derivatives_of_whatever_a_compiled_graph_wrote_are_refused(written: str, given: str) -> None:
    model = zinf_fx.offload(Bypassed(WRITES[written]), placement="host")
    batch = GIVEN[given](torch.ones(4, requires_grad=True))
    results = torch.compile(model, backend="zinf", dynamic=False)(batch)
    tensors = [leaf for leaf in [batch, *tree_leaves(results)] if isinstance(leaf, torch.Tensor)]
    if written == "results":
        del tensors[0]
    for tensor in tensors:
        with pytest.raises(StoredTensorError, match=r"create_graph=True"):
            tensor.sum().backward(create_graph=True)
    tensors[0].sum().backward()
    assert model.linear.bias.grad is not None


def test_gradients_that_the_user_set_are_added_to(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    batch = x()
    for net, run in ((plain, plain), (model, call)):
        for parameter in net.layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        run(batch).backward()
        run(batch).backward()
    for p, q in zip(model.layers.parameters(), plain.layers.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("pack", ["auto", None])
def test_sparse_gradients_are_refused_when_the_graph_is_captured(pack: str | None) -> None:
    model = nn.Sequential(nn.Embedding(64, 16, sparse=True), nn.Linear(16, 4))
    zinf_fx.offload(model, placement="infinity-nvme", pack=pack)
    with pytest.raises(ZinfError, match=r"the gradient of '0\.weight' has layout torch\.sparse_coo"):
        torch.compile(model, backend="zinf")(torch.arange(8))
