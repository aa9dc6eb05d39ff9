"""Names in files, placements and plans: those of the user's model, whatever is put around parts of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from gate import named
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zinf_fx
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.checkpoint.models import plain_names
from zinf_fx.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).sin()


class Net(nn.Module):
    """Blocks, and a head that is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="zinf")


def _wrap(*paths: str, wrap: Callable[[nn.Module], nn.Module] = compiled) -> Callable[[nn.Module], None]:
    def wrapped(net: nn.Module) -> None:
        for path in paths:
            net.set_submodule(path, wrap(net.get_submodule(path)))

    return wrapped


WRAPPED: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda net: None,
    "blocks": _wrap("blocks.0", "blocks.1"),
    "one block": _wrap("blocks.1"),
    "leaves": _wrap("blocks.0.linear", "head"),
    "one in the other": _wrap("blocks.0.linear", "blocks.0"),
    "for checkpointing": _wrap("blocks.0", wrap=checkpoint_wrapper),
    "compiled and for checkpointing": lambda net: (
        _wrap("blocks.0.linear")(net),
        _wrap("blocks.0", wrap=checkpoint_wrapper)(net),
        _wrap("blocks.0")(net),
    ),
    "replicas": _wrap("blocks.1", wrap=nn.DataParallel),
}


def net(how: str = "nothing", seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    for block in model.blocks:
        nn.init.normal_(block.norm.running_mean)
    WRAPPED[how](model)
    return model


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Net]:
    (tmp_path / "store").mkdir()

    def make(how: str = "nothing", seed: int = 0, **fields: object) -> Net:
        fields = {"placement": "nvme", **fields}
        return zinf_fx.offload(net(how, seed), store=tmp_path / "store", **fields)

    return make


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return the values of all parameters and buffers, in order."""
    tensors = (*model.parameters(), *model.buffers())
    return [tensor.full_tensor() if isinstance(tensor, zinf_fx.StoredTensor) else tensor for tensor in tensors]


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, values(model), values(other)))


@pytest.mark.parametrize("how", WRAPPED)
def test_plain_names_are_those_without_wrappers(how: str):
    plain, model = net(), net(how)
    assert list(plain_names(model, model.state_dict()).values()) == list(plain.state_dict())
    assert list(plain_names(model, (n for n, _ in model.named_parameters())).values()) == [
        name for name, _ in plain.named_parameters()
    ]


def test_what_only_looks_like_a_wrapper_keeps_its_name():
    model = nn.ModuleDict({"my_orig_mod": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
    assert all(name == own for name, own in plain_names(model, model.state_dict()).items())
    model["wrapper"] = nn.Module()
    model["wrapper"]._orig_mod = nn.Linear(2, 2, bias=False)
    model["wrapper"].weight = nn.Parameter(torch.ones(2))  # besides the one inside
    assert all(name == own for name, own in plain_names(model, model.state_dict()).items())


@pytest.mark.parametrize("how", WRAPPED)
def test_exports_have_plain_names_and_load_into_any(tmp_path: Path, stored: Callable, how: str):
    zinf_fx.export_safetensors(stored(how, seed=1), tmp_path / "out")
    exported = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {*exported, "head.weight"} == {*net().state_dict()}
    for other in ("nothing", how, "one block"):
        model = stored(other)
        zinf_fx.load_safetensors(model, tmp_path / "out")
        assert_equal(model, net(seed=1))


@pytest.mark.parametrize("how", WRAPPED)
def test_files_with_names_of_wrappers_are_loaded(tmp_path: Path, stored: Callable, how: str):
    """Files that `torch.save` and others write, of this model or of one compiled in other parts, are read."""
    state = {name: value.clone() for name, value in net(how, seed=1).state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for other in (how, "nothing", "leaves") if how != "replicas" else (how,):
        model = stored(other)
        zinf_fx.load_safetensors(model, tmp_path)
        assert_equal(model, net(seed=1))
    base = net(how).to("meta")
    base.head.weight = base.table.weight
    zinf_fx.attach_base(base, tmp_path, store=tmp_path / "store")
    assert_equal(base, net(seed=1))


def test_one_tensor_under_both_names_is_refused(tmp_path: Path, stored: Callable):
    state = {name: value.clone() for name, value in net(seed=1).state_dict().items()}
    state["blocks.0._orig_mod.linear.weight"] = torch.zeros(8, 8)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    for how in ("nothing", "blocks"):
        with pytest.raises(CheckpointError, match=r"the model has no 'blocks\.0\._orig_mod\.linear"):
            zinf_fx.load_safetensors(stored(how), tmp_path)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6)).sin().sum().backward()
        optimizer.step()
    model(torch.arange(6)).sin().sum().backward()


@pytest.mark.parametrize(
    "how",
    named(
        [how for how in WRAPPED if how != "replicas"], {"leaves", "one in the other", "compiled and for checkpointing"}
    ),
)
def test_checkpoints_go_from_any_to_any(tmp_path: Path, stored: Callable, how: str):
    """States of the optimizer and gradients go with them."""

    def made(how: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = stored(how, seed)
        return model, zinf_fx.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = made(how, 1)
    trained(model, optimizer)
    zinf_fx.save_checkpoint(tmp_path / "saved", model, optimizer)
    names = {name.removeprefix("model/") for name in manifest_of(tmp_path / "saved").by_name() if name[:6] == "model/"}
    assert names == {*net().state_dict()}
    for other in ("nothing", "one block"):
        again, its_optimizer = made(other)
        zinf_fx.load_checkpoint(tmp_path / "saved", again, its_optimizer)
        assert_equal(again, model)
        optimizer.step(), its_optimizer.step()
        assert_equal(again, model)
        zinf_fx.load_checkpoint(tmp_path / "saved", model, optimizer)
    base = net("blocks").to("meta")
    base.head.weight = base.table.weight
    zinf_fx.attach_base(base, tmp_path / "saved", store=tmp_path / "store")
    assert_equal(base, model)


RULES = [("blocks.0.*", "host"), ("table.weight", "device"), ("*", "nvme")]


@pytest.mark.parametrize("how", WRAPPED)
def test_patterns_of_placements_are_of_plain_names(stored: Callable, how: str):
    model = stored(how, placement={"parameters": RULES})
    tiers = {
        name: parameter.stored.tier
        for name, parameter in zip(
            plain_names(model, dict(model.named_parameters())).values(), model.parameters(), strict=True
        )
    }
    assert {tier for name, tier in tiers.items() if name.startswith("blocks.0.")} == {"host"}
    assert {tier for name, tier in tiers.items() if name.startswith("blocks.1.")} == {"nvme"}
    assert tiers["table.weight"] == "device"


@pytest.mark.parametrize("how", ["blocks", "for checkpointing"])
def test_patterns_hold_for_what_is_compiled_in_one_line(tmp_path: Path, how: str):
    model = net(how)
    options = {"placement": {"parameters": RULES}, "store": tmp_path}
    torch.compile(model, backend="zinf", options=options)(torch.arange(6)).sum().backward()
    assert {parameter.stored.tier for parameter in model.blocks[0].parameters()} == {"host"}
    assert {parameter.stored.tier for parameter in model.blocks[1].parameters()} == {"nvme"}


@pytest.mark.parametrize("how", ["nothing", "blocks", "for checkpointing"])
def test_plans_name_parameters_without_wrappers(how: str):
    plan = zinf_fx.export_plan(net(how), [torch.arange(6)], placement={"parameters": RULES}, pack=None)
    names = {tile.name for tile in plan.tiles}
    assert not [name for name in names if "_mod" in name or "_wrapped" in name]
    assert "blocks.0.linear.weight" in names
