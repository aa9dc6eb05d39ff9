"""`torch.compile(model, backend="zinf", options=...)`: the entry point, the one-line use, and what it refuses."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from followed import followed_plans
from gate import slow
from torch.utils.checkpoint import checkpoint

import zinf_fx
from zinf_fx.config import PRESETS
from zinf_fx.errors import ConfigError, StoredTensorError, StoreError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_the_backend_is_found_by_its_entry_point():
    assert "zinf" in torch.compiler.list_backends(exclude_tags=())


REFUSED = {
    "unknown option": ({"placemnt": "nvme"}, ConfigError, "unknown option 'placemnt'; accepted: store, placement"),
    "unknown placement": ({"placement": "nvm"}, ConfigError, "'nvm' is unknown"),
    "missing store": ({"placement": "nvme", "store": "/dev/null/store"}, StoreError, "/dev/null/store"),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_and_the_model_is_untouched(options, kind, message):
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(kind) as raised:
        torch.compile(model, backend="zinf", options=options)(torch.randn(2, 8))
    assert message in str(raised.value)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_placement_that_contradicts_the_offloaded_model_is_refused(tmp_path):
    model = zinf_fx.offload(mlp(), store=tmp_path, placement="host")
    with pytest.raises(ConfigError) as raised:
        torch.compile(model, backend="zinf", options={"placement": "nvme"})(torch.randn(2, 8))
    assert "was offloaded with" in str(raised.value)


@pytest.mark.parametrize("placement", [slow("device"), slow("host"), "nvme"])
def test_one_line_use_offloads_in_place_and_computes_the_same(tmp_path, placement):
    plain, model = mlp(), mlp()
    identities = [id(p) for p in model.parameters()]
    compiled = torch.compile(model, backend="zinf", options={"placement": placement, "store": tmp_path})
    for _ in range(3):
        x = torch.randn(2, 8)
        expected, result = plain(x).sum(), compiled(x).sum()
        expected.backward()
        result.backward()
        assert torch.equal(expected, result)
    assert [id(p) for p in model.parameters()] == identities
    assert all(isinstance(p, StoredTensor) and p.base.tier == placement for p in model.parameters())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_without_options_what_fits_stays_resident_and_one_line_says_so(caplog):
    plain, model = mlp(), mlp()
    compiled = torch.compile(model, backend="zinf")
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        x = torch.randn(2, 8)
        result = compiled(x).sum()
    result.backward()
    plain(x).sum().backward()
    (line,) = [r.message for r in caplog.records if r.name == "zinf_fx"]
    assert line.startswith("placement auto: parameters (848 B) on device")
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_auto_offloads_what_exceeds_the_budget(tmp_path):
    model = mlp()
    compiled = torch.compile(model, backend="zinf", options={"store": tmp_path, "device_memory": 3000})
    compiled(torch.randn(2, 8))
    assert model[0].weight.stored.placement.optimizer == "nvme"


def test_the_first_call_simulates_where_something_has_to_leave(tmp_path, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    x, options = torch.randn(2, 64), {"store": tmp_path, "device_memory": "70KiB"}
    ahead = plan_model(model, (x,), **options).decision
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        torch.compile(model, backend="zinf", options=options)(x)
    (line,) = [record.message for record in caplog.records if record.name == "zinf_fx"]
    assert line.endswith(ahead.reason) and "simulated" in line
    assert model[0].weight.stored.placement == ahead.placement


def test_activations_leave_where_nothing_else_does(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    x, options = torch.randn(256, 64), {"store": tmp_path, "activations": "offload"}
    ahead = plan_model(model, (x,), **options)
    with followed_plans(model) as plans:
        torch.compile(model, backend="zinf", options=options)(x).sum().backward()
    (plan,), (planned,) = plans, ahead.plans
    assert {parameter.stored.placement for parameter in model.parameters()} == {PRESETS["device"]}
    assert plan.tiles == planned.tiles and any(tile.activation for tile in plan.tiles)
    assert "ordinary PyTorch" not in ahead.text()


def test_compile_options_replace_those_of_the_model(tmp_path):
    model = zinf_fx.offload(mlp(), store=tmp_path, placement="nvme")
    expected = model(torch.ones(2, 8))
    for prefetch in (None, (0, 1, 4)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="zinf", options={"prefetch": prefetch})
        assert torch.equal(compiled(torch.ones(2, 8)), expected)


class Dropping(torch.nn.Module):
    """Has two layers with dropout, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(self.first(x).tanh(), 0.5, True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False).square().sum()


def gradients_equal(model: torch.nn.Module, plain: torch.nn.Module) -> bool:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.equal(p.grad.full_tensor(), q.grad) for p, q in pairs)


def test_gradients_of_the_first_step_are_right_where_backward_repeats_dropout(tmp_path):
    model = Dropping()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    for step in range(2):
        x = torch.randn(4, 8)
        for call in (plain, compiled):
            torch.manual_seed(step)
            call(x).backward()
        assert gradients_equal(model, plain), f"step {step}"
        model.zero_grad()
        plain.zero_grad()


def test_a_model_takes_one_entry_of_dynamos_cache(tmp_path):
    options = {"placement": "nvme", "store": tmp_path}
    for width in range(1, torch._dynamo.config.recompile_limit + 1):
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 4))
        compiled = torch.compile(model, backend="zinf", options=options)
        for _ in range(2):
            compiled(torch.randn(2, 8)).sum().backward()
        assert all(isinstance(p, StoredTensor) for p in model.parameters()), f"width {width}"


@torch.compile(backend="zinf", options={"placement": "host"})
def both(first: torch.nn.Module, second: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return second(first(x)).sum()


def test_parameters_of_one_name_leave_all():
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    both(first, second, torch.randn(2, 8)).backward()
    for parameter in (*first.parameters(), *second.parameters()):
        assert isinstance(parameter, StoredTensor) and parameter.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_may_be_evaluated_before_it_is_trained(tmp_path, mode):
    plain, model = mlp(), mlp()
    compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    x = torch.randn(2, 8)
    with mode():
        assert torch.equal(compiled(x), plain(x))
    for call in (compiled, plain):
        call(x).sum().backward()
    assert gradients_equal(model, plain)


def test_a_parameter_that_cant_be_stored_is_named(tmp_path):
    model = mlp()
    indices = torch.zeros(2, 0, dtype=torch.int64)
    model[2].weight.grad = torch.sparse_coo_tensor(indices, torch.zeros(0), (4, 16), check_invariants=True)
    with pytest.raises(StoredTensorError) as raised:
        torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})(torch.randn(2, 8))
    assert "parameter '2.weight' has a gradient of layout" in str(raised.value)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


def test_parameters_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model, x = mlp(), torch.randn(2, 8)
    with pytest.raises(StoredTensorError) as raised:
        torch.compile(model, backend="zinf", options={"placement": "host"})(x)
    assert "parameter '0.weight' is on the meta device" in str(raised.value)


def test_options_that_contradict_what_is_stored_are_refused_before_the_others_leave(tmp_path):
    model = mlp()
    zinf_fx.offload(model[0], placement="host")
    compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    with pytest.raises(ConfigError) as raised:
        compiled(torch.randn(2, 8))
    assert "was offloaded with" in str(raised.value)
    assert type(model[2].weight) is torch.nn.Parameter


def test_what_leaves_beside_stored_parameters_has_their_options(tmp_path):
    model = mlp()
    zinf_fx.offload(model[0], store=tmp_path, placement="nvme", prefetch=(0, 1, 1))
    torch.compile(model, backend="zinf", options={"placement": "nvme"})(torch.randn(2, 8))
    assert model[2].weight.base.config == model[0].weight.base.config


def trained_alike(model: torch.nn.Module, call: Callable, plain: torch.nn.Module, *shape: int) -> bool:
    """Return whether gradients are equal in two steps."""
    for _ in range(2):
        x = torch.randn(shape)
        for net in (call, plain):
            net(x).square().sum().backward()
        if not gradients_equal(model, plain):
            return False
        model.zero_grad()
        plain.zero_grad()
    return True


class Recurrent(torch.nn.Module):
    """A layer that Dynamo captures, and one that it doesn't; a layer that isn't called."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.recurrent = torch.nn.Linear(8, 8), kind(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.first(x).tanh())[0]


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers_are_stored_after_the_first_call(tmp_path, kind):
    model = Recurrent(kind)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    assert trained_alike(model, compiled, plain, 3, 2, 8)
    assert all(isinstance(p, StoredTensor) for p in model.parameters())


def test_a_model_of_which_nothing_is_captured_is_stored_and_a_warning_says_why(tmp_path, caplog):
    model = torch.nn.LSTM(8, 8)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
    for step in range(2):
        x = torch.randn(3, 2, 8)
        for net in (compiled, plain):
            net(x)[0].square().sum().backward()
        assert gradients_equal(model, plain), f"step {step}"
        model.zero_grad()
        plain.zero_grad()
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "zinf_fx"]
    assert warning.startswith("Dynamo captured nothing of LSTM that uses a parameter. Its 4 parameters, 2.2 KiB, are")


class Unfinished(torch.nn.Module):
    """A recurrent layer, and layers without values that the first call doesn't reach."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = torch.nn.LSTM(8, 8)
        self.lazy, self.meta = torch.nn.LazyLinear(4), torch.nn.Linear(4, 4, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(x)[0]


def test_what_has_no_values_yet_stays_when_nothing_is_captured():
    model = Unfinished()
    torch.compile(model, backend="zinf", options={"placement": "host"})(torch.randn(3, 2, 8))
    assert all(isinstance(parameter, StoredTensor) for parameter in model.recurrent.parameters())
    assert model.meta.weight.is_meta and not isinstance(model.meta.weight, StoredTensor)


def test_without_options_what_fits_and_isnt_captured_stays_resident(caplog):
    model = torch.nn.LSTM(8, 8)
    torch.compile(model, backend="zinf")(torch.randn(3, 2, 8))
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert not [record for record in caplog.records if record.name == "zinf_fx"]


@torch._dynamo.config.patch(recompile_limit=1)
def test_models_past_dynamos_recompile_limit_are_stored(tmp_path):
    for width in (8, 16):
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 4))
        plain = copy.deepcopy(model)
        compiled = torch.compile(model, backend="zinf", options={"placement": "nvme", "store": tmp_path})
        assert trained_alike(model, compiled, plain, 2, 8)
        assert all(isinstance(p, StoredTensor) for p in model.parameters()), f"width {width}"


def test_modules_of_other_backends_are_left_alone(caplog):
    model = torch.nn.LSTM(8, 8)
    torch.compile(mlp(), backend="zinf")
    torch.compile(model, backend="eager", options={})(torch.randn(3, 2, 8))
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert not [record for record in caplog.records if record.name == "zinf_fx"]
