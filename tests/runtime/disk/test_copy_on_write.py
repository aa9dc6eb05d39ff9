"""Bytes that are kept stay as they are, whatever is written; space is given back when nobody has it."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch
from gate import slow

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import crc32c
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import PAGE

PAGES = 12


class Written:
    """Some bytes in a store, beside what they should be."""

    def __init__(self, store: Store, pages: int = PAGES, seed: int = 0) -> None:
        self.store, self.in_store = store, CopyOnWrite(store, pages * PAGE)
        self.random = random.Random(seed)
        self.expected = bytearray(pages * PAGE)
        self.kept: dict[object, bytes] = {}
        self.write(0, pages)

    def write(self, first: int, pages: int) -> None:
        content = self.random.randbytes(pages * PAGE)
        memory = aligned_empty(len(content))
        memory[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.in_store.write(memory.data_ptr(), first * PAGE, len(content), owner=memory).wait()
        self.expected[first * PAGE : first * PAGE + len(content)] = content

    def read(self, first: int = 0, pages: int | None = None) -> bytes:
        nbytes = (len(self.expected) // PAGE - first if pages is None else pages) * PAGE
        memory = aligned_empty(nbytes)
        self.in_store.read(memory.data_ptr(), first * PAGE, nbytes, owner=memory).wait()
        return bytes(memory[:nbytes].numpy())

    def freeze(self, keeper: object, replaced: tuple[object, ...] = (), *, reserve: bool = True) -> None:
        self.in_store.freeze(keeper, replaced, reserve=reserve)
        self.kept[keeper] = bytes(self.expected)

    def release(self, keeper: object) -> None:
        self.in_store.release(keeper)
        del self.kept[keeper]

    def check(self) -> None:
        assert self.read() == self.expected
        assert self.in_store.checksum(0, len(self.expected)) == crc32c(bytes(self.expected))
        for keeper, expected in self.kept.items():
            read_back = bytearray(len(expected))
            for run, crc in self.in_store.places(keeper, 0, len(expected)):
                with self.store.volumes[run.volume].path.open("rb") as file:
                    content = os.pread(file.fileno(), run.nbytes, run.offset)
                read_back[run.start : run.start + run.nbytes] = content
                assert crc == crc32c(content)
            assert read_back == expected


@pytest.mark.parametrize("several", [slow(1), 2])
@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 6))])
def test_whatever_is_written_frozen_and_released(tmp_path: Path, seed: int, several: int):
    """Three at a time, of which the oldest is replaced now and then, so that extents change places."""
    choose = random.Random(seed)
    folders = [tmp_path / str(number) for number in range(several)]
    for folder in folders:
        folder.mkdir()
    with Store(folders, weights=[1.0] * several) as store:
        all_written = [Written(store, PAGES, seed), Written(store, 2100, seed)]
        for number in range(40):
            for written in all_written:
                pages = len(written.expected) // PAGE
                keepers = list(written.kept)
                action = choose.random()
                if action < 0.5:
                    first = choose.randrange(pages)
                    written.write(first, choose.randint(1, pages - first))
                elif action < 0.6:
                    written.write(0, pages)
                elif action < 0.75 and len(keepers) < 3:
                    written.freeze(number, reserve=choose.random() < 0.6)
                elif action < 0.85 and keepers:
                    written.freeze(number, (keepers[0],))
                    if choose.random() < 0.8:
                        written.release(keepers[0])
                    written.in_store.settle()
                elif action < 0.9:
                    written.freeze(number)
                    written.release(number)
                    written.in_store.settle()
                elif keepers:
                    written.release(choose.choice(keepers))
                written.check()
        for written in all_written:
            keepers = list(written.kept)
            choose.shuffle(keepers)
            for keeper in keepers[1:]:
                written.release(keeper)
            written.in_store.free()
            for keeper in keepers[:1]:
                written.release(keeper)
        assert store.in_use == 0


def test_what_is_rewritten_takes_twice_the_space_and_no_more(tmp_path: Path):
    """Each generation replaces the one before, as checkpoints in one directory do."""
    with Store(tmp_path) as store:
        written = Written(store)
        for number in range(5):
            written.freeze(number, (number - 1,))
            if number:
                written.release(number - 1)
            written.in_store.settle()
            for first in range(0, PAGES, 4):  # window by window
                written.write(first, 4)
                assert written.read(first, 4) == written.expected[first * PAGE : (first + 4) * PAGE]
            written.check()
            assert store.in_use == 2 * PAGES * PAGE
            assert len(written.in_store._live) == 1
        assert store.volumes[0].size <= 4 << 20


def test_what_is_not_to_be_rewritten_reserves_nothing(tmp_path: Path):
    with Store(tmp_path) as store:
        written = Written(store)
        for number in range(3):
            written.freeze(number, reserve=False)
        assert store.in_use == PAGES * PAGE
        written.write(3, 2)
        written.check()
        assert store.in_use == 2 * PAGES * PAGE
        for number in range(3):
            written.release(number)
        assert store.in_use == PAGES * PAGE
        written.check()


def test_without_room_nothing_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Store(tmp_path) as store:
        written = Written(store)
        written.freeze("first")
        written.write(0, 5)
        before = store.in_use

        def full(nbytes: int) -> None:
            raise StoreError("allocate", "somewhere", "no space", errno=errno.ENOSPC)

        monkeypatch.setattr(store, "allocate", full)
        with pytest.raises(StoreError, match="no space"):
            written.freeze("second")
        assert store.in_use == before
        written.write(5, PAGES - 5)  # what was reserved is there
        written.check()


def test_freed_bytes_stay_while_somebody_keeps_them(tmp_path: Path):
    with Store(tmp_path) as store:
        written = Written(store)
        written.freeze("first")
        written.write(2, 3)
        written.in_store.free()
        assert store.in_use == PAGES * PAGE
        written.in_store.release("first")
        assert store.in_use == 0
