"""Plans of models that don't run: which models, and that planning leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from forked import run
from gate import slow
from torch import nn
from torch._dynamo.testing import CompileCounter

import zinf_fx
from zinf_fx.errors import ConfigError, PlanError, StoredTensorError
from zinf_fx.frontend import capture
from zinf_fx.frontend.explain import CAN_ISOLATE, plan_model
from zinf_fx.plan import hardware, packs
from zinf_fx.plan.plan import Plan

# After a graph break, frames are those of the model's class. Without isolation, as up to torch 2.11, what planning
# compiles of them counts towards Dynamo's recompile limit.
BROKEN = [False, pytest.param(True, marks=pytest.mark.skipif(not CAN_ISOLATE, reason="no isolate_recompiles"))]


class Model(nn.Module):
    """Has tied weights, a buffer, a norm; with `broken`, a graph break between two layers."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.tokens = nn.Embedding(50, 32)
        self.norm = nn.BatchNorm1d(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.ones(32))
        self.offset = torch.zeros(32)

    def forward(self, tokens: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.norm(self.tokens(tokens).flatten(0, 1)) * self.scale * times + self.offset
        x = self.up(x).relu()
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(self.down(x)).logsumexp(-1).mean()


def tokens(device: str = "cpu", batch: int = 4) -> torch.Tensor:
    return torch.zeros(batch, 8, dtype=torch.int64, device=device)


def schedules(plans: list[Plan]) -> list[tuple]:
    return [plan.graphs for plan in plans]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def test_a_plan_for_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch):
    """It is what a device with memory of its own would have, by the option or by the hardware."""
    options = {"placement": "infinity-nvme", "device_memory": "1MiB"}
    here, there = (plan_model(on_meta(), (tokens(),), device=device, **options) for device in ("cpu", "cuda"))
    assert not here.plans[0].has_own_memory and there.plans[0].has_own_memory
    assert schedules(plan_model(on_meta(), (tokens(),), **options).plans) == schedules(here.plans)
    gpu = hardware.load("rtx-4090")
    for given in ({"hardware": gpu}, {"hardware": gpu, "device": "cuda"}):
        assert schedules(plan_model(on_meta(), (tokens(),), **given, **options).plans) == schedules(there.plans)
    monkeypatch.setattr(packs, "IN_HOST_MEMORY", frozenset())  # as on such a device
    assert plan_model(on_meta(), (tokens(),), **options).plans == there.plans
    assert schedules(plan_model(on_meta(), (tokens(),), device="cpu", **options).plans) == schedules(here.plans)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"device": "tpu"}, "device='tpu' is not accepted"),
        ({"device": "cpu", "hardware": hardware.load("rtx-4090")}, "contradicts hardware 'RTX 4090 desktop'"),
        ({"device": "cuda", "placement": "auto"}, "lacks the machine that this decides for"),
    ],
    ids=["unknown", "contradicts", "decides"],
)
def test_a_device_that_can_not_be_planned_for(given: dict[str, object], error: str):
    with pytest.raises(ConfigError, match=error):
        plan_model(on_meta(), (tokens(),), **{"placement": "nvme", **given})


def test_a_plan_for_another_device_is_refused_as_such(tmp_path: Path):
    plan = zinf_fx.export_plan(Model(), (tokens(),), placement="nvme", device="cuda")
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    with pytest.raises(PlanError, match="for a device whose memory is its own"):
        torch.compile(model, backend="zinf", options={"plan": plan})(tokens())


def executed(compiled: Callable, *inputs: object) -> list[Plan]:
    """Return the plans that the backend itself makes when the model runs."""
    made: list[capture.Capture] = []
    original = capture.Capture.__init__

    def note(self: capture.Capture, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)
        made.append(self)

    with mock.patch.object(capture.Capture, "__init__", note):
        compiled(*inputs).backward()
    return [captured.plan for captured in made]


@pytest.mark.parametrize("broken", [slow(False), True])
def test_the_plan_is_the_one_that_runs(tmp_path: Path, broken: bool):
    model = zinf_fx.offload(Model(broken), store=tmp_path, placement="infinity-nvme", prefetch=(1, 1, 2))
    compiled = torch.compile(model, backend="zinf")
    before = plan_model(compiled, (tokens(),)).plans
    ran = executed(compiled, tokens())
    assert schedules(before) == schedules(ran) == schedules(plan_model(model, (tokens(),)).plans)
    assert len(before) == (2 if broken else 1)
    assert all(plan.config.prefetch == (1, 1, 2) for plan in before)


def test_ordinary_offloaded_and_meta_models_have_one_plan(tmp_path: Path):
    with torch.device("meta"):
        meta, inputs = Model(), tokens("meta")
    plain = Model()
    of_meta = schedules(plan_model(meta, (inputs,), placement="nvme").plans)
    assert of_meta == schedules(plan_model(plain, (tokens(),), placement="nvme").plans)
    assert of_meta == schedules(plan_model(torch.compile(plain), (tokens(),), placement="nvme").plans)
    stored = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    assert of_meta == schedules(plan_model(stored, (tokens(),)).plans)
    names = [member.name for tile in of_meta[0][0].tiles for member in tile.members]
    assert "tokens.weight" in names and "head.weight" not in names  # tied: one parameter
    assert all(p.is_meta for p in meta.parameters())


def test_no_grad_means_inference_and_a_mapping_means_keywords():
    model = Model()
    with torch.no_grad():
        (plan,) = plan_model(model, {"tokens": tokens(), "times": 2}, placement="host").plans
    assert [graph.kind for graph in plan.graphs] == ["inference"]
    (plan,) = plan_model(model, [tokens()], placement="host").plans
    assert [graph.kind for graph in plan.graphs] == ["forward", "backward"]
    with torch.no_grad():
        text = zinf_fx.explain(model, tokens(), placement="host", prefetch=None)
    assert "INFERENCE" in text and "prefetch   none" in text


def test_the_model_is_left_as_it_was():
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    random = torch.get_rng_state()
    zinf_fx.explain(model, tokens(), placement="nvme")
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None and not p._backward_hooks for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("broken", [slow(False), BROKEN[True]])
def test_compiled_code_stays_and_what_follows_is_compiled_as_ever(broken: bool):
    model, counter = Model(broken), CompileCounter()
    compiled = torch.compile(model, backend=counter)
    compiled(tokens())
    graphs = counter.frame_count
    with torch._dynamo.config.patch(recompile_limit=2):
        for placement in ("host", "nvme", "infinity-nvme"):  # more often than Dynamo compiles one function
            assert len(plan_model(compiled, (tokens(batch=3),), placement=placement).plans) == graphs
    compiled(tokens())
    assert counter.frame_count == graphs
    fresh = CompileCounter()
    torch.compile(Model(broken), backend=fresh, dynamic=False)(tokens(batch=5))
    assert fresh.frame_count == graphs


@pytest.mark.parametrize("broken", BROKEN)
def test_auto_says_what_it_decided(caplog: pytest.LogCaptureFixture, broken: bool):
    text = zinf_fx.explain(Model(broken), tokens())
    assert text.startswith("placement auto, for this machine, at nominal rates: everything fits on the device")
    assert "would run as ordinary PyTorch" in text
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        text = zinf_fx.explain(Model(broken), tokens(), host_memory="100KiB")
    first, *_, taken = text.split("\n\n")[0].splitlines() + [
        line for line in text.splitlines() if line.startswith("taken")
    ]
    assert "ordinary PyTorch" not in text and "simulated" in first
    tiers = taken.replace(", rule", "").split()[1:5]
    assert len(set(tiers)) == 2 and set(tiers) == {"device", "nvme"}
    states = zip(("parameters", "gradients", "optimizer", "activations"), tiers, strict=True)
    assert f"placement  {', '.join(f'{state} on {tier}' for state, tier in states)}" in text
    (line,) = [record.message for record in caplog.records if record.name == "zinf_fx"]
    assert line.startswith("placement auto: parameters (22.9 KiB) on ") and line.endswith(first.split(": ", 1)[1][:-1])


def test_a_model_without_parameters_moves_nothing():
    assert "nothing is moved" in zinf_fx.explain(nn.ReLU(), torch.zeros(3))


def test_options_apply_and_contradictions_are_refused(tmp_path: Path):
    model = zinf_fx.offload(Model(), store=tmp_path, placement="nvme")
    (plan,) = plan_model(model, (tokens(),), prefetch=(0, 0, 1)).plans
    assert plan.config.prefetch == (0, 0, 1) and plan.config.placement.parameters == "nvme"
    with pytest.raises(ConfigError, match="was offloaded with"):
        plan_model(model, (tokens(),), placement="host")
    for options in ({"store": "/nonexistent"}, {"reduce_dtype": torch.bfloat16}, {"gradient_reduction": "sum"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* was asked for, but parameter"):
            plan_model(model, (tokens(),), **options)
    (plan,) = plan_model(model, (tokens(),), zinf_fx.Config(prefetch=None)).plans
    assert plan.config.prefetch is None and plan.config.store == tmp_path
    with pytest.raises(ConfigError, match="unknown option 'prefetsch'"):
        plan_model(model, (tokens(),), prefetsch=1)
    with pytest.raises(PlanError, match="raise device_memory"):
        plan_model(model, (tokens(),), device_memory="1KiB", tile=None)


class Held(nn.Module):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.stream = (i for i in range(3))


class Skips(nn.Module):
    """Uses a value where Dynamo doesn't look."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    @torch._dynamo.disable
    def norm(self) -> float:
        return float(self.up.weight.norm())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() * self.norm()


def test_models_that_cannot_be_planned_say_why():
    with pytest.raises(PlanError, match=r"copy\.deepcopy"):
        plan_model(Held(), (torch.zeros(2, 4),))
    with pytest.raises(PlanError, match="without values"):
        plan_model(Skips(), (torch.zeros(2, 4),), placement="nvme")
    with pytest.raises(StoredTensorError, match=r"'0\.weight' is"):
        plan_model(nn.Sequential(nn.LazyLinear(3)), (torch.zeros(2, 4),), placement="nvme")
    sparse = Model()
    sparse.up.weight = nn.Parameter(torch.zeros(64, 32).to_sparse())
    with pytest.raises(StoredTensorError, match=r"'up\.weight' has layout"):
        plan_model(sparse, (tokens(),))
    with pytest.raises(TypeError):  # the model's own errors pass
        plan_model(Model(), (tokens(), tokens(), tokens()))


def test_a_large_model_is_planned_in_little_memory():
    program = """
import resource, sys, torch, zinf_fx
from torch import nn
from zinf_fx.frontend.explain import CAN_ISOLATE, plan_model
class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
    def forward(self, x):
        return x + self.down(self.up(x).relu())
torch._dynamo.config  # imported before the first measurement
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.device("meta"):
    model, x = nn.Sequential(*(Layer(8192) for _ in range(8))), torch.zeros(4, 8192)
plan_model(nn.Sequential(model, nn.Flatten(0)), (x,), placement="nvme")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sum(p.nbytes for p in model.parameters()) // 1024)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 16e6 and grown < 400e3, f"{grown} KiB for planning a model of {size} KiB"
