"""Mapped memory is fresh, aligned, in huge pages, and goes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from forked import Running

from zinf_fx.errors import StoreError
from zinf_fx.runtime.memory.host import mapped_empty
from zinf_fx.sizes import HUGE_PAGE, PAGE

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
AREA = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ ...p .*\n((?:[A-Z]\w+: .*\n)+)", re.MULTILINE)


# The allocator has 64 MiB that were written and freed, which it would give out next.
FRESH = """
import os, sys
import torch
from zinf_fx.runtime.memory.process import hold_little
from zinf_fx.runtime.memory.host import mapped_empty
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
