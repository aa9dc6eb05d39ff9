"""Gradients of parameters that never move are ordinary tensors, in the memory that is planned for them."""

from __future__ import annotations

import copy
import gc
from collections import Counter

import pytest
import torch
from gate import slow
from twins import Net, python_calls_by_name, x
from versions import BEFORE_2_12

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.optim import AdamW
from zinf_fx.runtime.memory import process
from zinf_fx.runtime.tensor.pending_gradient import PendingGradient
from zinf_fx.sizes import PAGE, blocks, round_up

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLACED = ["device", "host", {"parameters": "device", "gradients": "host", "optimizer": "device"}]


@pytest.fixture(params=PLACED, ids=str)
def placement(request) -> object:
    return request.param


@pytest.fixture
def models(tmp_path, placement) -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement=placement)


@pytest.mark.parametrize("compiles", [False, True])
def test_they_are_ordinary_and_are_added_to_in_place(models, placement, compiles: bool):
    plain, model = models
    call = torch.compile(model, backend="zinf") if compiles else model
    tiers = model.scale.stored.tiers
    for _ in range(2):
        gc.collect()
        used = tiers.host.in_use
        addresses = set()
        for _ in range(3):
            batch = x()
            for net in (plain, call):
                net(batch).backward()
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if p.grad is not None:
                    assert type(p.grad) is torch.Tensor and p.grad.is_contiguous(), name
                    assert torch.equal(p.grad, q.grad), name
            addresses.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
        assert len(addresses) == 1
        leaves = [p for p in model.parameters() if p.grad is not None]
        in_arena = placement == "host" or isinstance(placement, dict)
        together = blocks(sum(round_up(p.grad.nbytes, 64) for p in leaves))  # compiled code leaves them so
        assert tiers.host.in_use == used + (together if compiles else PAGE * len(leaves)) * in_arena
        held = leaves[0].grad.data[1:]
        for net in (plain, model):
            net.zero_grad()
        # As long as anybody has a part.
        assert tiers.host.in_use == used + (together if compiles else PAGE) * in_arena
        del held
        assert tiers.host.in_use == used


def test_what_the_user_gives_is_taken(models):
    plain, model = models
    for net in (plain, model):
        for parameter in net.layers.parameters():
            parameter.grad = torch.ones(parameter.shape[::-1]).t()
        batch = torch.ones(3, 32)
        net(batch).backward()
        net(batch).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_a_budget_holds_for_them(tmp_path):
    model = torch.nn.Linear(512, 512, bias=False)  # 1 MiB
    zinf_fx.offload(model, store=tmp_path, placement="host", host_memory="1.5MiB")
    with pytest.raises(StoreError, match="raise host_memory"):
        model(torch.ones(1, 512)).sum().backward()


def test_what_stores_states_stores_gradients(tmp_path):
    """Its update may go on in the background, and nobody is to change what it reads."""
    where = {"parameters": "device", "gradients": "device", "optimizer": "nvme"}
    model = zinf_fx.offload(torch.nn.Linear(4, 4), store=tmp_path, placement=where)
    model(torch.ones(1, 4)).sum().backward()
    assert all(isinstance(p.grad, zinf_fx.StoredTensor) for p in model.parameters())


@pytest.mark.parametrize("compiles", [False, True])
def test_training_clips_and_scales_as_plain_pytorch(models, compiles: bool):
    sides = []
    for net, kind, options in zip(reversed(models), (AdamW, torch.optim.AdamW), ({}, {"fused": True}), strict=True):
        call = torch.compile(net, backend="zinf") if compiles and kind is AdamW else net
        sides.append((net, call, kind(net.parameters(), **options), torch.amp.GradScaler("cpu", init_scale=8.0)))
    for _ in range(4):
        batch = x()
        for net, call, optimizer, scaler in sides:
            scaler.scale(call(batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for p, q in zip(*(net.parameters() for net in models), strict=True):
            assert torch.equal(p, q)


class Sharing(torch.nn.Module):
    """Its parameters have gradients that are something else too: another's, what the caller gave, a part."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.given = (torch.nn.Parameter(torch.randn(3, 4)) for _ in range(3))
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.one + self.other) * torch.stack(list(self.parts)) + self.given


def test_no_gradient_shares_memory_with_anything(tmp_path):
    torch.manual_seed(0)
    plain = Sharing()
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="device")
    batch, tangent = torch.randn(3, 4), torch.randn(3, 4)
    compiled = torch.compile(model, backend="zinf")
    for _ in range(2):
        for net in (plain, compiled):
            net(batch).backward(tangent)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        storages = [p.grad.untyped_storage() for p in model.parameters()]
        assert all(storage.nbytes() == p.grad.nbytes for storage, p in zip(storages, model.parameters(), strict=True))
        assert len({storage.data_ptr() for storage in (*storages, tangent.untyped_storage())}) == len(storages) + 1


@pytest.mark.parametrize(("placement", "bound"), [slow("device", 15), ("host", 31)])
def test_python_calls_for_each_parameter_of_a_compiled_step(tmp_path, monkeypatch, placement: str, bound: int):
    """The calls are those of a whole step. Somebody who brings back work for each parameter sees it here."""
    # As in a process that had no budget before, and no optimizer that steps in backward.
    monkeypatch.setattr(process, "_holds_little", False)
    monkeypatch.setattr(PendingGradient, "any_followed", False)
    counts = []
    for layers in (5, 20):
        torch._dynamo.reset()
        model = zinf_fx.offload(Net(width=4, layers=layers), store=tmp_path, placement=placement)
        optimizer, call = AdamW(model.parameters()), torch.compile(model, backend="zinf")
        batch = torch.randn(3, 4)

        def step(call: object = call, optimizer: AdamW = optimizer, batch: torch.Tensor = batch) -> None:
            call(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        counts.append(python_calls_by_name(step))
    for_more = Counter({name: counts[1][name] - counts[0][name] for name in counts[1]})
    per_parameter = for_more.total() / (2 * 15)
    bound += 11 * BEFORE_2_12  # PyTorch's own calls, for subclasses of tensors
    assert per_parameter <= bound, (per_parameter, for_more.most_common(15))
