"""What the `grad` of a stored parameter is from step to step, and the buffers that gradients use again."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import zinf_fx
from zinf_fx.runtime.gradients.buffers import run_of, stored_gradients
from zinf_fx.runtime.gradients.state import GradientState, state_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NVME = {"parameters": "device", "gradients": "nvme", "optimizer": "nvme"}
HOST = {"parameters": "device", "gradients": "host", "optimizer": "nvme"}


def layers(store: Path, placement: object, count: int = 1, **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(count)))
    return zinf_fx.offload(model, store=store, placement=placement, **options)


def state(parameter: torch.Tensor) -> GradientState:
    return state_of(parameter.grad, parameter.stored)


@pytest.mark.parametrize(
    ("placement", "left"), [("device", "PLAIN"), ("host", "PLAIN"), (HOST, "STORED"), (NVME, "STORED")]
)
@pytest.mark.parametrize("compiles", [False, True])
def test_states(tmp_path: Path, placement: object, left: str, compiles: bool) -> None:
    model = layers(tmp_path, placement)
    call = torch.compile(model, backend="zinf") if compiles else model
    (parameter,) = model.parameters()
    x = torch.ones(2, 32)
    assert state(parameter) is GradientState.NONE
    call(x).sum().backward()
    once = parameter.grad.full_tensor() if left == "STORED" else parameter.grad.clone()
    assert state(parameter) is GradientState[left]
    call(x).sum().backward()
    assert state(parameter) is GradientState[left]
    assert torch.equal(parameter.grad + 0, once * 2)
    parameter.grad = None
    assert state(parameter) is GradientState.NONE
    parameter.grad = torch.ones(32, 32).to_sparse()
    assert state(parameter) is GradientState.ORDINARY
    parameter.grad = None
    model(x).square().sum().backward(create_graph=True)
    assert state(parameter) is GradientState.RECORDED
    parameter.grad = torch.ones(32, 32)  # what the user gives is added to
    call(x).sum().backward()
    assert torch.equal(parameter.grad + 0, once + 1)


def test_a_consumed_gradient_and_one_of_this_rank_alone(tmp_path: Path) -> None:
    (parameter,) = layers(tmp_path, NVME, 1).parameters()
    optimizer = zinf_fx.optim.AdamW([parameter], step_in_backward=True)
    parameter.expect_gradient()
    (parameter * 2).sum().backward()
    assert state(parameter) is GradientState.CONSUMED
    optimizer.step()
    optimizer.zero_grad()
    assert state(parameter) is GradientState.NONE
    (gradient,) = stored_gradients([parameter], parameter.dtype)
    parameter.grad = gradient
    assert state(parameter) is GradientState.STORED
    gradient.stored.gradient_state = GradientState.LOCAL
    assert state(parameter) is GradientState.LOCAL


@pytest.mark.parametrize("placement", [HOST, NVME], ids=["host", "nvme"])
def test_a_place_is_acquired_again_when_nobody_has_the_gradient(tmp_path: Path, placement: object) -> None:
    (parameter,) = layers(tmp_path, placement).parameters()
    (first,) = stored_gradients([parameter], parameter.dtype)
    storage = first.stored
    part = first.detach()[:3]
    del first
    (second,) = stored_gradients([parameter], parameter.dtype)
    assert second.stored is not storage, "a part of the first one is there"
    del part, second
    (third,) = stored_gradients([parameter], parameter.dtype)
    fourth = stored_gradients([parameter], torch.float64)
    assert (third.stored is storage) == (placement is NVME), "in memory, the last buffer is kept"
    assert fourth[0].stored is not third.stored and fourth[0].dtype == torch.float64


def test_memory_goes_back_with_the_last_of_the_gradients_and_comes_again(tmp_path: Path) -> None:
    parameters = list(layers(tmp_path, HOST, 3).parameters())
    arena = parameters[0].stored.tiers.host
    used = arena.in_use
    gradients = stored_gradients(parameters, torch.float32)
    assert run_of(gradients) is not None and run_of(gradients[::-1]) is None and run_of(gradients[::2]) is None
    assert run_of(gradients[1:]) is not None
    nbytes, storages = arena.in_use - used, [gradient.stored for gradient in gradients]
    assert nbytes == 3 * 4096
    last = gradients.pop()
    gradients.clear()
    assert arena.in_use == used + nbytes
    del last
    assert arena.in_use == used
    again = stored_gradients(parameters, torch.float32)
    assert [gradient.stored for gradient in again] == storages and arena.in_use == used + nbytes
    del again
    taken = arena.allocate(arena.capacity - arena.in_use)  # among it, where the gradients were
    taken.release()
    others = stored_gradients(parameters[:2], torch.float32)
    assert others[0].stored not in storages, "some of them have a buffer of their own"


def test_places_on_nvme_that_are_taken_leave_the_others_usable(tmp_path: Path) -> None:
    parameters = list(layers(tmp_path, NVME, 3, pack="1MiB").parameters())
    store = parameters[0].stored.tiers.store
    reserved = store.in_use
    held = stored_gradients(parameters[1:2], torch.float32)
    gradients = stored_gradients(parameters, torch.float32)
    assert store.in_use == reserved + 4096 and run_of(gradients) is None
    assert run_of([gradients[0], held[0], gradients[2]]) is not None
    del held, gradients
    assert store.in_use == reserved
    assert run_of(stored_gradients(parameters, torch.float32)) is not None


def test_a_buffer_goes_with_its_parameters(tmp_path: Path) -> None:
    model = layers(tmp_path, HOST, 3)
    gradients = stored_gradients(list(model.parameters()), torch.float32)
    buffer = weakref.ref(gradients[0].buffer_place.buffer)
    gone = gradients[0].stored.tiers.host
    used = gone.in_use
    del model
    gc.collect()
    assert buffer() is not None and gone.in_use <= used
    del gradients
    gc.collect()
    assert buffer() is None
