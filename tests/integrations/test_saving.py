"""Libraries that save models divide them into files, find tied weights, and hold one file's values at a time."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
import safetensors.torch
import torch
from gate import slow
from ranks.launching import on_ranks
from safetensors.torch import load_file
from test_trainer import as_by_torchrun
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
    """Return what values that were gathered take together, after each that is."""
    seen: list[int] = []
    held: weakref.WeakSet = weakref.WeakSet()
    gather = TensorStorage.value

    def value(storage: TensorStorage) -> torch.Tensor:
        result = gather(storage)
        held.add(result)
        seen.append(sum(tensor.nbytes for tensor in held))
        return result

    monkeypatch.setattr(TensorStorage, "value", value)
    return seen


def test_the_size_of_a_model_is_honest(pair: tuple[nn.Module, nn.Module]):
    splits = [huggingface_hub.split_torch_state_dict_into_shards(m.state_dict(), max_shard_size="20KB") for m in pair]
    assert splits[0] == splits[1]
    assert splits[1].metadata["total_size"] == sum(p.nbytes for p in pair[1].parameters())
    assert len(splits[1].filename_to_tensors) > 2
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
    files = []
    for name, model in zip(("plain", "stored"), pair, strict=True):
        (tmp_path / name).mkdir()
        save(model, tmp_path / name)
        files.append({path.name: load_file(path) for path in (tmp_path / name).glob("*.safetensors")})
    plain, stored = files
    assert plain.keys() == stored.keys() and plain
    for file, values in plain.items():
        assert values.keys() == stored[file].keys()
        assert all(torch.equal(value, stored[file][name]) for name, value in values.items())


@dataclass(frozen=True)
class Ended:
    """The losses of some steps, and what there is after them."""

    losses: list[float]
    values: list[torch.Tensor]
    rates: list[float]


def train_two_models(rank: int, ranks: int, folder: Path, kind: type, resumed: bool) -> Ended:
    """Four steps of two models with an optimizer each, behind a save or a load."""
    as_by_torchrun(rank, ranks)
    accelerator = kind(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    models, optimizers = [_gpt2(), nn.Linear(64, 32)], []
    for number, model in enumerate(models):
        zinf_fx.offload(model, placement="infinity-nvme", collective_timeout=60)
        optimizers.append(zinf_fx.optim.AdamW(model.parameters(), lr=1e-2 * (number + 1)))
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9)
    wrapped = [accelerator.prepare_model(model, evaluation_mode=True) for model in models]
    for model in wrapped:
        model.no_sync = zinf_fx.no_sync
    *prepared, schedule = accelerator.prepare(*optimizers, schedule)

    def step(number: int) -> float:
        tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2 * number + rank))
        with accelerator.accumulate(*wrapped):
            loss = wrapped[1](wrapped[0](tokens).logits).square().mean()
            accelerator.backward(loss)
            for part in (*prepared, schedule):
                part.step()
            for optimizer in prepared:
                optimizer.zero_grad()
        return loss.item()

    for number in range(0 if resumed else 4):
        step(number)
    refusal = mock.patch.object(TensorStorage, "value", lambda storage: pytest.fail("a whole tensor was gathered"))
    with refusal if kind is Accelerator else nullcontext():
        accelerator.load_state(folder) if resumed else accelerator.save_state(folder)
    losses = [step(number) for number in range(4, 8)]
    values = [value.full_tensor() for model in models for value in model.parameters()]
    return Ended(losses, values, schedule.get_last_lr())


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(1, accelerate.Accelerator), (1, Accelerator), slow(2, Accelerator)],
    ids=["accelerate's", "ours", "two ranks"],
)
def test_what_accelerate_loads_goes_on_as_what_it_saved(tmp_path: Path, ranks: int, kind: type):
    folder = tmp_path / "state"
    saved, loaded = (on_ranks(ranks, train_two_models, ranks, folder, kind, resumed) for resumed in (False, True))
    for before, after in zip(saved, loaded, strict=True):
        assert after.losses == before.losses and after.rates == before.rates and len(after.losses) == 4
        assert all(map(torch.equal, after.values, before.values))
    assert (folder / "optimizer.bin").exists() == (kind is accelerate.Accelerator)
    safetensors.torch.load_model(_gpt2(), folder / "model.safetensors")
    if kind is Accelerator:
        assert load_file(folder / "model_1" / "model.safetensors").keys() == {"weight", "bias"}
        (alone,) = on_ranks(1, train_two_models, 1, folder, kind, True)
        assert alone.losses[0] == saved[0].losses[0]
