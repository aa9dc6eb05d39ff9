"""`torch.compile(model, backend="zinf", options=...)`: the entry point, the one-line use, and what it refuses."""

from __future__ import annotations

import logging

import pytest
import torch

import zinf_fx
from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.explain import plan_model
from zinf_fx.runtime.stored_tensor import StoredTensor


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def cause(error: BaseException, kind: type[BaseException]) -> BaseException:
    """Dynamo wraps what a backend raises: the first `kind` in the chain of causes."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    assert error is not None, f"no {kind.__name__} in the chain"
    return error


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_backend_is_found_by_its_entry_point():
    assert "zinf" in torch.compiler.list_backends(exclude_tags=())


REFUSED = {
    "unknown option": ({"placemnt": "nvme"}, ConfigError, "unknown option 'placemnt'; accepted: store, placement"),
    "unknown placement": ({"placement": "nvm"}, ConfigError, "'nvm' is unknown"),
    "missing store": ({"placement": "nvme", "store": "/nowhere/at/all"}, StoreError, "/nowhere/at/all"),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_options_are_refused_and_the_model_is_untouched(options, kind, message):
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(Exception) as raised:
        torch.compile(model, backend="zinf", options=options)(torch.randn(2, 8))
    assert message in str(cause(raised.value, kind))
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_placement_that_contradicts_the_offloaded_model_is_refused(tmp_path):
    model = zinf_fx.offload(mlp(), store=tmp_path, placement="host")
    with pytest.raises(Exception) as raised:
        torch.compile(model, backend="zinf", options={"placement": "nvme"})(torch.randn(2, 8))
    assert "was offloaded with" in str(cause(raised.value, ConfigError))


@pytest.mark.parametrize("placement", ["device", "host", "nvme"])
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
        assert torch.equal(p.grad, q.grad.full_tensor())


def test_without_options_what_fits_stays_resident_and_one_line_says_so(caplog):
    plain, model = mlp(), mlp()
    compiled = torch.compile(model, backend="zinf")
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        x = torch.randn(2, 8)
        result = compiled(x).sum()
    result.backward()
    plain(x).sum().backward()
    (line,) = [r.message for r in caplog.records if r.name == "zinf_fx"]
    assert line.startswith("placement auto: parameters (0 MiB) on device")
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_auto_offloads_what_exceeds_the_budget(tmp_path):
    model = mlp()
    compiled = torch.compile(model, backend="zinf", options={"store": tmp_path, "device_memory": 3000})
    compiled(torch.randn(2, 8))
    assert model[0].weight.storage.placement.optimizer == "nvme"


def test_the_first_call_simulates_where_something_has_to_leave(tmp_path, caplog):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    x, options = torch.randn(2, 64), {"store": tmp_path, "device_memory": "70KiB"}
    ahead = plan_model(model, (x,), **options).decision
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        torch.compile(model, backend="zinf", options=options)(x)
    (line,) = [record.message for record in caplog.records if record.name == "zinf_fx"]
    assert line.endswith(ahead.reason) and "simulated" in line
    assert model[0].weight.storage.placement == ahead.placement


def test_compile_options_replace_those_of_the_model(tmp_path):
    model = zinf_fx.offload(mlp(), store=tmp_path, placement="nvme")
    expected = model(torch.ones(2, 8))
    for prefetch in (None, (0, 1, 4)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="zinf", options={"prefetch": prefetch})
        assert torch.equal(compiled(torch.ones(2, 8)), expected)
