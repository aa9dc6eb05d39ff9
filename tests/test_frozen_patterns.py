"""`frozen_dtype` with patterns of names: what is left out is stored as it is, and can be trained."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from test_frozen_formats import WIDTH, Model, base_of, built, in_memory, trained
from torch import nn

import zinf_fx
from zinf_fx import StoredTensor
from zinf_fx.config import Config
from zinf_fx.errors import CheckpointError, ConfigError, StoredTensorError
from zinf_fx.frontend.auto_placement import sizes_of
from zinf_fx.frontend.parameters import kept_in_their_format
from zinf_fx.plan.files.file import load_plan
from zinf_fx.plan.sharding import Groups
from zinf_fx.plan.show.table import render

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

WITHOUT_HEAD = [("head.*", None), ("*", "nf4")]
PATTERNS = {
    "without the head": (WITHOUT_HEAD, lambda name: None if name.startswith("head") else "nf4"),
    "two formats": (
        [("layers.1.*", "int8"), ("head.*", None), ("*", "nf4")],
        lambda name: {"l": "int8" if ".1." in name else "nf4", "h": None}[name[0]],
    ),
    "one alone": ([("layers.2.base.weight", "fp8"), ("*", None)], lambda name: "fp8" if ".2." in name else None),
    "all": ([["*", "int8"]], lambda name: "int8"),
    "none": ([("*", None)], lambda name: None),
}


def formats(model: nn.Module) -> dict[str, str | None]:
    """Return the formats of frozen matrices that are no tables."""
    return {name: parameter.quantised and parameter.quantised.format for name, parameter in base_of(model).items()}


@pytest.mark.parametrize("how", PATTERNS)
def test_the_first_pattern_that_matches_decides(tmp_path: Path, how: str):
    patterns, expected = PATTERNS[how]
    plain, model = built(), zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype=patterns)
    assert formats(model) == {name: expected(name) for name in base_of(plain)}
    for name, value in plain.named_parameters():
        if name not in base_of(plain) or expected(name) is None:
            assert torch.equal(model.get_parameter(name).full_tensor(), value), name
    assert zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype=patterns) is model
    with pytest.raises(ConfigError, match=r"frozen_dtype=mxfp4 was asked for, but parameter 'table\.weight' was"):
        zinf_fx.offload(model, frozen_dtype=[("*", "mxfp4")])


@pytest.mark.parametrize("how", ["offloaded", slow("in one line"), slow("in one line, on the device")])
def test_training_is_that_over_the_same_values(tmp_path: Path, how: str):
    patterns = PATTERNS["two formats"][0]
    model = built()
    options = {"store": tmp_path, "placement": "device" if "device" in how else "nvme", "frozen_dtype": patterns}
    if how == "offloaded":
        zinf_fx.offload(model, **options)
        run = torch.compile(model, backend="zinf")
    else:
        run = torch.compile(model, backend="zinf", options=options)
        run(torch.randint(16, (4, 8)))
    assert formats(model) == {name: PATTERNS["two formats"][1](name) for name in formats(model)}
    plain = in_memory(built(), model)
    results = []
    for net, call in ((plain, torch.compile(plain, backend="aot_eager")), (model, run)):
        weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
        kind, options = (torch.optim, {"fused": True}) if net is plain else (zinf_fx.optim, {})
        results.append(trained(net, call, kind.AdamW(weights, lr=0.1, **options)))
    assert all(map(torch.equal, *results))


REFUSED = {
    "a pattern that matches nothing": (
        [("haed.*", None), ("*", "nf4")],
        "frozen_dtype has the pattern 'haed.*', which",
    ),
    "a name that none matches": ([("layers.*", "nf4")], r"says nothing of parameter 'table.weight'.*\('\*', format\)"),
    "a format that is none": ([("*", "nf3")], "frozen_dtype has 'nf3' for '\\*'; accepted: None, 'int8'"),
    "no pairs": (["head.*"], "or a list of patterns of names with formats, such as"),
    "an empty list": ([], "or a list of patterns of names with formats"),
    "no text": ([(3, "nf4")], "has the pattern 3, which is no text"),
    "a mapping": ({"*": "nf4"}, r"accepted: None, 'int8'.*, a list of patterns of names with these"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_patterns_that_are_not_for_the_model_are_refused(tmp_path: Path, how: str):
    patterns, message = REFUSED[how]
    model = built()
    with pytest.raises(ConfigError, match=message):
        zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype=patterns)
    with pytest.raises(Exception, match=message):
        options = {"store": tmp_path, "placement": "nvme", "frozen_dtype": patterns}
        torch.compile(model, backend="zinf", options=options)(torch.randint(16, (4, 8)))
    assert not any(isinstance(parameter, StoredTensor) for parameter in model.parameters())


def test_tied_names_may_stand_in_patterns(tmp_path: Path):
    """A list of patterns for many models names heads that are tied in this one."""
    model = nn.ModuleDict({"table": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)}).requires_grad_(False)
    model["head"].weight = model["table"].weight
    zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype=WITHOUT_HEAD)
    assert model["head"].weight is model["table"].weight and model["head"].weight.quantised is None


def test_a_head_that_is_left_out_can_be_trained(tmp_path: Path):
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype=WITHOUT_HEAD)
    model.head.requires_grad_(True)
    optimizer = zinf_fx.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    losses = trained(model, torch.compile(model, backend="zinf"), optimizer)
    assert losses[-1] < losses[0]
    with pytest.raises(StoredTensorError, match=r"or with patterns that leave this one out.*\('\*', 'nf4'\)"):
        model.layers[0].base.requires_grad_(True)


def test_what_takes_the_place_of_a_parameter_is_stored_in_its_form(tmp_path: Path):
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype=PATTERNS["two formats"][0])
    before = formats(model)
    torch.manual_seed(3)
    model.load_state_dict(Model().state_dict(), assign=True)
    assert formats(model) == before
    with torch.no_grad():
        assert torch.equal(model.head.weight.full_tensor(), Model().head.weight) is False
    copied = copy.deepcopy(model)
    assert formats(copied) == before


def test_a_checkpoint_and_a_base_have_the_forms(tmp_path: Path):
    model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype=WITHOUT_HEAD)
    zinf_fx.save_checkpoint(tmp_path / "saved", model)
    torch.manual_seed(5)
    other = zinf_fx.offload(Model(), store=tmp_path, placement="nvme", frozen_dtype=WITHOUT_HEAD)
    zinf_fx.load_checkpoint(tmp_path / "saved", other)
    in_full = zinf_fx.offload(Model(), store=tmp_path, placement="nvme", frozen_dtype="nf4")
    with pytest.raises(CheckpointError, match=r"'model/head.weight' (is quantised as nf4|has shape)"):
        zinf_fx.load_checkpoint(tmp_path / "saved", in_full)
    for patterns in (None, WITHOUT_HEAD):
        with torch.device("meta"):
            base = Model()
        zinf_fx.attach_base(base, tmp_path / "saved", store=tmp_path, frozen_dtype=patterns)
        assert [parameter.quantised for parameter in base.parameters()] == [
            parameter.quantised for parameter in model.parameters()
        ]
    for patterns in ("int8", [("layers.*", None), ("*", "nf4")]):
        with torch.device("meta"):
            base = Model()
        with pytest.raises(ConfigError, match="which is nf4, and frozen_dtype is"):
            zinf_fx.attach_base(base, tmp_path / "saved", store=tmp_path, frozen_dtype=patterns)
    both = model.parameters(), other.parameters()
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(*both, strict=True))


def test_a_plan_has_the_patterns(tmp_path: Path):
    tokens = torch.randint(16, (4, 8))
    plan = zinf_fx.export_plan(built(), [tokens], placement="nvme", frozen_dtype=WITHOUT_HEAD, pack=None)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").config.frozen_dtype == tuple(WITHOUT_HEAD)
    nbytes = {tile.name: tile.numel * tile.dtype.itemsize for tile in plan.tiles}
    assert nbytes["head.weight"] == 4 * 16 * WIDTH > nbytes["layers.0.base.weight"]
    assert "frozen matrices head.* as they are, * nf4" in render(plan)
    (tmp_path / "store").mkdir()
    options = {"plan": tmp_path / "plan.json", "store": tmp_path / "store"}
    model = built()
    torch.compile(model, backend="zinf", options=options)(tokens).backward()
    assert formats(model) == {name: PATTERNS["without the head"][1](name) for name in formats(model)}
    offloaded = zinf_fx.offload(built(), store=tmp_path / "store", placement="nvme", frozen_dtype=WITHOUT_HEAD)
    with followed_plans(offloaded):
        torch.compile(offloaded, backend="zinf")(tokens).backward()


def test_a_placement_counts_what_is_left_out_as_it_is():
    model = built()
    frozen = base_of(model)
    config = Config(frozen_dtype=WITHOUT_HEAD)
    kept = kept_in_their_format(config, frozen, ())
    alone = sizes_of([model.head.weight], Config(), Groups())
    others = sizes_of(
        [entry for name, entry in frozen.items() if name != "head.weight"], Config(frozen_dtype="nf4"), Groups()
    )
    assert sizes_of(list(frozen.values()), config, Groups(), kept).parameters == alone.parameters + others.parameters


def test_a_model_that_is_built_in_a_block_has_no_names_yet(tmp_path: Path):
    with (
        pytest.raises(ConfigError, match=r"a matrix of shape \(64, 64\) of a model that is being built has none yet"),
        zinf_fx.offloading(store=tmp_path, placement="nvme", frozen_dtype=WITHOUT_HEAD),
    ):
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
