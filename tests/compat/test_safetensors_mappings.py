"""Memory of mapped checkpoints goes back, and nothing of it is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from zinf_fx.compat.safetensors import MappedFiles, _bytes_of_files
from zinf_fx.runtime.memory.host import memory_of_file


def _written(tmp_path: Path) -> Path:
    values = {"one": torch.arange(4 << 20), "other": torch.arange(1 << 20)}
    safetensors.torch.save_file(values, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


def test_pages_that_were_read_go_back(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(16 << 20, partial(memory_of_file, tmp_path))
    before = _bytes_of_files()
    tensor = file.get_tensor("one")
    assert tensor.sum() == (4 << 20) * ((4 << 20) - 1) // 2
    assert _bytes_of_files() - before >= 32 << 20
    mapped.trim()
    assert _bytes_of_files() - before < 8 << 20
    assert torch.equal(tensor, torch.arange(4 << 20))


def test_pages_that_were_changed_stay(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(16 << 20, partial(memory_of_file, tmp_path))
    tensor, other = file.get_tensor("one"), file.get_tensor("other")
    other[7] = -1
    assert tensor.sum() == (4 << 20) * ((4 << 20) - 1) // 2
    mapped.trim()
    assert other[7] == -1 and torch.equal(tensor, torch.arange(4 << 20))


def test_nothing_happens_before_it_is_time(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(1 << 30, partial(memory_of_file, tmp_path))
    before = _bytes_of_files()
    file.get_tensor("one").sum()
    mapped.trim()
    assert _bytes_of_files() - before >= 32 << 20
