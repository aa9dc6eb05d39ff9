"""Placements that differ from parameter to parameter: training is plain PyTorch's, plans and memories have each where
the rules say, and rules that aren't for the model are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from followed import followed_plans
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.adam import AdamStates
from zinf_fx.errors import ConfigError, PlanError
from zinf_fx.frontend.auto_placement import sizes_of
from zinf_fx.placement import Placement, PlacementRules, in_common
from zinf_fx.plan.memory.use import living_on
from zinf_fx.plan.sharding import Groups
from zinf_fx.quantisation import tables_of
from zinf_fx.sizes import blocks

STEPS, WIDTH = 3, 64


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Adapted(nn.Module):
    """Has a linear layer with a low-rank update beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(width: int = WIDTH) -> Net:
    torch.manual_seed(0)
    return Net(width)


def adapted(width: int = WIDTH) -> Net:
    model = trained(width)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    return model


def by_layer(name: str, parameter: torch.Tensor) -> str:
    return "nvme" if parameter.ndim < 2 else ("device", "host", "nvme")[int(name.split(".")[1])]


ADAPTERS: dict[str, Any] = {"parameters": [("*lora*", "device"), ("*", "nvme")]}
SPREAD: dict[str, Any] = {
    "parameters": [("layers.0.*", "device"), ("*.bias", "host"), ("layers.1.*", "host"), ("*", "nvme")],
    "gradients": [("*.lora_?.*", "host"), ("*.base.weight", "nvme"), ("*", "device")],
    "optimizer": [("layers.2.base.*", "device"), ("layers.1.*", "nvme"), ("*", "host")],
}
FUNCTIONS: dict[str, Any] = {"parameters": by_layer, "optimizer": by_layer, "gradients": "host"}
FROZEN: dict[str, Any] = {"frozen": "nvme"}

CASES: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "adapters on the device": (adapted, ADAPTERS),
    "adapters on the device, with states elsewhere": (adapted, {**ADAPTERS, "gradients": "host", "optimizer": "nvme"}),
    "frozen ones on nvme": (adapted, FROZEN),
    "spread": (trained, SPREAD),
    "by functions": (trained, FUNCTIONS),
}


def batch(width: int = WIDTH) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, width)


def train(call: Callable, model: Net, kind: type[torch.optim.Optimizer], **options: Any) -> list[float]:
    optimizer, losses = None, []
    for _ in range(STEPS):
        loss = call(batch(model.layers[0].base.in_features))
        loss.backward()
        if optimizer is None:  # in one line, parameters leave at the first call
            optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def offloaded(model: Net, placement: object, store: Path, **options: Any) -> tuple[Net, Callable]:
    model = zinf_fx.offload(model, placement=placement, store=store, **options)
    return model, torch.compile(model, backend="zinf")


def in_one_line(model: Net, placement: object, store: Path, **options: Any) -> tuple[Net, Callable]:
    return model, torch.compile(model, backend="zinf", options={"placement": placement, "store": str(store), **options})


# Both ways lead to the same rules: in the gate, each of the cases goes one of them.
ONE_LINE = ("adapters on the device", "spread")
WAYS = [(name, in_one_line if name in ONE_LINE else offloaded) for name in CASES]
OTHER_WAYS = [slow(name, offloaded if name in ONE_LINE else in_one_line) for name in CASES]


@pytest.mark.parametrize(("name", "how"), [*WAYS, *OTHER_WAYS])
def test_training_is_that_of_plain_pytorch(tmp_path: Path, name: str, how: Callable) -> None:
    build, placement = CASES[name]
    plain = build()
    losses = train(plain, plain, torch.optim.AdamW, fused=True)
    model, call = how(build(), placement, tmp_path)
    with followed_plans(model) as plans:
        assert train(call, model, zinf_fx.optim.AdamW) == losses
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs), name
    rules = zinf_fx.Config(placement=placement).placement
    expected = {name: rules.of(name, parameter) for name, parameter in model.named_parameters()}
    assert {name: parameter.base.config.placement for name, parameter in model.named_parameters()} == expected
    assert all(parameter.base.tier == expected[name].parameters for name, parameter in model.named_parameters())
    (plan,) = plans
    lives = {member.name: tile for tile in plan.tiles for member in tile.members or (tile,)}
    for name, parameter in model.named_parameters():
        own, tile = expected[name], lives[name]
        states = (own.gradients, own.optimizer) if parameter.requires_grad else (None, None)
        assert (tile.tier, tile.gradient_tier, tile.state_tier) == (own.parameters, *states), name
    check_bytes(plan, model, expected)


def check_bytes(plan: zinf_fx.Plan, model: Net, placements: dict[str, Placement]) -> None:
    """What the plan says that lives in each memory is the sum over the parameters."""
    for tier in ("device", "host", "nvme"):
        by_state = {"parameters": 0, "gradients": 0, "states": 0}
        for name, parameter in model.named_parameters():
            own = placements[name]
            by_state["parameters"] += blocks(parameter.nbytes) * (own.parameters == tier)
            if parameter.requires_grad:
                by_state["gradients"] += blocks(parameter.nbytes) * (own.gradients == tier)
                of_states = sum(blocks(parameter.numel() * nbytes) for nbytes in AdamStates(4).bytes_each)
                by_state["states"] += of_states * (own.optimizer == tier)
        use = living_on(tier, plan.tiles, plan.stage)
        assert {state: getattr(use, state) for state in by_state} == by_state, tier


@pytest.mark.parametrize("name", [slow("adapters on the device"), "spread", slow("by functions")])
def test_a_plan_of_it_is_saved_followed_and_shown(tmp_path: Path, name: str) -> None:
    """The plan names what the rules chose; a model is offloaded as it says, or as the rules say."""
    build, placement = CASES[name]
    with torch.device("meta"):
        model = Net()
    for parameter, like in zip(model.parameters(), build().parameters(), strict=True):
        parameter.requires_grad_(like.requires_grad)
    plan = zinf_fx.export_plan(model, (batch(),), placement=placement)
    plan.save(tmp_path / "plan.json")
    assert zinf_fx.load_plan(tmp_path / "plan.json") == plan
    model, call = in_one_line(build(), placement, tmp_path, plan=str(tmp_path / "plan.json"))
    losses = train(call, model, zinf_fx.optim.AdamW)
    torch._dynamo.reset()
    other = zinf_fx.offload(build(), plan.config, store=tmp_path)
    call = torch.compile(other, backend="zinf", options={"plan": plan})
    assert train(call, other, zinf_fx.optim.AdamW) == losses
    assert [parameter.base.config.placement for parameter in other.parameters()] == [
        parameter.base.config.placement for parameter in model.parameters()
    ]
    text = zinf_fx.explain(other, batch())
    counts = [line for line in text.splitlines() if " on nvme" in line or " on device" in line or " on host" in line]
    tiers = {(tile.tier, tile.gradient_tier, tile.state_tier) for tile in plan.tiles}
    assert len(counts) == len(tiers) + 1 and counts[-1].strip() == "activations on device", text


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            {"parameters": [("*lora*", "host"), ("*", "nvme")]},
            r"f32\[4, 64\] on host.*of the plan.*f32\[4, 64\] on device",
        ),
        ({**ADAPTERS, "optimizer": [("*.1.*", "nvme"), ("*", "device")]}, "states on nvme.*; that of the plan"),
    ],
)
def test_another_plan_than_the_rules_ask_for_is_refused(tmp_path: Path, others: dict[str, Any], says: str) -> None:
    plan = zinf_fx.export_plan(adapted(), (batch(),), placement=ADAPTERS)
    model, call = in_one_line(adapted(), others, tmp_path, plan=plan)
    with pytest.raises(PlanError, match=says):
        call(batch())
    assert not any(isinstance(parameter, zinf_fx.StoredTensor) for parameter in model.parameters())


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a pattern without a parameter": (
        {"parameters": [("*lorra*", "device"), ("*", "nvme")]},
        ["'*lorra*'", "parameters", "matches no parameter", "layers.0.base.weight"],
    ),
    "a parameter without a pattern": (
        {"optimizer": [("*lora*", "device")]},
        ["'layers.0.base.weight'", "optimizer", "'*lora*'", "('*', tier)"],
    ),
    "no tier of a function": (
        {"gradients": lambda name, parameter: "gpu"},
        ["'gpu'", "gradients", "layers.0.base.weight", "device, host, nvme"],
    ),
}


@pytest.mark.parametrize("how", [offloaded, in_one_line])
@pytest.mark.parametrize("name", REFUSED)
def test_rules_for_another_model_are_refused(tmp_path: Path, name: str, how: Callable) -> None:
    placement, parts = REFUSED[name]
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="placement") as refused:
        _, call = how(model, placement, tmp_path)
        call(batch())
    assert all(part in str(refused.value) for part in parts), str(refused.value)
    assert not any(isinstance(parameter, zinf_fx.StoredTensor) for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"parameters": []}, "a list of patterns with tiers"),
        ({"parameters": [("*", "cloud")]}, "'cloud' for '\\*'; accepted: 'device'"),
        ({"parameters": [("*", "nvme", "host")]}, "a list of patterns with tiers"),
        ({"parameters": [(1, "nvme")]}, "pattern 1, which is no text"),
        ({"activations": [("*", "nvme")]}, "placement of activations is"),
        ({"frozen": "nvme", "parameters": [("*", "nvme")]}, "say it in the rules"),
    ],
)
def test_what_is_no_rule_is_refused(placement: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        zinf_fx.Config(placement=placement)


def test_partitioned_construction_refuses_rules(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match=r"have no names yet: give a tier for all, or .* offload\(\)")
    with refused, zinf_fx.offloading(store=tmp_path, placement=ADAPTERS):
        raise AssertionError("the block was entered")


def test_what_is_stored_keeps_its_place(tmp_path: Path) -> None:
    """Other rules are refused, and the same ones, or others that choose the same, are not."""
    model, _ = offloaded(adapted(), ADAPTERS, tmp_path)
    same = {"parameters": [("*.base.*", "nvme"), ("*", "device")]}
    zinf_fx.offload(model, placement=same, store=tmp_path)
    other = {"parameters": [("*lora*", "host"), ("*", "nvme")]}
    with pytest.raises(ConfigError, match=r"'layers\.0\.lora_a\.weight' was offloaded with"):
        zinf_fx.offload(model, placement=other, store=tmp_path)
    with pytest.raises(ConfigError, match=r"'layers\.0\.lora_a\.weight' was offloaded with"):
        zinf_fx.explain(model, batch(), placement=other)
    in_one_line(model, same, tmp_path)[1](batch())
    with pytest.raises(Exception, match="give it once, where the model is offloaded"):
        torch.compile(model, backend="zinf", options={"placement": other})(batch())


def test_adapters_beside_a_base_that_is_stored_already(tmp_path: Path) -> None:
    """It was stored by other options for gradients and states, of which a frozen parameter has none."""
    plain = adapted()
    losses = train(plain, plain, torch.optim.AdamW, fused=True)
    model = adapted()
    for layer in model.layers:
        zinf_fx.offload(layer.base, store=tmp_path, placement="nvme")
    model, call = offloaded(model, ADAPTERS, tmp_path)
    assert train(call, model, zinf_fx.optim.AdamW) == losses
    assert {name: parameter.base.tier for name, parameter in model.named_parameters()} == {
        name: "device" if "lora" in name else "nvme" for name, _ in model.named_parameters()
    }


def test_what_no_graph_uses_has_its_place_too(tmp_path: Path) -> None:
    model = adapted()
    model.unused_lora, model.unused = nn.Linear(4, 4), nn.Linear(4, 4)
    _, call = in_one_line(model, ADAPTERS, tmp_path)
    call(batch())
    tiers = {name: parameter.base.tier for name, parameter in model.named_parameters()}
    assert tiers["unused_lora.weight"] == "device" and tiers["unused.weight"] == "nvme"


@pytest.mark.parametrize("how", [slow(offloaded), in_one_line])
def test_auto_leaves_what_trains_on_the_device_beside_a_frozen_base(
    tmp_path: Path, how: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """The frozen base takes more than the device's budget, and what trains a part of that."""
    plain = adapted(256)
    losses = train(plain, plain, torch.optim.AdamW, fused=True)
    with caplog.at_level("INFO", "zinf_fx"):
        model, call = how(adapted(256), "auto", tmp_path, device_memory="512KiB")
        with followed_plans(model) as plans:
            assert train(call, model, zinf_fx.optim.AdamW) == losses
    own = {name: parameter.base.config.placement for name, parameter in model.named_parameters()}
    assert all(placement == Placement("device" if "lora" in name else "nvme") for name, placement in own.items())
    (line,) = [message for message in caplog.messages if message.startswith("placement auto")]
    assert "frozen parameters (771.0 KiB) on nvme, trained ones (24.0 KiB) on device, gradients (24.0 KiB) on" in line
    check_bytes(plans[0], model, own)


@pytest.mark.parametrize("how", [slow(offloaded), in_one_line])
@pytest.mark.parametrize(("frozen_dtype", "place"), [(None, "nvme"), ("nf4", "device")])
def test_auto_counts_a_frozen_base_as_it_is_stored(tmp_path: Path, how: Callable, frozen_dtype: str | None, place: str):
    """In fp32 it is over the device's budget, and in 4 bits it is not."""
    model, call = how(adapted(256), "auto", tmp_path, device_memory="512KiB", frozen_dtype=frozen_dtype)
    call(batch(256))
    bases = [layer.base.weight for layer in model.layers]
    assert {base.base.tier if isinstance(base, zinf_fx.StoredTensor) else "device" for base in bases} == {place}


def test_auto_counts_a_table_in_full() -> None:
    """A table of embeddings is stored as it is, and other matrices of its size are not."""
    counted = []
    for module in (nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)):
        tables = tables_of([module])
        sizes = sizes_of([module.weight.requires_grad_(False)], zinf_fx.Config(frozen_dtype="int8"), Groups(), tables)
        counted.append(sizes.parameters)
    assert counted == [64 * 64 * 4, 64 * (64 + 4)]


def test_what_is_in_common() -> None:
    """Names are patterns that match nothing else."""
    a, b = Placement("device", "host", "nvme"), Placement("nvme", "host", "device")
    assert in_common({"x": a, "y": a}) == a
    rules = in_common({"x": a, "L['x'][0]": b, "z": a})
    assert rules == PlacementRules(
        (("L[[]'x'][[]0]", "nvme"), ("*", "device")), "host", (("L[[]'x'][[]0]", "device"), ("*", "nvme"))
    )
    nothing = torch.empty(0)
    assert [rules.of(name, nothing) for name in ("x", "L['x'][0]", "z")] == [a, b, a]
