"""States that are shown before the first step, and loaded into by torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CLASSES = {
    "AdamW": {"amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.5},
    "NAdam": {},
    "ASGD": {"t0": 1.0},
    "Rprop": {},
}


def model(store: Path, seed: int, dtype: torch.dtype = torch.float32, placement: str = "nvme") -> nn.Sequential:
    """Return two stored layers, and one of ordinary parameters between them."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(96, 200), nn.Linear(200, 160), nn.Linear(160, 96, bias=False)).to(dtype)
    store.mkdir(exist_ok=True)
    for layer in (made[0], made[2]):
        zinf_fx.offload(layer, store=store, placement=placement)
    return made


def train(made: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(3, 96, generator=torch.Generator().manual_seed(step))
        made(batch.to(next(made.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(made: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    tensors = {}
    for name, parameter in made.named_parameters():
        for key, value in {"": parameter, **optimizer.state[parameter]}.items():
            tensors[f"{name}.{key}"] = value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value
    return tensors


def named(made: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return dict(zip(("model", "optimizer"), get_state_dict(made, optimizer), strict=True))


def load(made: nn.Module, optimizer: torch.optim.Optimizer, states: dict[str, object], folder: Path) -> None:
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    set_state_dict(made, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


@pytest.mark.parametrize(
    ("kind", "dtype", "placement"),
    [
        *((kind, torch.float32, "nvme") for kind in CLASSES),
        ("AdamW", torch.bfloat16, "nvme"),
        ("AdamW", torch.bfloat16, "host"),
    ],
)
def test_training_goes_on_bitwise(tmp_path: Path, kind: str, dtype: torch.dtype, placement: str):
    saved, of_class = model(tmp_path / "first", 1, dtype, placement), getattr(optim, kind)
    optimizer = of_class(saved.parameters(), **CLASSES[kind])
    train(saved, optimizer, range(3))
    dcp.save(named(saved, optimizer), checkpoint_id=tmp_path / "saved", no_dist=True)
    train(saved, optimizer, range(3, 6))
    loaded = model(tmp_path / "second", 2, dtype, placement)
    resumed = of_class(loaded.parameters(), **{**CLASSES[kind], "lr": 1e-7})
    optim.reserve_states(resumed)
    load(loaded, resumed, named(loaded, resumed), tmp_path / "saved")
    train(loaded, resumed, range(3, 6))
    expected = values(saved, optimizer)
    for name, value in values(loaded, resumed).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name


def test_a_class_that_updates_whole_parameters(tmp_path: Path):
    """Its states have shapes of their own."""
    saved = model(tmp_path / "first", 1)
    optimizer = optim.Adafactor(saved.parameters())
    train(saved, optimizer, range(2))
    dcp.save(named(saved, optimizer), checkpoint_id=tmp_path / "saved", no_dist=True)
    loaded = model(tmp_path / "second", 2)
    resumed = optim.Adafactor(loaded.parameters())
    optim.reserve_states(resumed)
    load(loaded, resumed, named(loaded, resumed), tmp_path / "saved")
    for job in ((saved, optimizer), (loaded, resumed)):
        train(*job, range(2, 4))
    expected = values(saved, optimizer)
    for name, value in values(loaded, resumed).items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[name])), name


def test_no_bytes_are_moved(tmp_path: Path):
    made = model(tmp_path / "store", 1, torch.bfloat16)
    optimizer = optim.AdamW(made.parameters())
    store = made[0].weight.stored.tiers.store
    before = store.counters()
    optim.reserve_states(optimizer)
    states = named(made, optimizer)
    assert store.counters() == before
    assert all(parameter.grad is None for parameter in made.parameters())
    state = states["optimizer"]["state"]["0.weight"]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert isinstance(state["master"], zinf_fx.StoredTensor) and state["master"].dtype == torch.float32
    assert type(states["optimizer"]["state"]["1.weight"]["exp_avg"]) is torch.Tensor


def test_states_without_values_are_refused(tmp_path: Path):
    made = model(tmp_path / "store", 1)
    optimizer = optim.AdamW(made.parameters())
    optim.reserve_states(optimizer)
    states = named(made, optimizer)
    for refused in (optimizer.step, lambda: zinf_fx.save_checkpoint(tmp_path / "saved", made, optimizer)):
        with pytest.raises(OptimizerError, match="were reserved, and have no values yet: load them"):
            refused()
    with pytest.raises(OptimizerError, match=r"'exp_avg' of a parameter of shape \(200, 96\) has no values"):
        set_state_dict(made, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    with pytest.raises(OptimizerError, match="have no values yet"):
        optim.reserve_states(optimizer)


def test_a_checkpoint_of_zinf_is_loaded_into_them(tmp_path: Path):
    saved = model(tmp_path / "first", 1)
    optimizer = optim.AdamW(saved.parameters())
    train(saved, optimizer, range(2))
    zinf_fx.save_checkpoint(tmp_path / "saved", saved, optimizer)
    loaded = model(tmp_path / "second", 2)
    resumed = optim.AdamW(loaded.parameters())
    optim.reserve_states(resumed)
    zinf_fx.load_checkpoint(tmp_path / "saved", loaded, resumed)
    train(loaded, resumed, range(2, 3))
    train(saved, optimizer, range(2, 3))
    expected = values(saved, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in values(loaded, resumed).items())


def test_states_that_are_there_stay(tmp_path: Path):
    made = model(tmp_path / "store", 1)
    optimizer = optim.AdamW(made.parameters())
    train(made, optimizer, range(1))
    before = values(made, optimizer)
    optim.reserve_states(optimizer)
    after = values(made, optimizer)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after)
    train(made, optimizer, range(1, 2))


def test_other_optimizers_are_refused(tmp_path: Path):
    with pytest.raises(OptimizerError, match=r"a torch\.optim\.\S+ was refused"):
        optim.reserve_states(torch.optim.AdamW(model(tmp_path / "store", 1).parameters()))
