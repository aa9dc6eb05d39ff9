"""Small requests side by side in a file become one transfer, and each keeps an outcome of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gate import providers
from injecting import Fault, inject

from zinf_fx.errors import StoreError
from zinf_fx.native.engine import READ, WRITE, Engine, FileTicket, is_direct
from zinf_fx.runtime.memory.host import aligned_empty

PAGE = 4096
BLOCK = 64 << 10
COUNT = BLOCK // PAGE


class Bench:
    """One file, with its pages' expected content, on an engine that has one full block under way at a time."""

    def __init__(self, provider: str, path: Path) -> None:
        self.engine = Engine(provider, depth=1, block=BLOCK)
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct(provider) else 0), 0o600)
        self.file = self.engine.attach(self.fd, path, alignment=PAGE)
        self.data = aligned_empty(3 * BLOCK).random_(0, 256)
        self.submit(WRITE, self.data, 0).wait()

    def submit(self, operation: int, memory: torch.Tensor, offset: int) -> FileTicket:
        return self.file.submit(operation, memory.data_ptr(), offset, memory.numel(), memory)

    def hold_the_queue(self) -> FileTicket:
        """Whatever is submitted within the next moments becomes ready at once."""
        inject(self.engine, Fault("completion", delay=0.1))
        return self.submit(READ, aligned_empty(BLOCK), 2 * BLOCK)

    def transfers(self) -> int:
        return self.engine.counters().transfers

    def close(self) -> None:
        self.file.detach()
        self.engine.close()
        os.close(self.fd)


@pytest.fixture(params=providers())
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    try:
        made = Bench(request.param, tmp_path / "file")
    except StoreError as error:
        assert request.param == "libaio"
        pytest.skip(str(error))
    yield made
    made.close()


def pages() -> list[torch.Tensor]:
    """Return memory of one page each, apart from each other."""
    return [aligned_empty(PAGE).zero_() for _ in range(COUNT)]


def test_reads_side_by_side_are_one_transfer(bench: Bench):
    held, before, back = bench.hold_the_queue(), bench.transfers(), pages()
    tickets = [bench.submit(READ, page, i * PAGE) for i, page in enumerate(back)]
    for ticket in [held, *tickets]:
        ticket.wait()
    assert torch.cat(back).equal(bench.data[:BLOCK])
    assert bench.transfers() - before <= 2  # the held one may have been counted after


def test_writes_side_by_side_are_one_transfer(bench: Bench):
    held, before, new = bench.hold_the_queue(), bench.transfers(), [page.random_(0, 256) for page in pages()]
    for ticket in [held, *[bench.submit(WRITE, page, BLOCK + i * PAGE) for i, page in enumerate(new)]]:
        ticket.wait()
    assert bench.transfers() - before <= 2
    back = aligned_empty(BLOCK)
    bench.submit(READ, back, BLOCK).wait()
    assert back.equal(torch.cat(new))


def test_what_is_apart_stays_apart(bench: Bench):
    held, before, back = bench.hold_the_queue(), bench.transfers(), pages()
    offsets = [2 * i * PAGE for i in range(COUNT)]
    tickets = [bench.submit(READ, page, offset) for page, offset in zip(back, offsets, strict=True)]
    for ticket in [held, *tickets]:
        ticket.wait()
    assert bench.transfers() - before >= COUNT
    assert all(page.equal(bench.data[o : o + PAGE]) for page, o in zip(back, offsets, strict=True))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EINVAL, errno.EAGAIN])
def test_one_that_fails_fails_alone(bench: Bench, error: int):
    held, back = bench.hold_the_queue(), pages()
    inject(bench.engine, Fault("completion", nth=5, errno=error))  # of those after the held one, which is counted too
    tickets = [bench.submit(READ, page, i * PAGE) for i, page in enumerate(back)]
    held.wait()
    failed = []
    for i, ticket in enumerate(tickets):
        try:
            ticket.wait()
            assert back[i].equal(bench.data[i * PAGE : (i + 1) * PAGE])
        except StoreError as caught:
            assert (caught.errno, caught.offset, caught.length) == (error, i * PAGE, PAGE)
            failed.append(i)
    assert len(failed) == (0 if error == errno.EAGAIN else 1)


def test_memory_that_is_refused_harms_no_neighbour(bench: Bench):
    if not is_direct(bench.engine.provider):
        pytest.skip("the page cache takes any alignment")
    held, back = bench.hold_the_queue(), pages()
    odd = aligned_empty(2 * PAGE)
    tickets = [bench.submit(READ, page, i * PAGE) for i, page in enumerate(back[:3])]
    refused = bench.file.submit(READ, odd.data_ptr() + 1, 3 * PAGE, PAGE, odd)
    tickets += [bench.submit(READ, page, (4 + i) * PAGE) for i, page in enumerate(back[4:])]
    for ticket in [held, *tickets]:
        ticket.wait()
    with pytest.raises(StoreError) as caught:
        refused.wait()
    assert (caught.value.errno, caught.value.offset) == (errno.EINVAL, 3 * PAGE)
    assert torch.cat(back[:3] + back[4:]).equal(torch.cat([bench.data[: 3 * PAGE], bench.data[4 * PAGE : BLOCK]]))


def test_the_end_of_the_file_fails_only_what_lies_beyond(bench: Bench):
    held, back = bench.hold_the_queue(), pages()
    held.wait()
    os.ftruncate(bench.fd, 9 * PAGE + 100)
    inject(bench.engine, Fault("submission", delay=0.1))
    tickets = [bench.submit(READ, page, i * PAGE) for i, page in enumerate(back)]
    for i, ticket in enumerate(tickets):
        if i < 9:
            ticket.wait()
            assert back[i].equal(bench.data[i * PAGE : (i + 1) * PAGE])
        else:
            with pytest.raises(StoreError) as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, i * PAGE)


def test_eio_is_everybodys(bench: Bench):
    held, back = bench.hold_the_queue(), pages()
    inject(bench.engine, Fault("completion", nth=2, errno=errno.EIO))
    tickets = [bench.submit(READ, page, i * PAGE) for i, page in enumerate(back)]
    held.wait()
    with pytest.raises(StoreError, match="failed"):
        for ticket in tickets:
            ticket.wait()
    with pytest.raises(StoreError, match="an earlier request"):
        bench.submit(READ, back[0], 0).wait()
