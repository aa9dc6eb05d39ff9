"""Libraries that save models divide them into files, find tied weights, and hold one file's values at a time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from test_transformers import _gpt2
from torch import nn

import zinf_fx
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.storage import TensorStorage

pytest.importorskip("accelerate")

import accelerate

from zinf_fx.integrations.accelerate import Accelerator


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    """GPT-2, whose head is tied to its embedding, and its twin on disk."""
    torch.manual_seed(0)
    plain = _gpt2()
    return plain, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")


@pytest.fixture
def bytes_at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What values that were gathered take together, after each that is."""
    seen: list[int] = []
    held: weakref.WeakSet = weakref.WeakSet()
    gather = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        result = gather(storage)
        held.add(result)
        seen.append(sum(one.nbytes for one in held))
        return result

    monkeypatch.setattr(TensorStorage, "value", value)
    return seen


def test_the_size_of_a_model_is_honest(pair: tuple[nn.Module, nn.Module]):
    found = [huggingface_hub.split_torch_state_dict_into_shards(m.state_dict(), max_shard_size="20KB") for m in pair]
    assert found[0] == found[1]
    assert found[1].metadata["total_size"] == sum(p.nbytes for p in pair[1].parameters())
    assert len(found[1].filename_to_tensors) > 2
    odd = zinf_fx.StoredTensor.of(
        TensorStorage(
            zinf_fx.Config(), LocalShard(Shards.of(3, 1, True)), Allocation.unreserved("nvme", [3], torch.int8)
        ),
        (3,),
        "cpu",
    )
    assert huggingface_hub.split_torch_state_dict_into_shards({"odd": odd}).metadata["total_size"] == 3


def test_pretrained_models_are_saved_in_shards(pair: tuple[nn.Module, nn.Module], tmp_path: Path, bytes_at_once):
    plain, stored = pair
    stored.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    largest = max(path.stat().st_size for path in (tmp_path / "saved").glob("*.safetensors"))
    assert max(bytes_at_once) <= 2 * largest < sum(p.nbytes for p in plain.parameters())
    loaded = type(plain).from_pretrained(tmp_path / "saved")
    tokens = torch.arange(12).view(1, 12)
    assert torch.equal(loaded.eval()(tokens).logits, plain.eval()(tokens).logits)


def _by_safetensors(model: nn.Module, folder: Path) -> None:
    safetensors.torch.save_model(model, folder / "model.safetensors")


def _by_accelerate(model: nn.Module, folder: Path) -> None:
    accelerate.Accelerator(cpu=True).save_model(model, folder, max_shard_size="20KB")


def _by_the_hub(model: nn.Module, folder: Path) -> None:
    huggingface_hub.save_torch_state_dict(model.state_dict(), folder, max_shard_size="20KB")


@pytest.mark.parametrize("save", [_by_safetensors, _by_accelerate, _by_the_hub])
def test_files_equal_those_of_the_plain_model(
    pair: tuple[nn.Module, nn.Module], tmp_path: Path, save: Callable[[nn.Module, Path], None]
):
    found = []
    for name, model in zip(("plain", "stored"), pair, strict=True):
        (tmp_path / name).mkdir()
        save(model, tmp_path / name)
        found.append({path.name: load_file(path) for path in (tmp_path / name).glob("*.safetensors")})
    plain, stored = found
    assert plain.keys() == stored.keys() and plain
    for file, values in plain.items():
        assert values.keys() == stored[file].keys()
        assert all(torch.equal(value, stored[file][name]) for name, value in values.items())


@pytest.mark.parametrize("kind", [accelerate.Accelerator, Accelerator], ids=["accelerate's", "ours"])
def test_accelerate_saves_and_loads_states(tmp_path: Path, kind: type, monkeypatch: pytest.MonkeyPatch):
    tokens = torch.randint(64, (3, 2, 12))

    def prepared(store: str) -> tuple[accelerate.Accelerator, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = zinf_fx.offload(_gpt2(), store=tmp_path / store, placement="nvme")
        accelerator = kind(cpu=True)
        return accelerator, *accelerator.prepare(model, zinf_fx.optim.AdamW(model.parameters(), lr=1e-2))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    for store in ("first", "second"):
        (tmp_path / store).mkdir()
    accelerator, *trained = prepared("first")
    step(*trained, tokens[0])
    with monkeypatch.context() as patch:
        if kind is Accelerator:
            patch.setattr(TensorStorage, "value", lambda storage: pytest.fail("a whole tensor was gathered"))
        accelerator.save_state(tmp_path / "state")
    expected = [step(*trained, batch) for batch in tokens[1:]]
    accelerator, *resumed = prepared("second")
    with monkeypatch.context() as patch:
        if kind is Accelerator:
            patch.setattr(TensorStorage, "value", lambda storage: pytest.fail("a whole tensor was gathered"))
        accelerator.load_state(tmp_path / "state")
    assert [step(*resumed, batch) for batch in tokens[1:]] == expected
    assert (tmp_path / "state" / "optimizer.bin").exists() == (kind is accelerate.Accelerator)
    read = _gpt2()
    safetensors.torch.load_model(read, tmp_path / "state" / "model.safetensors")
