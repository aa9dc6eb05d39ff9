"""What takes the place of stored parameters: values of another shape, parameters, modules."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.errors import OptimizerError, StoredTensorError


class Tied(nn.Module):
    """Token embeddings that are the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.tokens(tokens)).tanh()).square().mean()


def train(model: nn.Module, call: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = call(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, StoredTensor) and torch.equal(mine.full_tensor(), theirs), name


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_value_of_another_shape_is_stored_and_trained(tmp_path, tier: str, compiled_before: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Tied()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=tier)
    compiled = torch.compile(model, backend="zinf")
    if compiled_before:
        compiled(torch.arange(20)).backward()
        model.zero_grad()
    weight, (kept, storage) = model.tokens.weight, (model.middle.weight, model.middle.weight.stored)
    rows = torch.randn(3, 8)
    for net in (model, plain):
        net.tokens.weight.data = torch.cat([net.tokens.weight.data, rows])
        net.tokens.num_embeddings, net.head.out_features = 23, 23
    assert model.tokens.weight is model.head.weight is weight and weight.stored.tier == tier
    assert weight.shape == (23, 8) and weight.is_leaf and weight.requires_grad and kept.stored is storage
    tokens = torch.arange(23)
    expected = train(plain, plain, torch.optim.AdamW(plain.parameters(), fused=True), tokens)
    assert train(model, compiled, zinf_fx.optim.AdamW(model.parameters()), tokens) == expected
    equal(model, plain)


def test_a_value_of_another_dtype(tmp_path, tier: str):
    model = zinf_fx.offload(nn.Linear(6, 4), store=tmp_path, placement=tier)
    value = model.weight.full_tensor().double()
    model.weight.data = value
    assert model.weight.dtype == torch.float64 and torch.equal(model.weight.full_tensor(), value)


VALUES = {
    "zeros_like": torch.zeros_like,
    "full_like": lambda data: torch.full_like(data, 2.0),
    "ones_like": torch.ones_like,
    "randn_like": torch.randn_like,
    "part of a likeness": lambda data: torch.full_like(data, 2.0).t()[:2],
    "of another dtype": lambda data: torch.zeros_like(data, dtype=torch.float64),
    "new_full": lambda data: data.new_full((2, 3), 2.0),
    "clone": lambda data: data.clone(),
    "computed": lambda data: data * 2,
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_values_that_are_made_like_the_parameter(tmp_path, tier: str, make: Callable):
    weight = zinf_fx.offload(nn.Linear(6, 4), store=tmp_path, placement=tier).weight
    value = make(weight.data)
    expected = value.full_tensor() if isinstance(value, StoredTensor) else value.clone()
    weight.data = value
    assert isinstance(weight, StoredTensor) and weight.stored.tier == tier and weight.dtype == expected.dtype
    assert torch.equal(weight.full_tensor(), expected)


@pytest.mark.parametrize("part", [lambda data: data, lambda data: data[:2]])
def test_the_bytes_of_another_parameter_are_not_shared(tmp_path, part: Callable):
    layer, other = zinf_fx.offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), store=tmp_path, placement="nvme")
    before = layer.weight.full_tensor()
    with pytest.raises(StoredTensorError, match=r"the bytes of parameter '1\.weight'.*copy_\(\), or tie"):
        layer.weight.data = part(other.weight.data)
    assert torch.equal(layer.weight.full_tensor(), before)


def test_hooks_of_a_parameter_that_got_another_shape_run(tmp_path):
    model = zinf_fx.offload(nn.Linear(6, 4, bias=False), store=tmp_path, placement="nvme")
    model.weight.register_hook(lambda gradient: 2 * gradient)
    model(torch.ones(6)).sum().backward()
    model.weight.grad = None
    model.weight.data = torch.zeros(5, 6)
    model(torch.ones(6)).sum().backward()
    assert isinstance(model.weight.grad, StoredTensor)
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((5, 6), 2.0))


def test_what_belongs_to_the_old_shape_is_refused_and_nothing_changes(tmp_path):
    model = zinf_fx.offload(nn.Linear(6, 4), store=tmp_path, placement="nvme")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    model(torch.ones(6)).sum().backward()
    before = model.weight.full_tensor()
    with pytest.raises(StoredTensorError, match="while it has a gradient: set that to None"):
        model.weight.data = torch.zeros(5, 6)
    assert torch.equal(model.weight.full_tensor(), before)
    optimizer.zero_grad()
    model.weight.data, model.bias.data = torch.zeros(5, 6), torch.zeros(5)
    model(torch.ones(6)).sum().backward()
    with pytest.raises(OptimizerError, match=r"got the shape \(5, 6\).*make a new optimizer"):
        optimizer.step()


def test_parameters_and_modules_that_take_the_place_of_stored_ones(tmp_path, tier: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Tied()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=tier)
    weights = nn.Linear(8, 12), nn.Linear(12, 8)
    bias = torch.randn(12)
    for net in (model, plain):
        net.middle = copy.deepcopy(weights[0])
        net.middle.bias = nn.Parameter(bias.clone())
        net.head = nn.Sequential(copy.deepcopy(weights[1]), net.head)
    assert isinstance(model.middle.weight, StoredTensor) and isinstance(model.middle.bias, StoredTensor)
    assert model.middle.weight.stored.config is model.tokens.weight.stored.config
    assert not isinstance(model.head[0].weight, StoredTensor), "in a new place"
    zinf_fx.offload(model, store=tmp_path, placement=tier)
    tokens = torch.arange(20)
    expected = train(plain, plain, torch.optim.AdamW(plain.parameters(), fused=True), tokens)
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    assert train(model, torch.compile(model, backend="zinf"), optimizer, tokens) == expected
    equal(model, plain)


def test_a_state_dict_that_is_assigned_is_stored(tmp_path):
    model = zinf_fx.offload(nn.Linear(6, 4), store=tmp_path, placement="nvme")
    values = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict({name: nn.Parameter(value) for name, value in values.items()}, assign=True)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, StoredTensor) and torch.equal(parameter.full_tensor(), values[name])


def test_a_module_takes_the_place_of_one_whose_submodules_have_stored_parameters(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 2))
    zinf_fx.offload(model, store=tmp_path, placement="nvme")
    head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    value = head[0].weight.detach().clone()
    model[0] = head
    assert isinstance(head[0].weight, StoredTensor) and torch.equal(head[0].weight.full_tensor(), value)
    assert not isinstance(head[2].weight, StoredTensor), "in a new place"


class Busy(nn.Sequential):
    """A module that can't be asked for its parameters while it is taken apart."""

    def named_modules(self, *args: object, **kwargs: object):
        raise AttributeError("its layer is gone")


def test_a_module_that_is_being_taken_apart_is_replaced(tmp_path):
    model = zinf_fx.offload(nn.Sequential(nn.Sequential(nn.Linear(6, 4))), store=tmp_path, placement="nvme")
    inner = model[0][0]
    model._modules["0"] = Busy(inner)
    value = nn.Linear(6, 4)
    model[0] = nn.Sequential(value)
    assert isinstance(value.weight, StoredTensor)


def test_a_meta_parameter_in_the_place_of_a_stored_one_stays(tmp_path):
    model = zinf_fx.offload(nn.Linear(6, 4), store=tmp_path, placement="nvme")
    model.weight = nn.Parameter(torch.empty(4, 6, device="meta"))
    assert model.weight.is_meta and isinstance(model.bias, StoredTensor)
