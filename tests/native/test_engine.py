"""The engine works alone, on plain files, with every provider that works here and every kind of fault."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gate import providers
from injecting import Fault, clear_faults, faults_fired, inject, inject_setup_fault

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.native.engine import READ, WRITE, Engine, File, is_direct, provider_names
from zinf_fx.runtime.memory.host import aligned_empty

BLOCK = 64 << 10


def works(provider: str) -> bool:
    try:
        Engine(provider).close()
    except StoreError:
        return False
    return True


PROVIDERS = [name for name in provider_names() if works(name)]


class Bench:
    """An engine on one file, and memory to move."""

    def __init__(self, provider: str, path: Path, depth: int = 8, block: int = BLOCK) -> None:
        self.engine = Engine(provider, depth=depth, block=block)
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if is_direct(provider) else 0)
        self.fd = os.open(path, flags, 0o600)
        self.file: File = self.engine.attach(self.fd, path, alignment=4096)

    def write(self, data: torch.Tensor, offset: int = 0):
        return self.file.submit(WRITE, data.data_ptr(), offset, data.numel(), data)

    def read(self, data: torch.Tensor, offset: int = 0):
        return self.file.submit(READ, data.data_ptr(), offset, data.numel(), data)

    def close(self) -> None:
        self.file.detach()
        self.engine.close()
        os.close(self.fd)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    data = aligned_empty(nbytes)
    return data.random_(0, 256, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=providers(PROVIDERS))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path / "file")
    yield made
    made.close()


@pytest.fixture(params=providers(PROVIDERS))
def unmerged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Its blocks are so large that each is a transfer."""
    made = Bench(request.param, tmp_path / "file", block=1 << 20)
    yield made
    made.close()


def test_the_system_calls_work_without_libaio():
    assert {"aio", "threads", "buffered"} <= set(PROVIDERS)


def test_an_unknown_provider_names_the_accepted_ones():
    with pytest.raises(ConfigError, match="accepted: libaio, aio, threads, buffered"):
        Engine("floppy")


@pytest.mark.parametrize("nbytes", [4096, BLOCK, BLOCK + 4096, 37 * BLOCK - 4096])
def test_round_trip(bench: Bench, nbytes: int):
    data, back = random_bytes(nbytes), aligned_empty(nbytes)
    bench.write(data, 8192).wait()
    ticket = bench.read(back, 8192)
    ticket.wait()
    ticket.wait()
    assert ticket.done()
    assert back.equal(data)
    counters = bench.engine.counters()
    assert (counters.bytes_written, counters.bytes_read) == (nbytes, nbytes)
    assert counters.read_seconds > 0 and counters.write_seconds > 0


def test_many_requests_at_a_time(bench: Bench):
    parts = [random_bytes(4096 * (1 + i % 40), seed=i) for i in range(200)]
    offsets = torch.tensor([0] + [part.numel() for part in parts]).cumsum(0).tolist()
    for ticket in [bench.write(part, offset) for part, offset in zip(parts, offsets, strict=False)]:
        ticket.wait()
    back = [aligned_empty(part.numel()) for part in parts]
    for ticket in reversed([bench.read(part, offset) for part, offset in zip(back, offsets, strict=False)]):
        ticket.wait()
    assert all(a.equal(b) for a, b in zip(parts, back, strict=True))


def test_waiting_for_one_waits_for_no_other(bench: Bench):
    data = random_bytes(BLOCK)
    bench.write(data).wait()
    inject(bench.engine, Fault("completion", nth=1, count=7, delay=0.8))
    slow = [bench.read(aligned_empty(BLOCK)) for _ in range(7)]
    time.sleep(0.2)  # until the device is done with them: the delays are theirs
    quick = [bench.read(aligned_empty(BLOCK)) for _ in range(57)]
    quick[-1].wait()
    assert not any(ticket.done() for ticket in slow)
    for ticket in slow:
        ticket.wait()


def test_a_span_ends_when_the_transfer_did_and_not_when_somebody_looks(bench: Bench):
    before = time.perf_counter()
    tickets = [bench.write(random_bytes(BLOCK), i * BLOCK) for i in range(3)]
    spans = [ticket.span() for ticket in tickets]
    for ticket in tickets:
        ticket.wait()
    done = time.perf_counter()
    time.sleep(0.05)
    assert all(before <= began < ended <= done for began, ended in (span.seconds() for span in spans))
    inject(bench.engine, Fault("completion", delay=0.1))
    slow = bench.read(aligned_empty(BLOCK))
    assert slow.span().seconds() is None
    slow.wait()
    began, ended = slow.span().seconds()
    assert began >= done + 0.05 and ended - began >= 0.1


def test_a_span_keeps_no_memory(bench: Bench):
    data = random_bytes(BLOCK)
    kept = weakref.ref(data)
    ticket = bench.write(data)
    span = ticket.span()
    ticket.wait()
    del data, ticket
    assert kept() is None and span.seconds() is not None


def test_a_ticket_that_is_waited_for_overtakes_the_queue(bench: Bench):
    data = random_bytes(BLOCK)
    bench.write(data).wait()
    inject(bench.engine, Fault("completion", nth=1, count=64, delay=0.05))
    tickets = [bench.read(aligned_empty(BLOCK)) for _ in range(64)]
    tickets[-1].wait()
    assert sum(ticket.done() for ticket in tickets) < 32
    for ticket in tickets:
        ticket.wait()


def test_reads_begin_before_the_writes_that_wait(bench: Bench):
    data = random_bytes(BLOCK)
    bench.write(data).wait()
    inject(bench.engine, Fault("completion", nth=1, count=64, operation="write", delay=0.05))
    writes = [bench.write(data, (i + 1) * BLOCK) for i in range(64)]
    read = bench.read(aligned_empty(BLOCK))
    while not read.done():  # who waits for it would have it overtake all
        time.sleep(0.001)
    assert sum(write.done() for write in writes) < 32
    for write in writes:
        write.wait()


def test_other_python_threads_run_while_one_waits(bench: Bench):
    data = random_bytes(4096)
    inject(bench.engine, Fault("completion", delay=0.3))
    ticket = bench.write(data)
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    turns = 0
    while waiter.is_alive():
        turns += 1
        time.sleep(0.01)
    assert turns > 3


@pytest.mark.parametrize("stage", ["submission", "completion"])
@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EINTR])
def test_transient_errors_are_retried(bench: Bench, stage: str, error: int):
    data, back = random_bytes(5 * BLOCK), aligned_empty(5 * BLOCK)
    inject(bench.engine, Fault(stage, nth=2, count=3, errno=error))
    bench.write(data).wait()
    bench.read(back).wait()
    assert back.equal(data)
    assert faults_fired(bench.engine) == 3


def test_retries_have_a_bound(bench: Bench):
    inject(bench.engine, Fault("submission", nth=1, count=1000, errno=errno.EAGAIN))
    with pytest.raises(StoreError) as caught:
        bench.write(random_bytes(4096)).wait()
    assert caught.value.errno == errno.EAGAIN
    assert 10 < faults_fired(bench.engine) < 50


@pytest.mark.parametrize("length", [4096, 12288, 5000, BLOCK - 4096])
def test_short_transfers_go_on(bench: Bench, length: int):
    if length % 4096 and is_direct(bench.engine.provider):
        pytest.skip("a direct transfer of an unaligned length is an error of its own")
    data, back = random_bytes(5 * BLOCK), aligned_empty(5 * BLOCK)
    inject(bench.engine, Fault("submission", nth=2, count=20, length=length))
    bench.write(data).wait()
    bench.read(back).wait()
    assert back.equal(data)


def test_a_batch_may_be_submitted_in_part(unmerged: Bench):
    data, back = random_bytes(12 << 20), aligned_empty(12 << 20)
    inject(unmerged.engine, Fault("submission", nth=3, count=9))
    unmerged.write(data).wait()
    unmerged.read(back).wait()
    assert back.equal(data)
    assert faults_fired(unmerged.engine) == 9


@pytest.mark.parametrize("stage", ["submission", "completion"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EFBIG, errno.EINVAL, errno.EDQUOT, errno.ENODEV])
def test_an_error_names_everything_and_the_engine_goes_on(bench: Bench, stage: str, error: int):
    data, back = random_bytes(4 * BLOCK), aligned_empty(4 * BLOCK)
    inject(bench.engine, Fault(stage, nth=3, errno=error, operation="write"))
    ticket = bench.write(data, 4096)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            ticket.wait()
    raised = caught.value
    assert (raised.operation, raised.path, raised.errno) == ("write", str(bench.file.path), error)
    assert raised.length == BLOCK and (raised.offset - 4096) % BLOCK == 0
    assert os.strerror(error) in str(raised) and f"offset {raised.offset}" in str(raised)
    bench.write(data).wait()
    bench.read(back).wait()
    assert back.equal(data)


def test_eio_poisons_the_file(bench: Bench):
    data = random_bytes(BLOCK)
    bench.write(data).wait()
    inject(bench.engine, Fault("completion", errno=errno.EIO))
    with pytest.raises(StoreError, match="the device failed"):
        bench.read(aligned_empty(BLOCK)).wait()
    for operation in (bench.read, bench.write):
        with pytest.raises(StoreError, match="an earlier request") as caught:
            operation(data).wait()
        assert caught.value.errno == errno.EIO


def test_the_end_of_the_file_is_an_error(bench: Bench):
    bench.write(random_bytes(BLOCK)).wait()
    os.truncate(bench.file.path, BLOCK - 100)
    with pytest.raises(StoreError, match="the file ended") as caught:
        bench.read(aligned_empty(BLOCK)).wait()
    assert caught.value.errno == errno.ENODATA


def test_real_limits_arrive_in_the_completion(bench: Bench):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StoreError) as caught:
            bench.write(random_bytes(BLOCK), 1 << 20).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


def test_misalignment_is_reported(bench: Bench):
    if not is_direct(bench.engine.provider):
        pytest.skip("the page cache takes any alignment")
    data = random_bytes(8192)
    with pytest.raises(StoreError, match="alignment") as caught:
        bench.file.submit(WRITE, data.data_ptr() + 1, 0, 4096, data).wait()
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("stage", ["submission", "completion"])
def test_every_single_fault_ends_in_success_or_in_its_own_error(bench: Bench, stage: str):
    data = random_bytes(3 * BLOCK)
    for error in (errno.EAGAIN, errno.ENOSPC):
        nth, fired = 0, True
        while fired:
            nth += 1
            back = aligned_empty(3 * BLOCK).zero_()
            before = faults_fired(bench.engine)
            inject(bench.engine, Fault(stage, nth=nth, errno=error))
            failed = 0
            for transfer in (lambda: bench.write(data), lambda back=back: bench.read(back)):
                try:
                    transfer().wait()
                except StoreError as caught:
                    assert caught.errno == error
                    failed += 1
            fired = faults_fired(bench.engine) > before
            clear_faults(bench.engine)
            assert failed == (1 if fired and error == errno.ENOSPC else 0)
            assert failed or back.equal(data)
        assert nth == 7  # three blocks each way


@pytest.mark.parametrize("provider", providers(PROVIDERS))
def test_every_set_up_call_may_fail(provider: str):
    """Calls inside a provider are made to fail where the sanitizers look on, in test_sanitizers.py."""
    inject_setup_fault(0, 0)
    Engine(provider).close()
    calls = inject_setup_fault(0, 0)
    assert calls == 2
    try:
        for nth in range(1, calls + 1):
            inject_setup_fault(nth, errno.ENOMEM)
            with pytest.raises(StoreError) as caught:
                Engine(provider)
            assert caught.value.errno == errno.ENOMEM
    finally:
        inject_setup_fault(0, 0)
    Engine(provider).close()


def test_close_finishes_what_is_under_way(bench: Bench):
    data = random_bytes(20 * BLOCK)
    inject(bench.engine, Fault("completion", count=20, delay=0.05))
    ticket = bench.write(data)
    bench.engine.close()
    assert ticket.done()
    ticket.wait()
    with pytest.raises(StoreError, match="closed"):
        bench.write(data)
    assert bench.engine.counters().bytes_written == data.numel()


def test_a_dropped_ticket_keeps_its_memory_until_the_transfer_is_over(bench: Bench):
    class Owner:
        pass

    data, owner = random_bytes(BLOCK), Owner()
    alive = weakref.ref(owner)
    inject(bench.engine, Fault("completion", delay=0.1))
    bench.file.submit(WRITE, data.data_ptr(), 0, BLOCK, owner)  # the ticket is dropped at once, and nobody waits
    del owner
    assert alive() is not None
    bench.file.detach()
    assert alive() is None


def test_an_interrupted_reader_loses_its_memory_only_when_the_disk_is_done(bench: Bench):
    data = random_bytes(BLOCK)
    bench.write(data).wait()
    memory = aligned_empty(BLOCK)
    alive = weakref.ref(memory)
    inject(bench.engine, Fault("completion", operation="read", delay=0.5))

    def read(memory: torch.Tensor) -> None:
        bench.file.submit(READ, memory.data_ptr(), 0, BLOCK, memory).wait()

    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
        read(memory)
    del memory
    assert alive() is not None
    bench.file.detach()
    assert alive() is None


def test_detaching_from_a_stuck_device_names_it_and_can_be_interrupted(bench: Bench, caplog, monkeypatch):
    monkeypatch.setattr("zinf_fx.native.engine.WAIT_SLICE", 0.05)
    monkeypatch.setattr("zinf_fx.native.engine.STUCK_AFTER", 0.1)
    inject(bench.engine, Fault("completion", delay=1.0))
    data = random_bytes(BLOCK)
    ticket = bench.write(data)
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        bench.file.detach()
    assert not ticket.done() and f"everything under way on {bench.file.path}" in caplog.text
    ticket.wait()


def test_a_dropped_ticket_logs_its_error(bench: Bench, caplog: pytest.LogCaptureFixture):
    inject(bench.engine, Fault("completion", errno=errno.ENOSPC))
    data = random_bytes(BLOCK)
    bench.write(data)
    bench.file.detach()
    assert "nobody waited" in caplog.text and "ENOSPC" not in caplog.text and "full" in caplog.text


def test_a_stuck_device_is_named(bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zinf_fx.native.engine.WAIT_SLICE", 0.1)
    monkeypatch.setattr("zinf_fx.native.engine.STUCK_AFTER", 0.2)
    inject(bench.engine, Fault("completion", delay=0.3))
    bench.write(random_bytes(BLOCK), 8192).wait()
    assert f"write of {BLOCK} bytes at offset 8192 of {bench.file.path}" in caplog.text


def test_idle_costs_no_processor_time(bench: Bench):
    bench.write(random_bytes(BLOCK)).wait()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.25)
    assert time.process_time() - before < 0.01


def test_a_forked_child_is_refused_and_harms_nothing(bench: Bench):
    data, back = random_bytes(BLOCK), aligned_empty(BLOCK)
    bench.write(data).wait()
    inject(bench.engine, Fault("completion", delay=0.3))
    ticket = bench.read(back)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            bench.read(aligned_empty(BLOCK))
        except StoreError as error:
            status = 0 if error.errno == errno.ECHILD else 2
        try:
            ticket.wait()
            status = 3
        except StoreError as error:
            status = status or (0 if error.errno == errno.ECHILD else 4)
        bench.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ticket.wait()
    assert back.equal(data)


def test_a_new_engine_takes_over_the_kernel_context_of_a_closed_one(tmp_path: Path):
    """The kernel takes tens of milliseconds to give one up. A forked child has none of its parent's."""

    def contexts() -> int:
        return Path("/proc/self/maps").read_text().count("[aio]")

    def used() -> int:
        bench, data, back = Bench("aio", tmp_path / "file"), random_bytes(BLOCK), aligned_empty(BLOCK)
        bench.write(data).wait()
        bench.read(back).wait()
        assert back.equal(data)
        kernel_contexts = contexts()
        bench.close()
        return kernel_contexts

    first = used()
    assert first == used() == used() == contexts()
    child = os.fork()
    if child == 0:
        os._exit(0 if used() == first + 1 else 1)  # its parent's are mapped there, too
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STUB = r"""
#include <errno.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#define RETURN(call) long r = (call); return r < 0 ? -errno : (int)r
int io_setup(int n, aio_context_t *c) { RETURN(syscall(SYS_io_setup, n, c)); }
int io_destroy(aio_context_t c) { RETURN(syscall(SYS_io_destroy, c)); }
int io_submit(aio_context_t c, long n, struct iocb **p) { RETURN(syscall(SYS_io_submit, c, n, p)); }
int io_getevents(aio_context_t c, long least, long most, struct io_event *e, struct timespec *t)
{ RETURN(syscall(SYS_io_getevents, c, least, most, e, t)); }
"""


def test_libaio_is_found_at_run_time(tmp_path: Path):
    """With a library of libaio's name and interface in the search path, the engine uses that."""
    source = tmp_path / "stub.c"
    source.write_text(STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libaio.so.1t64", source], check=True)
    program = (
        "import sys; from pathlib import Path; from zinf_fx.runtime.disk.store import Store\n"
        "from zinf_fx.runtime.memory.host import aligned_empty\n"
        "store = Store(sys.argv[1]); extent = store.allocate(100000)\n"
        "data, back = aligned_empty(100000).random_(0, 256), aligned_empty(100000)\n"
        "store.write(extent, data.data_ptr(), 0, 100000).wait()\n"
        "store.read(extent, back.data_ptr(), 0, 100000).wait()\n"
        "assert back.equal(data); print(store.provider)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("ZINF_IO_PROVIDER", None)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "libaio"
