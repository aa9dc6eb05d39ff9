"""What is made of a checkpoint's tensors while a model is built has the values that it always has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import zinf_fx
from zinf_fx.compat import transformers
from zinf_fx.compat.safetensors import MappedFiles
from zinf_fx.runtime.memory.host import memory_of_file

CASES: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "stack": torch.stack,
    "stack in the middle": lambda ts: torch.stack(ts, dim=1),
    "stack at the end": lambda ts: torch.stack(ts, -1),
    "cat": torch.cat,
    "cat along another": lambda ts: torch.cat(ts, dim=1),
    "cat of stacks": lambda ts: torch.cat([torch.stack(ts[:2]), torch.stack(ts[2:])], dim=-1),
    "one": lambda ts: torch.cat(ts[:1]),
    "transposed": lambda ts: torch.stack([t.t() for t in ts]),
    "converted": lambda ts: ts[1].to(dtype=torch.bfloat16, device="cpu"),
    "converted and joined": lambda ts: torch.stack([t.to(dtype=torch.float64) for t in ts]),
    "slices": lambda ts: torch.cat([ts[0][3:5], ts[1][1:2]]),
}


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return tensors of a file that is mapped."""
    monkeypatch.setattr(transformers, "_LARGE", 1)
    monkeypatch.setattr(transformers, "PIECE", 100)
    safetensors.torch.save_file({str(n): torch.randn(6, 10) for n in range(4)}, tmp_path / "file.safetensors")
    with safetensors.safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        return [file.get_slice(name)[...] for name in file.keys()]  # noqa: SIM118


@pytest.mark.parametrize("case", CASES)
def test_results_are_in_files_and_the_same(case: str, tensors: list[torch.Tensor], tmp_path: Path):
    expected = CASES[case](tensors)
    mapped = MappedFiles(0, partial(memory_of_file, tmp_path))
    with transformers.Converting(mapped):
        result = CASES[case](tensors)
    assert torch.equal(result, expected) and result.dtype == expected.dtype
    assert mapped.has([result]) and not mapped.has([expected])


def test_results_become_stored_parameters(tensors: list[torch.Tensor], tmp_path: Path):
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        with torch.device("meta"):
            net = nn.Linear(10, 24, bias=False)
        net.weight = nn.Parameter(torch.cat(tensors))
        other = torch.cat(tensors)
    assert isinstance(net.weight, zinf_fx.StoredTensor)
    assert torch.equal(net.weight.full_tensor(), torch.cat([tensor.clone() for tensor in tensors]))
    other.zero_()  # is the caller's, as always
    assert torch.equal(other, torch.zeros(24, 10))


@pytest.mark.parametrize(
    "join",
    [
        lambda ts: torch.cat([ts[0], torch.zeros(6, 10)]),  # one of them is in ordinary memory
        lambda ts: torch.cat([ts[0], ts[1].double()]),
        lambda ts: torch.cat(ts, out=torch.empty(24, 10)),
        lambda ts: torch.stack([ts[0].to("meta")]),
        lambda ts: ts[0].to(dtype=torch.float64, copy=True),
        lambda ts: torch.ones(5).to(dtype=torch.float64),
        lambda ts: torch.cat([ts[0].requires_grad_()]),
    ],
)
def test_what_is_not_of_files_alone_is_made_as_always(join: Callable, tensors: list[torch.Tensor], tmp_path: Path):
    mapped = MappedFiles(0, partial(memory_of_file, tmp_path))
    with transformers.Converting(mapped):
        result = join(tensors)
    assert result.is_meta or not mapped.has([result])


def test_refusals_are_those_of_torch(tensors: list[torch.Tensor], tmp_path: Path):
    with transformers.Converting(MappedFiles(0, partial(memory_of_file, tmp_path))):
        for join in (
            lambda: torch.cat([tensors[0], tensors[1][:, :3]]),
            lambda: torch.stack([tensors[0]], 7),
            lambda: torch.cat(tensors, 2),
            lambda: torch.cat(tensors, -3),
        ):
            with pytest.raises((RuntimeError, IndexError)):
                join()


def test_graphs_compile_while_a_model_is_built(tmp_path: Path):
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        compiled = torch.compile(lambda x: torch.cat([x, x + 1]).sum(), backend="eager", fullgraph=True)
        assert compiled(torch.ones(3)) == 9
    assert compiled(torch.ones(3)) == 9


def test_models_in_host_memory_need_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers, "_LARGE", 1)
    safetensors.torch.save_file({"weight": torch.ones(6, 10)}, tmp_path / "file.safetensors")
    with (
        safetensors.safe_open(tmp_path / "file.safetensors", framework="pt") as file,
        zinf_fx.offloading(store=tmp_path / "nowhere", placement="host"),
    ):
        with torch.device("meta"):
            net = nn.Linear(10, 12, bias=False)
        net.weight = nn.Parameter(torch.cat([file.get_tensor("weight")] * 2))
    assert torch.equal(net.weight.full_tensor(), torch.ones(12, 10))
