"""Exported plans in use: they train as planning at hand does, and another model's are refused with nothing changed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from gate import named, slow
from torch import nn
from torch.utils.checkpoint import checkpoint

import zinf_fx
from zinf_fx.errors import ConfigError, PlanError, PlanFileError
from zinf_fx.frontend import capture
from zinf_fx.plan.plan import Plan
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CONFIG = GPTConfig(layers=1, hidden=64, heads=2, context=32, vocabulary=128)


def gpt(dtype: torch.dtype = torch.float32, device: str | None = None) -> GPT:
    torch.manual_seed(0)
    with torch.device(device or "cpu"):
        return GPT(CONFIG).to(dtype)


class Layers(nn.Module):
    """What is quickly captured: layers of perceptrons between an embedding and a head."""

    def __init__(self, layers: int = 2, hidden: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(128, hidden), nn.Linear(hidden, 128)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(number: int = 0, rows: int = 4, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    if device == "meta":
        return tuple(torch.empty(rows, 32, dtype=torch.int64, device="meta") for _ in range(2))
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(128, (rows, 32), generator=generator) for _ in range(2))


def trained(model: nn.Module, compiled: Callable, steps: int = 3) -> list[torch.Tensor]:
    """Return losses, and then parameters."""
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(steps):
        loss = compiled(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return results + [p.full_tensor() for p in model.parameters()]


@contextmanager
def refusal(error: type[Exception], match: str) -> Iterator[None]:
    """The backend raises such an error, which is not of a class below."""
    with pytest.raises(error, match=match) as failure:
        yield
    assert type(failure.value) is error


def no_planning() -> mock._patch:
    """Any search, measurement or choice fails."""
    refused = mock.Mock(side_effect=AssertionError("planned at compile time"))
    return mock.patch.multiple(capture, plan_training=refused, plan_inference=refused, measured=refused)


OPTIONS = {
    "tiled to a budget": {"placement": "nvme", "device_memory": "500KiB", "activations": "recompute"},
    "host memory": {"placement": "nvme", "host_memory": "3MiB", "chunk": "64KiB"},
    "offloaded": {"placement": "infinity-nvme", "activations": "offload"},
    "chosen": {"placement": "nvme", "activations": "auto", "device_memory": "400KiB"},
}


@pytest.mark.parametrize("name", named(OPTIONS, {"tiled to a budget"}))
def test_a_plan_from_a_file_trains_bitwise_as_planning_does(tmp_path: Path, name: str):
    dtype = torch.float32 if name == "offloaded" else torch.bfloat16
    plan = zinf_fx.export_plan(gpt(dtype, "meta"), batch(device="meta"), **OPTIONS[name])
    plan.save(tmp_path / "plan.json")
    results = []
    for number in range(2):
        torch._dynamo.reset()
        (store := tmp_path / str(number)).mkdir()
        model = zinf_fx.offload(gpt(dtype), plan.config, store=store)
        if number == 0:  # in the process that measures nothing either: "auto" must choose the same
            with mock.patch.object(capture, "measured", lambda *_: capture.NOMINAL):
                results.append(trained(model, torch.compile(model, backend="zinf")))
        else:
            with no_planning():
                compiled = torch.compile(model, backend="zinf", options={"plan": tmp_path / "plan.json"})
                results.append(trained(model, compiled))
    for planned, followed in zip(*results, strict=True):
        assert torch.equal(planned, followed)


class Checkpointed(nn.Module):
    """A model whose own checkpointing decides for one layer; random numbers, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.tokens = nn.Embedding(128, 64)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for number, layer in enumerate(self.layers):
            block = lambda x, layer=layer: nn.functional.dropout(layer(x).relu(), 0.1)  # noqa: E731
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("activations", ["keep", slow("auto")])
def test_the_models_own_checkpoints_and_random_numbers(tmp_path: Path, activations: str):
    options = {"placement": "nvme", "device_memory": "400KiB", "activations": activations}
    plan = zinf_fx.export_plan(Checkpointed(), batch(), **options)
    results = []
    for number in range(2):
        torch._dynamo.reset()
        torch.manual_seed(1)
        (store := tmp_path / str(number)).mkdir()
        model = zinf_fx.offload(Checkpointed(), plan.config, store=store)
        with mock.patch.object(capture, "measured", lambda *_: capture.NOMINAL):
            given = {"plan": plan} if number else {}
            results.append(trained(model, torch.compile(model, backend="zinf", options=given)))
    assert all(torch.equal(value, other) for value, other in zip(*results, strict=True))


def test_one_line_and_a_plan_each_for_training_and_evaluation(tmp_path: Path):
    options = {"placement": "infinity-nvme", "prefetch": (0, 1, 1)}
    training = zinf_fx.export_plan(meta(), batch(device="meta"), **options)
    with torch.no_grad():
        evaluation = zinf_fx.export_plan(meta(), batch(device="meta"), **options)
    assert [g.kind for g in training.graphs + evaluation.graphs] == ["forward", "backward", "inference"]
    plain, model = Layers(), Layers()
    with no_planning():
        compiled = torch.compile(
            model, backend="zinf", options={"plan": [training, evaluation], "store": tmp_path, "checksum": False}
        )
        losses = [compiled(*batch()) for _ in range(2)]
        losses[1].backward()
        with torch.no_grad():
            losses.append(compiled(*batch()))
    assert all(
        isinstance(p, StoredTensor) and p.base.config.placement == training.config.placement for p in model.parameters()
    )
    expected = plain(*batch())
    expected.backward()
    assert all(torch.equal(loss, expected) for loss in losses)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), other.grad)


class Other(Layers):
    """Has the same parameters; something else is computed."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets).tanh()


def meta(kind: type[Layers] = Layers, **fields: int) -> Layers:
    with torch.device("meta"):
        return kind(**fields)


def exported(model: nn.Module, rows: int = 4, **options: object) -> Plan:
    return zinf_fx.export_plan(model, batch(rows=rows, device="meta"), **{"placement": "nvme"} | options)


@cache
def plan_of_the_model() -> Plan:
    return exported(meta())


REFUSED = {
    "fewer layers": (
        lambda: exported(meta(layers=1)),
        r"that of the plan: input",
    ),
    "wider": (lambda: exported(meta(hidden=128)), r"128, 64\].*128, 128\]"),
    "another dtype": (lambda: exported(meta().bfloat16()), "f32.*bf16"),
    "another batch": (lambda: exported(meta(), rows=2), r"i64\[4, 32\].*i64\[2, 32\]"),
    "another computation": (lambda: exported(meta(kind=Other)), "that of the plan: aten.tanh"),
    "another version": (
        lambda: changed(plan_of_the_model(), zinf_fx="0.0.1"),
        "made with zinf_fx 0.0.1, and this is zinf_fx 0.1.0",
    ),
    "another torch": (lambda: changed(plan_of_the_model(), torch="1.0"), "made with torch 1.0, and this is torch"),
}


def changed(plan: Plan, **fields: str) -> Plan:
    return dataclasses.replace(plan, fingerprint=dataclasses.replace(plan.fingerprint, **fields))


@pytest.mark.parametrize("name", named(REFUSED, REFUSED.keys() - {"wider", "another dtype"}))
def test_refused_before_anything_is_changed(tmp_path: Path, name: str):
    make, difference = REFUSED[name]
    model = Layers()
    before = [p.clone() for p in model.parameters()]
    compiled = torch.compile(model, backend="zinf", options={"plan": make(), "store": tmp_path})
    with refusal(PlanError, difference):
        compiled(*batch())
    assert all(type(p) is nn.Parameter and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offload", "options", "difference"),
    [
        ({"placement": "infinity-nvme"}, {}, "placement of gradients is 'nvme' in the plan, and 'host' here"),
        ({"placement": "nvme", "chunk": "1MiB"}, {}, "chunk is 33554432 in the plan, and 1048576 here"),
        ({"placement": "nvme"}, {"device_memory": "1GiB"}, "device_memory is None in the plan, and 1073741824 here"),
        ({"placement": "nvme"}, {"tile": None}, "tile is 'auto' in the plan, and None here"),
    ],
)
def test_other_options_than_the_plans_are_refused(tmp_path: Path, offload: dict, options: dict, difference: str):
    model = zinf_fx.offload(Layers(), store=tmp_path, **offload)
    compiled = torch.compile(model, backend="zinf", options={"plan": plan_of_the_model(), **options})
    with refusal(ConfigError if options else PlanError, difference):
        compiled(*batch())


def test_a_changed_schedule_is_refused_by_its_first_event(tmp_path: Path):
    plan = exported(meta(), prefetch=None, pack="64KiB")
    forward, backward = plan.graphs
    events = list(forward.events)
    number = next(n for n, e in enumerate(events) if e.kind == "release" and e.operator == 1)
    events[number] = dataclasses.replace(events[number], operator=0)
    tampered = dataclasses.replace(forward, operators=forward.operators, events=tuple(events))
    model = zinf_fx.offload(Layers(), plan.config, store=tmp_path)
    given = dataclasses.replace(plan, graphs=(tampered, backward))
    with refusal(PlanError, "the plan has a release in operator 0 of the forward graph, and here it is in 1"):
        torch.compile(model, backend="zinf", options={"plan": given})(*batch())


def test_what_is_no_plan_is_refused(tmp_path: Path):
    for option, error, text in (
        (3, ConfigError, "plan=3 is not accepted"),
        (tmp_path / "none.json", PlanFileError, "can't be read"),
        (dataclasses.replace(plan_of_the_model(), fingerprint=None), ConfigError, "no fingerprint"),
        ([plan_of_the_model(), exported(meta(), prefetch=None)], ConfigError, "differ in prefetch"),
    ):
        torch._dynamo.reset()
        with refusal(error, text):
            torch.compile(Layers(), backend="zinf", options={"plan": option, "store": tmp_path})(*batch())


def test_a_graph_of_any_size_is_refused_and_a_plan_for_each_size_is_followed(tmp_path: Path):
    """When torch.compile sees another size, it leaves sizes open, unless it is told not to."""
    plans = [plan_of_the_model(), exported(meta(), rows=2)]
    plain = Layers()
    for dynamic in (None, False):
        torch._dynamo.reset()
        (store := tmp_path / str(dynamic)).mkdir()
        model = zinf_fx.offload(Layers(), store=store, placement="nvme")
        compiled = torch.compile(model, backend="zinf", options={"plan": plans}, dynamic=dynamic)
        assert torch.equal(compiled(*batch()), plain(*batch()))
        if dynamic is None:
            with refusal(PlanError, r"size \d+; that of the plan: .*i64\[4, 32\].*dynamic=False"):
                compiled(*batch(rows=2))
        else:
            assert torch.equal(compiled(*batch(rows=2)), plain(*batch(rows=2)))


def test_a_plan_for_training_is_none_for_evaluation(tmp_path: Path):
    model = zinf_fx.offload(Layers(), store=tmp_path, placement="nvme")
    compiled = torch.compile(model, backend="zinf", options={"plan": plan_of_the_model()})
    with torch.no_grad(), refusal(PlanError, "called without gradients, and no plan given is for that"):
        compiled(*batch())
