"""Models are written to safetensors files and read from them tensor by tensor, as the safetensors library has them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.checkpoint import weights
from zinf_fx.errors import CheckpointError
from zinf_fx.sizes import PIECE, pieces_of

PLACEMENTS = ["nvme", "host", "device", "infinity-nvme"]


class Net(nn.Module):
    """Tied, frozen, empty and scalar parameters of several dtypes, a buffer that is saved, and one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.randn(()).double())
        self.none = nn.Parameter(torch.empty(0, 3))
        self.rough = nn.Parameter(torch.randn(5, 7).bfloat16(), requires_grad=False)
        self.register_buffer("count", torch.tensor([3, 1], dtype=torch.int64))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("passing", torch.randn(4), persistent=False)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Net]:
    (tmp_path / "store").mkdir()

    def make(seed: int = 0, placement: str = "nvme", **fields: object) -> Net:
        return zinf_fx.offload(net(seed), store=tmp_path / "store", placement=placement, **fields)

    return make


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an export, as the safetensors library reads them."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        return safetensors.torch.load_file(directory / "model.safetensors")
    tensors = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        tensors[name] = safetensors.torch.load_file(directory / file)[name]
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        value = value.full_tensor() if isinstance(value, zinf_fx.StoredTensor) else value
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


def once(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name != "head.weight"}


def step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.layers[0](torch.ones(2, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.layers.parameters(), lr=1e-2, fused=True)


def stored_optimizer(model: Net) -> torch.optim.Optimizer:
    return zinf_fx.optim.AdamW(model.layers.parameters(), lr=1e-2)


def export_and_load(rank: int, folder: Path, placements: list[str], limit: object) -> None:
    """Export a model that was trained, and load it into another."""
    for placement in placements:
        model, other = (zinf_fx.offload(net(seed), placement=placement, collective_timeout=20) for seed in (0, 1))
        step(model, stored_optimizer(model))
        zinf_fx.export_safetensors(model, folder / placement, max_shard_size=limit)
        zinf_fx.load_safetensors(other, folder / placement)
        assert_equal({name: value.full_tensor() for name, value in parameters(other)}, dict(parameters(model)))


def parameters(model: Net) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


@pytest.mark.parametrize(
    ("ranks", "placements", "limit"),
    [
        *((1, [placement], limit) for placement in PLACEMENTS for limit in ("5GB", 3000, 1)),
        (2, ["infinity-nvme", "infinity-cpu", "zero-2", "dp"], 3000),
    ],
    ids=str,
)
def test_exported_models_are_what_the_library_reads(ranks: int, placements: list[str], limit: object, tmp_path: Path):
    on_ranks(ranks, export_and_load, tmp_path, placements, limit)
    plain = net()
    step(plain, plain_optimizer(plain))
    for placement in placements:
        assert_equal(read(tmp_path / placement), once(plain))
        sizes = [file.stat().st_size for file in (tmp_path / placement).glob("*.safetensors")]
        assert len(sizes) == {"5GB": 1, 3000: 5, 1: len(once(plain))}[limit]
        assert {file.name for file in (tmp_path / placement).iterdir()} == {
            *(file.name for file in (tmp_path / placement).glob("*.safetensors")),
            *(["model.safetensors.index.json"] if len(sizes) > 1 else []),
        }


def test_the_index_counts_what_there_is(tmp_path: Path, stored: Callable):
    zinf_fx.export_safetensors(stored(), tmp_path, max_shard_size=3000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    values = once(net()).values()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values)
    assert index["metadata"]["total_parameters"] == sum(value.numel() for value in values)


@pytest.mark.parametrize(
    ("placement", "piece", "default"),
    [*((placement, piece, "cpu") for placement in PLACEMENTS for piece in (PIECE, 4096)), ("nvme", PIECE, "meta")],
)
def test_models_are_loaded_from_what_the_library_writes(
    placement: str, piece: int, default: str, tmp_path: Path, stored: Callable, monkeypatch: pytest.MonkeyPatch
):
    """They are loaded also where torch makes tensors on another device when nothing else is said."""
    monkeypatch.setattr(weights, "pieces_of", lambda elements, itemsize: pieces_of(elements, itemsize, piece))
    plain, model = net(1), stored(0, placement)
    parameters = list(model.parameters())
    safetensors.torch.save_model(plain, tmp_path / "plain.safetensors")
    with torch.device(default):
        zinf_fx.load_safetensors(model, tmp_path / "plain.safetensors")
    assert_equal({name: value for name, value in plain.state_dict().items()}, model.state_dict())
    assert all(parameter is other for parameter, other in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("limit", ["5GB", 3000])
def test_a_directory_or_its_index_is_loaded(limit: object, tmp_path: Path, stored: Callable):
    zinf_fx.export_safetensors(net(1), tmp_path / "out", max_shard_size=limit)
    for path in (tmp_path / "out", *(tmp_path / "out").glob("*.json")):
        model = stored()
        zinf_fx.load_safetensors(torch.compile(model, backend="zinf"), path)
        assert_equal(net(1).state_dict(), model.state_dict())


def test_values_are_converted_as_load_state_dict_does(tmp_path: Path, stored: Callable):
    values = {name: value.clone() for name, value in net(1).state_dict().items()}
    values["tokens.weight"] = values["tokens.weight"].double() * 1.1
    values["rough"] = values["rough"].float() + 0.01
    values["layers.0.bias"] = torch.arange(24)
    values["count"] = torch.tensor([1.7, -2.4])
    values["layers.1.weight"] = values["layers.1.weight"].to(torch.float8_e4m3fn)
    values["head.weight"] = values["tokens.weight"].clone()
    safetensors.torch.save_file(values, tmp_path / "file.safetensors")
    plain, model = net(), stored()
    plain.load_state_dict(values)
    zinf_fx.load_safetensors(model, tmp_path / "file.safetensors")
    assert_equal(plain.state_dict(), model.state_dict())


def _missing(values: dict) -> None:
    del values["layers.1.bias"]
    del values["scale"]


def _unexpected(values: dict) -> None:
    values["other"] = torch.zeros(1)


def _shape(values: dict) -> None:
    values["layers.2.weight"] = torch.zeros(24, 25)


def _complex(values: dict) -> None:
    values["layers.0.bias"] = torch.zeros(24, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_missing, "it lacks 'scale', 'layers.1.bias'"),
        (_unexpected, "the model has no 'other'"),
        (_shape, r"'layers.2.weight' is float32\[24, 25\], the model's has shape \[24, 24\]"),
        (_complex, r"'layers.0.bias' is complex64\[24\], the model's is real"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    change: Callable, message: str, tmp_path: Path, stored: Callable
):
    values = {name: value.clone() for name, value in once(net(1)).items()}
    change(values)
    safetensors.torch.save_file(values, tmp_path / "file.safetensors")
    model = stored()
    with pytest.raises(CheckpointError, match=message):
        zinf_fx.load_safetensors(model, tmp_path / "file.safetensors")
    assert_equal(net().state_dict(), model.state_dict())


def _truncated(directory: Path) -> Path:
    file = sorted(directory.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-5])
    return directory


def _removed(directory: Path) -> Path:
    sorted(directory.glob("*.safetensors"))[1].unlink()
    return directory


def _foreign(directory: Path) -> Path:
    sorted(directory.glob("*.safetensors"))[1].write_bytes(b"no such file" * 9)
    return directory


def _of_another(directory: Path) -> Path:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    return directory


def _no_index(directory: Path) -> Path:
    (directory / "model.safetensors.index.json").unlink()
    return directory


def _bad_index(directory: Path) -> Path:
    (directory / "model.safetensors.index.json").write_text("{}")
    return directory


def _naming(file: object) -> Callable[[Path], Path]:
    def change(directory: Path) -> Path:
        index = directory / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["scale"] = str(directory / "a") if file == "absolute" else file
        index.write_text(json.dumps(content))
        if file == "pipe":
            os.mkfifo(directory / "pipe")
        return directory

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncated, "00002-of-00005.safetensors' can't be read"),
        (_removed, "00002-of-00005.safetensors' can't be read"),
        (_foreign, "00002-of-00005.safetensors' can't be read"),
        (_of_another, "which the files don't have"),
        (_no_index, "has no weights"),
        (_bad_index, "is no index"),
        (_naming(5), "names 5, which is no file in its directory"),
        (_naming("../out/other"), "names '../out/other', which is no file in its directory"),
        (_naming("absolute"), "names '/.*', which is no file in its directory"),
        (_naming("pipe"), "names 'pipe', which is no file: "),
    ],
)
def test_damaged_exports_are_refused_by_name(damage: Callable, message: str, tmp_path: Path, stored: Callable):
    model = stored()
    zinf_fx.export_safetensors(net(1), tmp_path / "out", max_shard_size=3000)
    with pytest.raises(CheckpointError, match=message):
        zinf_fx.load_safetensors(model, damage(tmp_path / "out"))
    assert_equal(net().state_dict(), model.state_dict())


def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path: Path, stored: Callable):
    header = b'{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "file.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"  ")
    with pytest.raises(CheckpointError, match=r"'a' in .* has dtype F4, which torch doesn't have|can't be read"):
        zinf_fx.load_safetensors(stored(), tmp_path / "file.safetensors")


def test_what_is_no_tensor_can_not_be_exported(tmp_path: Path):
    class Odd(nn.Linear):
        def get_extra_state(self) -> dict:
            return {"a": 1}

    with pytest.raises(CheckpointError, match="'_extra_state' in the state dict is a dict"):
        zinf_fx.export_safetensors(Odd(2, 2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="'weight' in the state dict is on the meta device"):
        zinf_fx.export_safetensors(nn.Linear(2, 2, device="meta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_training_goes_on_from_what_was_loaded(tmp_path: Path, stored: Callable):
    """Masters of an optimizer that has stepped are those of the new weights."""
    plain, model = net(), stored(placement="infinity-nvme")
    optimizers = {plain: plain_optimizer(plain), model: stored_optimizer(model)}
    safetensors.torch.save_model(net(1), tmp_path / "file.safetensors")
    for number in range(4):
        if number == 2:
            plain.load_state_dict(net(1).state_dict())
            zinf_fx.load_safetensors(model, tmp_path / "file.safetensors")
        for module, optimizer in optimizers.items():
            step(module, optimizer)
    assert_equal(plain.state_dict(), model.state_dict())
