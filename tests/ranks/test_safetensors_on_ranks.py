"""Weights from and to safetensors files where ranks have parts of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from ranks.launching import on_ranks
from ranks.training import model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import zinf_fx
from zinf_fx.errors import CheckpointError

SOON = 20.0


def divided(rank: int, folder: Path) -> list[str]:
    """Names of parameters of tensor parallelism that an export and a load of it changed."""

    def parallel(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return zinf_fx.offload(parallelize_module(net, mesh, plan), placement="nvme")

    mesh = init_device_mesh("cpu", (2,))
    first, second = parallel(0), parallel(1)
    assert isinstance(first[0].weight, DTensor)
    zinf_fx.export_safetensors(first, folder)
    zinf_fx.load_safetensors(second, folder)
    with zinf_fx.gathered([*first.parameters(), *second.parameters()]) as values:
        half = len(values) // 2
        same = [torch.equal(a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    return [name for (name, _), equal in zip(first.named_parameters(), same, strict=True) if not equal]


def test_parts_of_tensor_parallelism_are_exported_and_loaded(tmp_path: Path):
    assert on_ranks(2, divided, tmp_path) == [[], []]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)).state_dict()
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert exported.keys() == plain.keys() and all(torch.equal(exported[name], plain[name]) for name in plain)


def replicated(rank: int, folder: Path) -> str:
    """Return what is raised on a rank where nothing of a model is stored, and there is one file of it for all."""
    torch.manual_seed(0)
    whole = torch.compile(DistributedDataParallel(nn.Linear(6, 10)))
    zinf_fx.export_safetensors(whole, folder)
    assert safetensors.torch.load_file(folder / "model.safetensors")["weight"].equal(whole.module.weight)
    with pytest.raises(CheckpointError) as raised:
        zinf_fx.load_safetensors(whole, folder / f"of{rank}" if rank else folder)
    return str(raised.value)


def test_a_model_that_nothing_is_stored_of_is_exported_once(tmp_path: Path):
    first, second = on_ranks(2, replicated, tmp_path)
    assert "of1' has no weights" in second and first.endswith(second)


def one_fails(rank: int, folder: Path) -> list[str]:
    """Return what is raised where one rank alone finds something wrong."""
    trained = zinf_fx.offload(model(), placement="infinity-nvme", collective_timeout=SOON)
    errors = []
    (folder / "file").write_text("") if rank == 0 else None
    attempts = [
        lambda: zinf_fx.export_safetensors(trained, folder / "file"),
        lambda: zinf_fx.load_safetensors(trained, folder / f"of{rank}"),
    ]
    zinf_fx.export_safetensors(trained, folder / "of0")
    for attempt in attempts:
        with pytest.raises(CheckpointError) as raised:
            attempt()
        errors.append(str(raised.value))
    return errors


def test_what_one_rank_finds_is_an_error_on_every_rank(tmp_path: Path):
    first, second = on_ranks(2, one_fails, tmp_path)
    failed = "reserving room for weights failed on rank 0 of 2: CheckpointError: making a folder"
    assert first[0].startswith("making a folder") and second[0].startswith(failed)
    failed = "comparing weights with the model failed on rank 1 of 2: CheckpointError: "
    assert "of1' has no weights" in second[1] and first[1] == failed + second[1]


def _resident() -> tuple[int, int]:
    """Return bytes of mapped checkpoints that this process has in memory, and that it has changed."""
    text = Path("/proc/self/smaps").read_text()
    blocks = re.findall(r"\.safetensors\n((?:[A-Z]\w+: .*\n)+)", text)
    numbers = [dict(re.findall(r"(\w+): +(\d+) kB", block)) for block in blocks]
    return tuple(sum(int(mapping[name]) for mapping in numbers) << 10 for name in ("Rss", "Anonymous"))


def loaded(rank: int, folder: Path, alike: bool) -> tuple[float, tuple[int, int]]:
    """Return the value of a parameter that is assigned in the place of one on the meta device, as transformers does;
    and what of its file is in memory then."""
    name = "file" if alike else f"file{rank}"
    with safetensors.safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        with zinf_fx.offloading(placement="infinity-nvme", collective_timeout=SOON):
            with torch.device("meta"):
                net = nn.Linear(4096, 2048, bias=False)
            net.weight = nn.Parameter(file.get_slice("weight")[...])
            resident = _resident()
        assert isinstance(net.weight, zinf_fx.StoredTensor)
        return net.weight.full_tensor().unique().item(), resident


@pytest.mark.slow
def test_ranks_read_their_parts_of_a_file_that_all_have(tmp_path: Path):
    value = torch.full((2048, 4096), 3.0)
    safetensors.torch.save_file({"weight": value}, tmp_path / "file.safetensors")
    for read_value, (resident, changed) in on_ranks(2, loaded, tmp_path, True):
        assert read_value == 3.0 and 0.4 < resident / value.nbytes < 0.7 and not changed


def test_ranks_with_other_files_take_the_values_of_the_first(tmp_path: Path):
    for rank in range(2):
        safetensors.torch.save_file(
            {"weight": torch.full((2048, 4096), rank + 1.0)}, tmp_path / f"file{rank}.safetensors"
        )
    for read_value, (_, changed) in on_ranks(2, loaded, tmp_path, False):
        assert read_value == 1.0 and not changed
