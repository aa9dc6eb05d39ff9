"""The executor under everything that a training loop may do between forward and backward."""

from __future__ import annotations

import copy
import errno
import gc
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from torch import Tensor, nn
from twins import Net, assert_nothing_leaked, assert_same_gradients, x

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.passes.activations import offload as offload_activations
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.tensor.tiers import Tiers

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Net, Net]:
    """Return a plain model, and its twin on disk, in several packs, whose activations stay in memory, or go to disk
    whatever their size."""
    monkeypatch.setattr(offload_activations, "SMALLEST", 1)
    torch.manual_seed(0)
    plain = Net()
    options = {"placement": "nvme", "pack": "16KiB", "activations": getattr(request, "param", "keep")}
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, **options)


# Of what may happen between forward and backward, where activations wait.
wherever_activations_are = pytest.mark.parametrize("pair", [slow("keep"), "offload"], indirect=True)


@wherever_activations_are
def test_two_forwards_before_their_backwards(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for order in ((0, 1), (0, 1), (1, 0), (1, 0), (0, 1)):
        inputs = [x(), x()]
        expected, losses = [plain(i) for i in inputs], [call(i) for i in inputs]
        for k in order:
            expected[k].backward()
            losses[k].backward()
        assert [a.item() for a in losses] == [a.item() for a in expected]
        assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


@wherever_activations_are
def test_backward_twice_over_a_retained_graph(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    batch = x()
    for loss in (plain(batch), torch.compile(model, backend="zinf")(batch)):
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


@wherever_activations_are
def test_a_forward_whose_backward_never_comes(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(3):
        call(x())
    batch = x()
    plain(batch).backward()
    call(batch).backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


@torch.library.custom_op("zinf_tests::may_fail", mutates_args=())
def may_fail(x: Tensor) -> Tensor:
    if FAILING:
        raise RuntimeError("injected")
    return x.clone()


FAILING: list[bool] = []
may_fail.register_fake(torch.empty_like)


def _backward_that_may_fail(ctx: object, gradient: Tensor) -> Tensor:
    return may_fail(gradient)


may_fail.register_autograd(_backward_that_may_fail)


@wherever_activations_are
def test_an_exception_in_the_middle_of_a_graph(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    model.hook = may_fail
    call = torch.compile(model, backend="zinf")
    call(x()).backward()
    for where in ("forward", "backward"):
        model.zero_grad()
        plain.zero_grad()
        loss = call(x()) if where == "backward" else None
        FAILING.append(True)
        try:
            with pytest.raises(RuntimeError, match="injected"):
                call(x()) if loss is None else loss.backward()
        finally:
            FAILING.clear()
        del loss
        assert_nothing_leaked_but_gradients(model)
        for _ in range(2):
            batch = x()
            plain(batch).backward()
            call(batch).backward()
        assert_same_gradients(model, plain)
        assert_nothing_leaked(model)


def assert_nothing_leaked_but_gradients(model: Net) -> None:
    model.zero_grad()
    assert_nothing_leaked(model)


@wherever_activations_are
def test_a_read_that_fails_in_the_middle_of_a_graph(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    call(x()).backward()
    model.zero_grad()
    store = model.scale.stored.tiers.store
    inject(store, Fault("completion", nth=3, operation="read", errno=errno.EOVERFLOW))
    with pytest.raises(StoreError) as failed:
        call(x()).backward()
    assert (failed.value.operation, failed.value.errno) == ("read", errno.EOVERFLOW)
    clear_faults(store)
    assert_nothing_leaked_but_gradients(model)
    batch = x()
    plain(batch).backward()
    call(batch).backward()
    assert_same_gradients(model, plain)


@wherever_activations_are
def test_evaluation_between_training_steps(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(3):
        batch = x()
        expected, loss = plain(batch), call(batch)
        with torch.no_grad():
            assert torch.equal(call(batch), plain(batch))
        expected.backward()
        loss.backward()
        with torch.inference_mode():
            assert torch.equal(call(batch), plain(batch))
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


def test_graph_breaks(pair: tuple[Net, Net]) -> None:
    plain, model = pair

    def break_graph(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    model.hook = break_graph
    call = torch.compile(model, backend="zinf")
    for _ in range(2):
        batch = x()
        plain(batch).backward()
        call(batch).backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


@pytest.mark.parametrize("dynamic", [None, slow(True)])
def test_new_shapes(pair: tuple[Net, Net], dynamic: bool | None) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf", dynamic=dynamic)
    for rows in (3, 5, 8, 3):
        batch = x(rows)
        expected, loss = plain(batch), call(batch)
        assert torch.equal(loss, expected)
        expected.backward()
        loss.backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


@pytest.mark.parametrize("one_store", [True, slow(False)])
def test_two_models_in_one_process(tmp_path: Path, one_store: bool) -> None:
    plains, models, calls = [], [], []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        torch.manual_seed(len(plains))
        plain = Net()
        store = tmp_path / ("one" if one_store else name)
        model = zinf_fx.offload(copy.deepcopy(plain), store=store, placement="nvme")
        plains.append(plain)
        models.append(model)
        calls.append(torch.compile(model, backend="zinf"))
    for _ in range(3):
        batch = x()
        (plains[0](batch) + plains[1](batch)).backward()
        (calls[0](batch) + calls[1](batch)).backward()
    for model, plain in zip(models, plains, strict=True):
        assert_same_gradients(model, plain)
    for model in models:
        assert_nothing_leaked(model)


def test_a_parameter_shared_by_two_models(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = Net(), Net()
    second.layers[0].weight = first.layers[0].weight
    plain_first, plain_second = copy.deepcopy((first, second))
    both = nn.ModuleList([first, second])
    zinf_fx.offload(both, store=tmp_path, placement="nvme")
    assert second.layers[0].weight is first.layers[0].weight
    calls = [torch.compile(m, backend="zinf") for m in both]
    batch = x()
    (plain_first(batch) + plain_second(batch)).backward()
    (calls[0](batch) + calls[1](batch)).backward()
    assert_same_gradients(first, plain_first)
    assert_same_gradients(second, plain_second)


def test_parameters_used_in_eager_code_between_graphs(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(2):
        batch = x()
        for net, run in ((plain, plain), (model, call)):
            hidden = torch.relu(net.unused(batch))
            (run(hidden) + net.unused.weight.sum()).backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


def test_a_weight_changed_between_forward_and_backward_raises_as_in_pytorch(pair: tuple[Net, Net]) -> None:
    for net, call in ((pair[0], pair[0]), (pair[1], torch.compile(pair[1], backend="zinf"))):
        loss = call(x())
        with torch.no_grad():
            net.layers[2].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_output_that_is_a_parameter_seen_another_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")

    def function(layer: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), layer.weight.t()

    batch = torch.randn(2, 8)
    expected, results = function(plain, batch), torch.compile(function, backend="zinf")(model, batch)
    assert torch.equal(results[0], expected[0])
    later = model(batch)  # the buffers of the graph are used again
    assert torch.equal(results[1], expected[1]) and torch.equal(later, expected[0])
    (expected[0].sum() + expected[1].sin().sum()).backward()
    (results[0].sum() + results[1].sin().sum()).backward()
    assert_same_gradients(model, plain)


def test_the_forward_graph_starts_the_head_of_its_backward(tmp_path: Path) -> None:
    model = zinf_fx.offload(Net(), store=tmp_path, placement="nvme", pack=None)
    call = torch.compile(model, backend="zinf")
    call(x()).backward()  # from now on it is known that backward follows
    model.zero_grad()
    loss = call(x())
    expected = EXECUTOR._expected()
    assert expected.schedule.kind == "backward"
    ahead = {tile.key[0] for tile in expected.anticipated}
    assert {model.layers[k].weight.stored.key for k in (2, 3)} <= ahead
    loss.backward()
    assert not expected.anticipated


# -- what changes between calls --------------------------------------------------------------------------------------


def test_parameters_freeze_and_thaw(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for frozen in (False, True, False):
        batch = x()
        for net, run in ((plain, plain), (model, call)):
            net.layers[1].requires_grad_(not frozen)
            run(batch).backward()
    assert_same_gradients(model, plain)
    assert_nothing_leaked(model)


def test_values_that_change_in_the_store_are_fetched_again(pair: tuple[Net, Net]) -> None:
    """Those that were fetched in advance for the next graph are, too."""
    plain, model = pair
    call = torch.compile(model, backend="zinf")
    for _ in range(2):
        call(x()).backward()
    for seed in range(3):
        torch.manual_seed(seed)
        state = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
        for net in pair:
            net.load_state_dict(state)
            with torch.no_grad():
                net.layers[0].weight[3].mul_(2)
        batch = x()
        assert torch.equal(call(batch), plain(batch))
    assert_nothing_leaked(model)


@wherever_activations_are
def test_a_model_that_dies_between_forward_and_backward(pair: tuple[Net, Net]) -> None:
    plain, model = pair
    batch = x()
    plain(batch).backward()
    loss = torch.compile(model, backend="zinf")(batch)
    weight = model.layers[0].weight
    del model, pair
    gc.collect()
    loss.backward()
    assert torch.equal(weight.grad, plain.layers[0].weight.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_call_of_the_one_line_use_may_be_an_evaluation(tmp_path: Path, mode: type) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    call = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    batch = x()
    for _ in range(2):
        with mode():
            assert torch.equal(call(batch), plain(batch))
    for _ in range(2):
        plain(batch).backward()
        call(batch).backward()
    assert not model.scale.is_inference()
    assert_same_gradients(model, plain)


def test_the_one_line_use_leaves_the_model_alone_when_the_disk_fails(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    call = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    tiers = Tiers.of(zinf_fx.Config(store=tmp_path, placement="nvme"))
    inject(tiers.store, Fault("completion", operation="write", nth=4, errno=errno.ENOSPC))
    batch = x()
    with pytest.raises(StoreError, match="full"):
        call(batch)
    clear_faults(tiers.store)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for _ in range(2):
        plain(batch).backward()
        call(batch).backward()
    assert_same_gradients(model, plain)
