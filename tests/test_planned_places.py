"""Where a step takes the order that its plan knows, every buffer has its planned place; in any other, values are right
all the same, and the next steps are as planned again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from torch import Tensor, nn
from twins import Net, assert_nothing_leaked, assert_same_gradients, pair, x

import zinf_fx
from zinf_fx.runtime.execute.executor import EXECUTOR

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

__all__ = ["pair"]  # a fixture

Call = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    EXECUTOR.reset()


def displaced(model: nn.Module) -> int:
    return zinf_fx.stats(model).displaced_buffers


def two_forwards(call: Call, batches: list[Tensor]) -> None:
    for loss in [call(batch) for batch in batches]:
        loss.backward()


def evaluation_between(call: Call, batches: list[Tensor]) -> None:
    loss = call(batches[0])
    with torch.no_grad():
        call(batches[1])
    loss.backward()


def accumulation(call: Call, batches: list[Tensor]) -> None:
    for batch in batches:
        call(batch).backward()


def a_forward_in_vain(call: Call, batches: list[Tensor]) -> None:
    call(batches[0])
    call(batches[1]).backward()


def an_error_in_backward(call: Call, batches: list[Tensor]) -> None:
    """Raise between two graphs: what is expected for the second is dropped."""
    loss = call(batches[0])
    with pytest.raises(ZeroDivisionError):
        loss.register_hook(lambda gradient: 1 // 0)
        loss.backward()
    call(batches[1]).backward()


@pytest.mark.parametrize(
    ("disorder", "budget"),
    [
        slow(two_forwards, None),
        (two_forwards, "20KiB"),
        (evaluation_between, "20KiB"),
        (accumulation, None),
        (a_forward_in_vain, "20KiB"),
        (an_error_in_backward, None),
    ],
)
def test_disorder_changes_no_value_and_passes(
    tmp_path: Path, disorder: Callable[[Call, list[Tensor]], None], budget: str | None
) -> None:
    torch.manual_seed(0)
    plain = Net()
    twin = Net()
    twin.load_state_dict(plain.state_dict())
    model = zinf_fx.offload(twin, store=tmp_path, placement="nvme", device_memory=budget, tile=None, chunk="64KiB")
    call = torch.compile(model, backend="zinf")
    optimizers = [torch.optim.AdamW(plain.parameters(), fused=True), zinf_fx.optim.AdamW(model.parameters())]
    for disordered in (False, False, True, False, False, False):
        before = displaced(model)
        batches = [x(), x()]
        for net in (plain, call):
            disorder(net, batches) if disordered else net(batches[0]).backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert displaced(model) == before
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name
    del optimizers
    assert_nothing_leaked(model)


def test_two_models_share_an_arena(tmp_path: Path) -> None:
    """Each has a plan of its own, for the same region; what one holds there, the other finds taken."""
    plains, models, calls = [Net(), Net()], [], []
    for plain in plains:
        twin = Net()
        twin.load_state_dict(plain.state_dict())
        models.append(zinf_fx.offload(twin, store=tmp_path, placement="nvme"))
        calls.append(torch.compile(models[-1], backend="zinf"))
    assert models[0].scale.stored.tiers is models[1].scale.stored.tiers
    for _ in range(3):
        batch = x()
        expected = [plain(batch) for plain in plains]
        losses = [call(batch) for call in calls]
        for loss, other in zip(expected, losses, strict=True):
            loss.backward()
            other.backward()
        for model, plain in zip(models, plains, strict=True):
            assert_same_gradients(model, plain)
    for model in models:
        assert_nothing_leaked(model)


def test_eager_code_keeps_out_of_the_region_of_a_running_step(tmp_path: Path) -> None:
    model = zinf_fx.offload(Net(), store=tmp_path, placement="nvme")
    call, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters(), overlap=False)
    for _ in range(4):
        loss = call(x())
        with zinf_fx.gathered(model):
            norm = sum(p.square().sum() for p in model.layers[1].parameters())
        assert norm > 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert displaced(model) == 0


def test_a_step_has_its_places_while_gradients_are_on_their_way(tmp_path: Path) -> None:
    """Their writes end late, and the step's chunks are as large as the parts of the room that they take turns in."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(8)))
    model = zinf_fx.offload(model, store=tmp_path, placement="nvme", chunk="64KiB")
    call = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    store = model[0].weight.stored.tiers.store
    for _ in range(3):
        loss = call(torch.ones(4, 128, dtype=torch.bfloat16)).sum()
        optimizer.finish()
        inject(store, Fault("completion", operation="write", count=1000, delay=0.01))
        loss.backward()
        clear_faults(store)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    assert displaced(model) == 0
