"""What holds the addresses of many stored tensors doesn't hold the memory for all of them."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import forked
import pytest
import safetensors.torch
import torch
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.errors import StoreError
from zinf_fx.runtime.tensor import storage as spilling
from zinf_fx.sizes import pieces_of

SAVED = """
import resource, sys, safetensors.torch, torch, zinf_fx
from torch import nn
folder = sys.argv[1]
with zinf_fx.offloading(store=folder, placement="nvme", host_memory="64MiB"):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
taken = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (taken + (96 << 20),) * 2)
if sys.argv[2] == "torch":
    torch.save(model.state_dict(), folder + "/saved")
else:
    safetensors.torch.save_model(model, folder + "/saved")
print(sum(float(p.full_tensor().double().sum()) for p in model.parameters()))
"""


@pytest.mark.parametrize("how", ["safetensors", slow("torch")])
def test_models_are_saved_with_less_memory_than_they_have_bytes(how: str, tmp_path: Path):
    """The kernel refuses this process more than 96 MiB of memory of its own; the model has 192."""
    done = forked.run(SAVED, tmp_path, how)
    assert not done.returncode, done.stderr
    if how == "torch":
        saved = torch.load(tmp_path / "saved", mmap=True)
        assert all(type(value) is torch.Tensor for value in saved.values())
    else:
        saved = safetensors.torch.load_file(tmp_path / "saved")
    total = sum(float(saved[f"{number}.weight"].double().sum()) for number in range(12))
    assert len(saved) == 12 and total == pytest.approx(float(done.stdout), abs=1e-6)


def test_values_in_files_are_shared_until_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spilling, "pieces_of", lambda elements, itemsize: pieces_of(elements, itemsize, 1 << 20))
    torch.manual_seed(0)
    layer = nn.Linear(700, 1000, bias=False)
    plain = layer.weight.detach().clone()
    zinf_fx.offload(layer, store=tmp_path, placement="nvme")
    value, other = layer.weight.detach(), layer.weight.detach()
    address = value.data_ptr()
    assert address == other.data_ptr() and value.untyped_storage().nbytes() == plain.nbytes
    assert torch.equal(torch.frombuffer(_memory(address, plain.nbytes), dtype=plain.dtype).view(1000, 700), plain)
    with torch.no_grad():
        layer.weight.zero_()
    again = layer.weight.detach()
    assert again.data_ptr() != address
    assert not torch.frombuffer(_memory(again.data_ptr(), plain.nbytes), dtype=plain.dtype).any()


def _memory(address: int, nbytes: int) -> object:
    return (ctypes.c_byte * nbytes).from_address(address)


def test_no_room_for_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    layer = zinf_fx.offload(nn.Linear(700, 1000), store=tmp_path, placement="nvme")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"store map failed: .*free space there"):
        layer.weight.data_ptr()
