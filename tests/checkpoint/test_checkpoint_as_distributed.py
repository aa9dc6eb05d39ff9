"""A checkpoint that is written as a directory of torch.distributed.checkpoint loads with the values that were saved."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forked import run
from gate import slow
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zinf_fx
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.cli import main
from zinf_fx.optim import reserve_states

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Model(nn.Module):
    """Has stored and ordinary parameters, a tied one, one with more than a piece, a buffer, and extra state."""

    def __init__(self, store: Path | None, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide, self.ordinary = nn.Linear(4099, 1500, dtype=dtype), nn.Linear(1500, 30, dtype=dtype)
        self.head, self.tied = nn.Linear(30, 1500, bias=False, dtype=dtype), nn.Module()
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("nothing", torch.zeros(4, 0))
        self.note = f"of {seed}"
        if store is not None:
            store.mkdir()
            for layer in (self.wide, self.head):
                zinf_fx.offload(layer, store=store, placement="nvme")
        self.tied.weight = self.head.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.ordinary(self.wide(batch)))

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(2, 4099, generator=torch.Generator().manual_seed(step)).to(model.wide.weight.dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    stored = zinf_fx.StoredTensor
    return {name: value.full_tensor() if isinstance(value, stored) else value for name, value in tensors.items()}


def load(model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(folder / "store", 1, dtype)
    groups = [{"params": list(model.wide.parameters()), "lr": 1e-2}, {"params": list(model.ordinary.parameters())}]
    optimizer = zinf_fx.optim.AdamW([*groups, {"params": [model.head.weight], "weight_decay": 0.3}])
    train(model, optimizer, range(2))
    zinf_fx.save_checkpoint(folder / "saved", model, optimizer, step=2)
    return model, optimizer


def new(store: Path | None, kind: type[torch.optim.Optimizer], dtype: torch.dtype) -> tuple[Model, torch.optim.AdamW]:
    model = Model(store, 2, dtype)
    layers = (model.wide, model.ordinary, model.head)
    return model, kind([{"params": list(layer.parameters())} for layer in layers], lr=1e-7)


def converted(folder: Path, *options: str) -> int:
    return main(
        ["checkpoint", "convert", str(folder / "saved"), "-o", str(folder / "dcp"), "--format", "dcp", *options]
    )


def assert_equal(actual: dict[str, object], expected: dict[str, object]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(actual[name], value) if isinstance(value, torch.Tensor) else actual[name] == value
        assert same, name


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]):
    model, optimizer = saved(tmp_path, dtype)
    assert converted(tmp_path, "--json") == 0
    files = [Path(path).name for path in json.loads(capsys.readouterr().out)]
    assert files[-1] == ".metadata" and sorted(files) == sorted(path.name for path in (tmp_path / "dcp").iterdir())
    loaded, resumed = new(tmp_path / "other", zinf_fx.optim.AdamW, dtype)
    reserve_states(resumed)
    load(loaded, resumed, tmp_path / "dcp")
    assert_equal(values(loaded, resumed), values(model, optimizer))
    assert [(group["lr"], group["weight_decay"]) for group in resumed.param_groups] == [
        (group["lr"], group["weight_decay"]) for group in optimizer.param_groups
    ]
    for job in ((model, optimizer), (loaded, resumed)):
        train(*job, range(2, 4))
    assert_equal(values(loaded, resumed), values(model, optimizer))


def test_it_is_what_the_library_saves_itself(tmp_path: Path):
    model, optimizer = saved(tmp_path)
    assert converted(tmp_path) == 0
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path / "direct", no_dist=True)
    metadata, expected = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("dcp", "direct"))
    assert metadata.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    assert len(metadata.state_dict_metadata["model.wide.weight"].chunks) > 1
    plain, resumed = new(None, torch.optim.AdamW, torch.float32)
    load(plain, resumed, tmp_path / "dcp")
    assert_equal(values(plain, resumed), values(model, optimizer))


def test_one_part(tmp_path: Path):
    model, _ = saved(tmp_path)
    assert converted(tmp_path, "--part", "model") == 0
    loaded = Model(None, 2)
    states = {"model": loaded.state_dict()}
    dcp.load(states, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(states["model"]["wide.weight"], model.wide.weight.full_tensor())
    names = dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert all(name.startswith("model.") for name in names)


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path)
    assert converted(tmp_path, "--part", "step") == 2
    assert "has no 'step' to convert: it has model, optimizer" in capsys.readouterr().err
    assert not (tmp_path / "dcp").exists()
    assert converted(tmp_path) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()}
    assert converted(tmp_path) == 2
    assert "has a checkpoint of torch.distributed.checkpoint already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "dcp").iterdir()} == before


def test_nothing_is_left_of_a_damaged_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path)
    manifest = manifest_of(tmp_path / "saved")
    *_, (_, piece) = manifest.pieces()
    path = tmp_path / "saved" / manifest.files[piece.file].path
    with path.open("r+b") as file:
        file.seek(piece.offset)
        byte = file.read(1)[0]
        file.seek(piece.offset)
        file.write(bytes([byte ^ 1]))
    assert converted(tmp_path) == 2
    assert "have another checksum than when they were saved" in capsys.readouterr().err
    assert list((tmp_path / "dcp").iterdir()) == []


def test_nothing_is_left_where_there_is_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30 << 20, before[1]))
    try:
        assert converted(tmp_path) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"writing what was converted failed at \S+dcp: File too large", capsys.readouterr().err)
    assert list((tmp_path / "dcp").iterdir()) == []


def test_parameters_that_no_model_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, other = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    zinf_fx.save_checkpoint(tmp_path / "saved", model, optimizer)
    assert converted(tmp_path) == 2
    assert "its parameter #2 is in none of the models" in capsys.readouterr().err
    assert not (tmp_path / "dcp").exists()


PROGRAM = """
import re, sys
import torch.distributed.checkpoint
from zinf_fx.cli import main

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

folder = sys.argv[1]
before = peak()
assert main(["checkpoint", "convert", folder + "/saved", "-o", folder + "/dcp", "--format", "dcp", "--json"]) == 0
print(peak() - before, file=sys.stderr)
"""


@pytest.mark.slow
def test_peak(tmp_path: Path):
    """The model has 480 MiB in many tensors, of less and of more than a piece."""
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        model = nn.Sequential(*(nn.Linear(1024, 1024 * (1 + 5 * (n % 2)), bias=False) for n in range(12)))
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.1)
        optimizer.step()
        parameter.grad = None
    zinf_fx.save_checkpoint(tmp_path / "saved", model, optimizer)
    ended = run(PROGRAM, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir()) > 480 << 20
    assert int(ended.stderr.split()[-1]) <= 120
