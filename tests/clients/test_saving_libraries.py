"""What other libraries save of an offloaded model: huggingface_hub, safetensors, torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from launching_programs import results_of
from rows import Row
from torch import nn

import zinf_fx


class Net(nn.Sequential, huggingface_hub.PyTorchModelHubMixin):
    """Has a few layers of 64 KiB, the last tied to the first."""

    def __init__(self, width: int = 128) -> None:
        super().__init__(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        self[3].weight = self[0].weight


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Net]:
    torch.manual_seed(0)
    plain, stored = Net(), Net()
    stored.load_state_dict(plain.state_dict())
    return {"plain": plain, "stored": zinf_fx.offload(stored, store=tmp_path / "store", placement="nvme")}


def loaded(folder: Path) -> list[torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return [value for file in files for _, value in sorted(safetensors.torch.load_file(file).items())]


@pytest.mark.row("huggingface_hub", "`save_torch_model(max_shard_size=...)`")
def test_hub_shards(row: Row, tmp_path: Path, models: dict[str, Net]) -> None:
    for name, model in models.items():
        (tmp_path / name).mkdir()
        huggingface_hub.save_torch_model(model, tmp_path / name, max_shard_size="130KB")
    files = [sorted(file.name for file in (tmp_path / name).glob("*.safetensors")) for name in models]
    assert files[0] == files[1] and len(files[0]) > 1
    row.compare(loaded(tmp_path / "stored"), loaded(tmp_path / "plain"))


@pytest.mark.row("huggingface_hub", "`PyTorchModelHubMixin`: `save_pretrained`, `from_pretrained` of a folder")
def test_hub_mixin(row: Row, tmp_path: Path, models: dict[str, Net]) -> None:
    models["stored"].save_pretrained(tmp_path / "saved")
    with zinf_fx.offloading(store=tmp_path / "store", placement="nvme"):
        stored = Net.from_pretrained(tmp_path / "saved")
    row.compare([p.detach() for p in stored.parameters()], models["plain"].parameters())


@pytest.mark.row("safetensors", "`save_model`, `load_model`, with tied weights")
def test_safetensors(row: Row, tmp_path: Path, models: dict[str, Net]) -> None:
    for name, model in models.items():
        safetensors.torch.save_model(model, tmp_path / f"{name}.safetensors")
    plain, stored = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in models)
    row.compare((stored[name] for name in plain), plain.values())
    with torch.no_grad():
        models["stored"][1].weight.zero_()
    safetensors.torch.load_model(models["stored"], tmp_path / "plain.safetensors")
    row.compare([p.detach() for p in models["stored"].parameters()], models["plain"].parameters())


@pytest.mark.row("torch.distributed.checkpoint", "`save`, `load` of a model's state_dict, 1 rank")
def test_distributed_checkpoint(row: Row, tmp_path: Path, models: dict[str, Net]) -> None:
    dcp.save({"model": models["stored"].state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    plain = Net()
    dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    row.compare(plain.parameters(), models["plain"].parameters())
    with torch.no_grad():
        models["stored"][1].weight.zero_()
    dcp.load({"model": models["stored"].state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    row.compare([p.detach() for p in models["stored"].parameters()], models["plain"].parameters())


@pytest.mark.row("torch.distributed.checkpoint", "`async_save` of a model's state_dict, changed meanwhile; 1 rank")
def test_asynchronous_checkpoint(row: Row, tmp_path: Path, models: dict[str, Net]) -> None:
    saving = dcp.async_save({"model": models["stored"].state_dict()}, checkpoint_id=tmp_path / "saved")
    with torch.no_grad():
        models["stored"][1].weight.zero_()
    saving.result()
    plain = Net()
    dcp.load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    row.compare(plain.parameters(), models["plain"].parameters())


@pytest.mark.row(
    "torch.distributed.checkpoint", "`get_state_dict`, `save`, `load`, `set_state_dict` of a model and AdamW, 2 ranks"
)
def test_distributed_checkpoint_of_two_ranks(row: Row, tmp_path: Path) -> None:
    results = {how: results_of("with_dcp.py", 2, how, tmp_path) for how in ("plain", "stored")}
    row.compare(results["stored"], results["plain"], to="to `DistributedDataParallel`")
