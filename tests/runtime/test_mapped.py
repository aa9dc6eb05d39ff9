"""Memory of mapped checkpoints goes back, and nothing of it is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from forked import Running

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.mapped import MappedFiles, _bytes_of_files, mapped_empty
from zinf_fx.sizes import HUGE_PAGE, PAGE

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
AREA = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ ...p .*\n((?:[A-Z]\w+: .*\n)+)", re.MULTILINE)


def _written(tmp_path: Path) -> Path:
    values = {"one": torch.arange(4 << 20), "other": torch.arange(1 << 20)}
    safetensors.torch.save_file(values, tmp_path / "file.safetensors")
    return tmp_path / "file.safetensors"


def test_pages_that_were_read_go_back(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(16 << 20, tmp_path)
    before = _bytes_of_files()
    one = file.get_tensor("one")
    assert one.sum() == (4 << 20) * ((4 << 20) - 1) // 2
    assert _bytes_of_files() - before >= 32 << 20
    mapped.trim()
    assert _bytes_of_files() - before < 8 << 20
    assert torch.equal(one, torch.arange(4 << 20))


def test_pages_that_were_changed_stay(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(16 << 20, tmp_path)
    one, other = file.get_tensor("one"), file.get_tensor("other")
    other[7] = -1
    assert one.sum() == (4 << 20) * ((4 << 20) - 1) // 2
    mapped.trim()
    assert other[7] == -1 and torch.equal(one, torch.arange(4 << 20))


def test_nothing_happens_before_it_is_time(tmp_path: Path):
    file = safetensors.safe_open(_written(tmp_path), framework="pt")
    mapped = MappedFiles(1 << 30, tmp_path)
    before = _bytes_of_files()
    file.get_tensor("one").sum()
    mapped.trim()
    assert _bytes_of_files() - before >= 32 << 20


# The allocator has 64 MiB that were written and freed, which it would give out next.
FRESH = """
import os, sys
import torch
from zinf_fx.runtime.memory.heap import hold_little
from zinf_fx.runtime.memory.mapped import mapped_empty
nbytes = int(sys.argv[1])
hold_little()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
freed = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(8)]
del freed
mapped_empty(nbytes).fill_(1)
before = resident()
memory = mapped_empty(nbytes).fill_(1)
print(resident() - before)
del memory
print(resident() - before)
"""


@pytest.mark.parametrize("nbytes", [1 << 20, (8 << 20) + PAGE])
def test_mapped_memory_is_fresh_and_goes_back(nbytes: int):
    end = Running(FRESH, nbytes).end()
    assert end.returncode == 0, end
    with_it, after = map(int, end.stdout.split())
    assert nbytes / 2 < with_it < nbytes * 1.2 and after < nbytes / 2


def test_mapped_memory_has_its_bytes_and_is_aligned():
    for nbytes, alignment in ((0, 1), (5000, PAGE), (HUGE_PAGE + 5000, HUGE_PAGE)):
        memory = mapped_empty(nbytes)
        assert (memory.dtype, memory.numel(), memory.data_ptr() % alignment) == (torch.uint8, nbytes, 0)
        assert memory.storage_offset() == 0
    with pytest.raises(StoreError, match="72057594037927936 bytes: none of this size is there"):
        mapped_empty(1 << 56)


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages")
def test_mapped_memory_is_in_huge_pages_and_no_byte_more():
    memory = mapped_empty(2 * HUGE_PAGE + PAGE).fill_(1)
    first = {start: lines for start, lines in AREA.findall(Path("/proc/self/smaps").read_text())}
    area = first[f"{memory.data_ptr():x}"]
    assert " hg " in area and re.search(rf"^Size: +{2 * HUGE_PAGE >> 10} kB", area, re.MULTILINE)
    behind = first[f"{memory.data_ptr() + 2 * HUGE_PAGE:x}"]
    assert " nh " in behind
