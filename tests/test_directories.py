"""Paths are those that were meant when they were given, wherever the program goes later."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.environment import cache_directory
from zinf_fx.errors import ConfigError
from zinf_fx.runtime.disk.store import Store

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory with `job` and `else`, the first of which is the working directory."""
    before = os.getcwd()
    for name in ("job/store", "job/other", "else/store", "else/runs"):
        (tmp_path / name).mkdir(parents=True)
    os.chdir(tmp_path / "job")
    yield tmp_path
    os.chdir(before)


def go_elsewhere(places: Path) -> None:
    os.chdir(places / "else")


def in_store(model: nn.Module) -> list[Path]:
    return list({*(parameter.stored.tiers.store.directories for parameter in model.parameters())})


@pytest.mark.parametrize("given", ["store", Path("store"), ["store", "other"], ".", "../job/store", "~/store"])
def test_a_store_is_absolute_once_it_is_given(places: Path, given: object, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(places / "job"))
    config = Config(store=given)
    go_elsewhere(places)
    assert all(path.is_absolute() and path.is_dir() for path in config.stores)
    assert not any((places / "else") in path.parents for path in config.stores)
    assert Config.of(config, {"placement": "nvme"}).store == config.store
    if given == "store":
        assert Config(store=given).store == places / "else" / "store", "given anew"


@pytest.mark.parametrize("given", ["store", "store:other"])
def test_the_store_of_the_environment_is_meant_from_where_it_was_first_seen(
    places: Path, given: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ZINF_STORE", f"{given}/")  # which no other test has
    expected = tuple(places / "job" / name for name in given.split(":"))
    for _ in range(2):
        assert Config().stores == expected
        go_elsewhere(places)


def test_a_store_directory_is_found_after_the_program_went_elsewhere(places: Path):
    store = Store("store")
    extent = store.allocate(4096)
    go_elsewhere(places)
    assert store.directories == (places / "job" / "store",) and extent.nbytes == 4096
    store._close()
    assert not list((places / "job" / "store").iterdir())


PROGRAM = """
import os, sys
import torch, zinf_fx
if sys.argv[1] == "before":
    os.chdir(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
options = {} if os.environ.get("ZINF_STORE") else {"store": sys.argv[3].split(",")}
zinf_fx.offload(model, placement="nvme", **options)
if sys.argv[1] == "after":
    os.chdir(sys.argv[2])
optimizer = zinf_fx.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
print(*model[0].weight.stored.tiers.store.directories)
"""


@pytest.mark.parametrize(
    ("when", "how"),
    [("after", "option"), slow("after", "two"), slow("after", "environment"), slow("before", "environment")],
)
def test_nothing_stays_in_the_store_of_a_program_that_went_elsewhere(places: Path, when: str, how: str):
    stores = "store,other" if how == "two" else "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"ZINF_STORE": stores} if how == "environment" else {})}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, when, str(places / "else"), stores],
        env={name: value for name, value in environment.items() if name != "ZINF_STORE" or how == "environment"},
        cwd=places / "job",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout.split() == [str(places / "job" / name) for name in stores.split(",")], ended.stderr
    for path in ("job/store", "job/other", "else/store"):
        assert not list((places / path).iterdir()), path


def made(places: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = zinf_fx.offload(nn.Linear(64, 64), store=places / "job" / "store", placement="nvme")
    return model, zinf_fx.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_block", [True, False])
def test_a_manager_saves_and_resumes_where_it_was_made(places: Path, in_block: bool):
    model, optimizer = made(places)
    checkpoints = zinf_fx.CheckpointManager("runs", model, optimizer, every_steps=1, keep=2)
    if in_block:
        checkpoints.__enter__()
    for number in range(4):
        step(model, optimizer)
        checkpoints.after_step(number + 1)
        if number == 1:
            go_elsewhere(places)
    assert checkpoints.save(4, name="last") == places / "job" / "runs" / "last"
    if in_block:
        checkpoints.__exit__(None, None, None)
    assert sorted(path.name for path in (places / "job" / "runs").iterdir()) == [
        "last",
        "step-00000003",
        "step-00000004",
    ]
    assert not list((places / "else" / "runs").iterdir())
    assert checkpoints.resume() == 4


def test_a_base_is_read_where_it_was_attached(places: Path):
    model, _ = made(places)
    zinf_fx.save_checkpoint("base", model)
    zinf_fx.export_safetensors(model, "weights")
    for directory in ("base", "weights"):
        base = zinf_fx.attach_base(nn.Linear(64, 64), directory, store="store")
        go_elsewhere(places)
        assert torch.equal(base.weight.full_tensor(), model.weight.full_tensor())
        assert torch.compile(base, backend="zinf")(torch.ones(2, 64)).shape == (2, 64)
        os.chdir(places / "job")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def compiled_parts(model: nn.Module, options: dict) -> nn.Module:
    return nn.Sequential(*(torch.compile(layer, backend="zinf", options=options) for layer in model))


@pytest.mark.parametrize("how", ["model", "parts"])
def test_options_of_a_compiled_model_are_meant_from_where_it_was_compiled(places: Path, how: str):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    options = {"store": "store", "placement": "nvme"}
    run = torch.compile(model, backend="zinf", options=options) if how == "model" else compiled_parts(model, options)
    go_elsewhere(places)
    run(torch.ones(2, 64)).sum().backward()
    os.chdir(places)
    run(torch.ones(3, 64)).sum().backward()  # compiled anew
    assert in_store(model) == [(places / "job" / "store",)]
    assert options == {"store": "store", "placement": "nvme"}


@pytest.mark.parametrize("how", ["module.compile", "function"])
def test_options_of_what_is_compiled_in_place_are_meant_from_where_it_is_called_first(places: Path, how: str):
    model = run = Net()
    options = {"store": "store", "placement": "nvme"}
    if how == "function":
        run = torch.compile(lambda x: model(x), backend="zinf", options=options)
    else:
        model.compile(backend="zinf", options=options)
    run(torch.ones(2, 64)).sum().backward()
    go_elsewhere(places)
    run(torch.ones(3, 64)).sum().backward()
    run(torch.ones(4, 64)).sum().backward()
    assert in_store(model) == [(places / "job" / "store",)]


@pytest.mark.parametrize("how", [slow("model"), slow("function"), "module.compile"])
def test_one_dict_of_options_for_two_models_means_two_directories(places: Path, how: str):
    """A model's, where it was compiled; another's, where it was called first, and later graphs of both likewise."""
    options, runs = {"store": "store", "placement": "nvme"}, []
    for name in ("job", "else"):
        os.chdir(places / name)
        model = Net()
        if how == "module.compile":
            model.compile(backend="zinf", options=options)
            run = model
        else:
            what = model if how == "model" else lambda x, model=model: model(x)
            run = torch.compile(what, backend="zinf", options=options)
        runs.append((run, model, places / name / "store"))
        if how != "model":
            run(torch.ones(2, 64)).sum().backward()
    os.chdir(places)
    for run, model, store in runs * 2:
        for rows in (2, 3, 5):
            run(torch.ones(rows, 64)).sum().backward()
        assert in_store(model) == [(store,)]
    assert options == {"store": "store", "placement": "nvme"}


def test_a_directory_that_was_gone_when_a_model_was_compiled_is_not_another_one(places: Path):
    (places / "gone").mkdir()
    os.chdir(places / "gone")
    (places / "gone").rmdir()
    model = nn.Linear(64, 64)
    run = torch.compile(model, backend="zinf", options={"store": "store", "placement": "nvme"})
    os.chdir(places / "job")
    for _ in range(2):
        with pytest.raises(ConfigError, match="are relative, and the working directory is gone"):
            run(torch.ones(2, 64))
    assert not isinstance(model.weight, zinf_fx.StoredTensor)


def test_a_plan_is_read_from_where_the_model_was_compiled(places: Path):
    model = nn.Linear(64, 64)
    zinf_fx.export_plan(model, [torch.ones(2, 64)], placement="nvme").save("plan.json")
    for plan in ("plan.json", [Path("plan.json")]):
        torch._dynamo.reset()
        run = torch.compile(nn.Linear(64, 64), backend="zinf", options={"plan": plan, "store": "store"})
        go_elsewhere(places)
        run(torch.ones(2, 64)).sum().backward()
        os.chdir(places / "job")


def test_a_working_directory_that_is_gone_is_missed_only_where_it_is_meant(places: Path):
    model = torch.compile(nn.Linear(4, 4), backend="zinf", options={"store": places / "job" / "store"})
    (places / "gone").mkdir()
    os.chdir(places / "gone")
    (places / "gone").rmdir()
    assert Config().stores and Config(store=places / "job").store == places / "job"
    model(torch.ones(1, 4))
    with pytest.raises(ConfigError, match="is relative, and the working directory is gone: name it from the root"):
        Config(store="store")


def test_a_user_without_a_home_needs_none(places: Path, monkeypatch: pytest.MonkeyPatch):
    """A container may run with a number that no user has; `/` is what such are given there as well."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("HOME", "ZINF_STORE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert Config().store == cache_directory() == Path("/.cache/zinf_fx")
    assert Config().store_is_default
    for options in ({"placement": "device"}, {"placement": "host"}, {"store": "store", "placement": "nvme"}):
        model = zinf_fx.offload(nn.Linear(4, 4), **options)
        step_of = torch.compile(model, backend="zinf")
        step_of(torch.ones(1, 4)).sum().backward()
    two = zinf_fx.offload(nn.Linear(4, 4), store=["store", "other"], placement="nvme")
    assert len(two.weight.stored.tiers.store.directories) == 2
    monkeypatch.setenv("HOME", "relative")
    assert Config().store == Path("/relative/.cache/zinf_fx")
