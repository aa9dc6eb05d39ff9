"""What is open and in memory at a time while data files are written and read."""

from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from breaking_files import LosingPower, put
from torch import nn

from zinf_fx.checkpoint import files
from zinf_fx.checkpoint import save as save_module
from zinf_fx.checkpoint.catalog import look_at
from zinf_fx.checkpoint.copying import IN_FLIGHT, PieceMemory
from zinf_fx.checkpoint.entries import state_entries
from zinf_fx.checkpoint.files import Files
from zinf_fx.checkpoint.load import damages_of, load
from zinf_fx.checkpoint.save import laid_out


def data_files_open() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).endswith(".safetensors") for link in links if os.path.lexists(link))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))


def test_some_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tensors that lie side by side are in files of their own; a file that was closed is on the device."""
    monkeypatch.setattr(files, "AT_ONCE", 3)
    monkeypatch.setattr(save_module, "laid_out", partial(laid_out, largest=1))
    seen: list[int] = []

    class Counted(LosingPower):
        def start_write(self, *arguments: object) -> object:
            seen.append(data_files_open())
            return Files.start_write(self, *arguments)

    (root := tmp_path / "disk").mkdir()
    first, disk = net(1), Counted(root)
    save_module.save(root / "saved", state_entries(first, None, {}), disk)
    assert len(list((root / "saved").glob("data-*"))) == 6 and max(seen) == 3
    for image in disk.after():
        second = net(2)
        directory = put(image, tmp_path / "image") / "saved"
        load(directory, state_entries(second, None, {}), ["optimizer"], lambda nbytes: seen.append(data_files_open()))
        assert all(map(torch.equal, second.parameters(), first.parameters()))
        assert damages_of(directory, look_at(directory).manifest, lambda nbytes: seen.append(data_files_open())) == []
    assert max(seen) == 3 and data_files_open() == 0


def test_memory_that_is_free_is_bounded_over_all_sizes():
    memory = PieceMemory()
    references = []
    for size in (1 << power for power in range(12, 25)):
        taken = [memory.take(size) for _ in range(IN_FLIGHT // size)]
        references += map(weakref.ref, taken)
        while taken:
            memory.give(taken.pop())
        again = memory.take(size)
        assert any(reference() is again for reference in references)
    assert sum(tensor.nbytes for reference in references if (tensor := reference()) is not None) <= IN_FLIGHT
