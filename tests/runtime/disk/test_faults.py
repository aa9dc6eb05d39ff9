"""Whatever fails, at whatever place: the right bytes, or an error that says what and where; never a hang."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import forked
import pytest
import torch
from gate import named, providers
from injecting import Fault, clear_faults, faults_fired, inject, inject_setup_fault

from zinf_fx.cli import main
from zinf_fx.errors import StoreError
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.host import aligned_empty

PAGE = 4096
BLOCK = 64 << 10
NBYTES = 3 * BLOCK + 2 * PAGE


def open_store(place: Path, provider: str) -> Store:
    try:
        return Store(place, provider=provider, block=BLOCK, depth=2)
    except StoreError as error:
        assert provider == "libaio"
        pytest.skip(str(error))


@pytest.fixture(params=providers())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path, request.param)
    yield made
    made.close()


@cache
def _noise(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(0))


def filled(nbytes: int, seed: int) -> torch.Tensor:
    """Random bytes, which begin elsewhere for each seed: to draw them takes longer than to write and to read them."""
    return aligned_empty(nbytes).copy_(_noise(nbytes).roll(seed))


def workload(store: Store, seed: int) -> list[StoreError]:
    """Writes in whole and in part and reads all back, a few at a time. Returns the errors; checks every other byte."""
    errors: list[StoreError] = []
    extents = [store.allocate(NBYTES) for _ in range(3)]
    expected = [filled(NBYTES, seed + i) for i in range(3)]
    good = [True] * 3

    def finish(tickets: list, reading: bool = False) -> None:
        for i, ticket in enumerate(tickets):
            try:
                ticket.wait()
            except StoreError as error:
                errors.append(error)
                good[i] &= reading
                assert error.offset is not None and error.length and error.path == str(store.path)
                assert extents[i].offset <= error.offset < extents[i].offset + extents[i].capacity

    finish([store.write(e, d.data_ptr(), 0, NBYTES) for e, d in zip(extents, expected, strict=True)])
    parts = [filled(BLOCK + PAGE, seed + 10 + i) for i in range(3)]
    finish([store.write(e, p.data_ptr(), BLOCK, p.numel()) for e, p in zip(extents, parts, strict=True)])
    for data, part in zip(expected, parts, strict=True):
        data[BLOCK : BLOCK + part.numel()] = part
    # A write that failed leaves its bytes undefined; with checksums, what can be read is either right or refused.
    back = [aligned_empty(NBYTES) for _ in extents]
    before = len(errors)
    finish([store.read(e, b.data_ptr(), 0, NBYTES) for e, b in zip(extents, back, strict=True)], reading=True)
    if len(errors) == before:
        assert all(b.equal(d) for b, d, fine in zip(back, expected, good, strict=True) if fine)
    for extent in extents:
        store.free(extent)
    return errors


FAULTS = {
    "EAGAIN": {"errno": errno.EAGAIN},
    "EINTR": {"errno": errno.EINTR},
    "EIO": {"errno": errno.EIO},
    "ENOSPC": {"errno": errno.ENOSPC},
    "EDQUOT": {"errno": errno.EDQUOT},
    "EFBIG": {"errno": errno.EFBIG},
    "ENODEV": {"errno": errno.ENODEV},
    "short": {"length": PAGE},
    "late": {"delay": 0.003},
    "partial": {},
}
HARMLESS = ("EAGAIN", "EINTR", "short", "late", "partial")
AS_WITHOUT_SPACE = {"EDQUOT", "EFBIG", "ENODEV"}


@pytest.mark.parametrize("kind", named(FAULTS, FAULTS.keys() - AS_WITHOUT_SPACE))
@pytest.mark.parametrize("stage", ["submission", "completion"])
def test_the_nth_fault_for_every_n(tmp_path: Path, store: Store, stage: str, kind: str):
    """n goes upwards until no fault fires: every transfer of the workload was hit once, by itself."""
    if (stage, kind) == ("completion", "partial"):
        pytest.skip("a completion without a fault")
    n, fired = 0, True
    while fired:
        n += 1
        before = faults_fired(store)
        inject(store, Fault(stage, nth=n, **FAULTS[kind]))
        errors = workload(store, seed=n)
        fired = faults_fired(store) > before
        clear_faults(store)
        injected = FAULTS[kind].get("errno")
        if not fired or kind in HARMLESS:
            assert not errors
            continue
        assert errors and errors[0].errno == injected
        # What the failed write left behind isn't taken for what should be there.
        assert {error.errno for error in errors} <= {injected, errno.EBADMSG}
        if kind == "EIO":  # the file is poisoned: the rest of the workload was refused, and so is the next one
            assert len(workload(store, seed=n)) == 9
            store.close()
            store = open_store(tmp_path, store.provider)
    assert n > 3 * (4 + 2 + 4)
    store.close()


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN, errno.EPERM])
@pytest.mark.parametrize("provider", ["auto", *providers()])
def test_every_set_up_call_of_a_store_may_fail(tmp_path: Path, provider: str, error: int):
    """It falls back to the next provider or raises, and leaves nothing behind."""
    try:
        for nth in range(1, 200):
            inject_setup_fault(nth, error)
            try:
                with Store(tmp_path, provider=provider) as store:
                    inject_setup_fault(0, 0)
                    assert not workload(store, seed=nth)
                    refused = dict(store.refused)
            except StoreError as caught:
                assert provider != "auto" and "no I/O provider works here" in str(caught)
                refused = {provider: str(caught)}
            assert not list(tmp_path.iterdir())
            if not any(os.strerror(error) in reason for reason in refused.values()):
                break
        else:
            pytest.fail("a fault fires for ever")
        assert nth > 3 or provider == "libaio"
    finally:
        inject_setup_fault(0, 0)


def test_strict_direct_refuses_what_would_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zinf_fx.runtime.disk.probe.direct_alignment", lambda fd: None)
    with Store(tmp_path) as store:
        assert store.provider == "buffered" and len(store.refused) == 3
    with pytest.raises(StoreError, match=r"no direct I/O.*strict_direct=False"):
        Store(tmp_path, strict_direct=True)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_disappears(store: Store, tmp_path: Path):
    """The data file lives on without its name: nothing is lost, and closing finds nothing to remove."""
    assert not workload(store, seed=1)
    extent = store.allocate(NBYTES)
    data, back = filled(NBYTES, 2), aligned_empty(NBYTES)
    store.write(extent, data.data_ptr(), 0, NBYTES).wait()
    shutil.rmtree(store.path.parent)
    assert not workload(store, seed=3)
    store.allocate(64 << 20)
    store.read(extent, back.data_ptr(), 0, NBYTES).wait()
    assert back.equal(data)
    store.close()
    assert not list(tmp_path.iterdir())


def test_fork_while_transfers_are_under_way(store: Store):
    """Children come and go during writes and reads: no wrong byte in the parent, no access from the child."""
    extents = [store.allocate(NBYTES) for _ in range(16)]
    data = [filled(NBYTES, i) for i in range(16)]
    back = [aligned_empty(NBYTES) for _ in range(16)]
    inject(store, Fault("completion", count=30, delay=0.01))
    for transfer, memory in ((store.write, data), (store.read, back)):
        tickets = []
        for extent, buffer in zip(extents, memory, strict=True):
            tickets.append(transfer(extent, buffer.data_ptr(), 0, NBYTES))
            child = os.fork()
            if child == 0:
                try:
                    tickets[-1].wait()
                    os._exit(0 if tickets[-1].done() else 1)
                except StoreError as error:
                    os._exit(0 if error.errno == errno.ECHILD else 2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for ticket in tickets:
            ticket.wait()
    assert all(a.equal(b) for a, b in zip(data, back, strict=True))


def test_one_ticket_while_64_others_are_queued(store: Store):
    """It returns as soon as its own bytes are there: the others, before it and after it, are held back for longer."""
    extents = [store.allocate(BLOCK) for _ in range(65)]
    data = [filled(BLOCK, i) for i in range(65)]
    for ticket in [store.write(e, d.data_ptr(), 0, BLOCK) for e, d in zip(extents, data, strict=True)]:
        ticket.wait()
    inject(store, Fault("completion", count=65, delay=0.1))
    back = [aligned_empty(BLOCK) for _ in range(65)]
    tickets = [store.read(e, b.data_ptr(), 0, BLOCK) for e, b in zip(extents, back, strict=True)]
    began = time.monotonic()
    tickets[50].wait()  # two blocks are under way at a time: in its turn it would come after 2.5 s
    assert time.monotonic() - began < 1.0
    assert back[50].equal(data[50])
    assert sum(ticket.done() for ticket in tickets) < 20
    clear_faults(store)
    for ticket in tickets:
        ticket.wait()
    assert all(a.equal(b) for a, b in zip(back, data, strict=True))


TRAIN = """
import resource, sys, time, torch, zinf_fx
limit, width, pause = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
model = zinf_fx.offload(model, store=sys.argv[1], placement="infinity-nvme")
print("offloaded", flush=True)
optimizer = zinf_fx.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="zinf")
while True:
    print("step", flush=True)
    compiled(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(pause)
"""


def train(store: Path, limit: int = 0) -> forked.Ended:
    return forked.run(TRAIN, store, limit, 1024, 0)  # 16 MiB, and 32 MiB of Adam's moments


def last_line(done: forked.Ended) -> str:
    return done.stderr.strip().splitlines()[-1]


def test_a_limit_on_file_sizes_stops_a_training_before_its_first_step(tmp_path: Path):
    done = train(tmp_path, 24 << 20)
    assert done.returncode == 1 and done.stdout == "offloaded\n"
    message = last_line(done)
    said = (
        "StoreError: store allocate failed",
        "data-0",
        "more asked for",
        "ulimit -f",
        os.strerror(errno.EFBIG),
    )
    assert all(part in message for part in said), message
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield an ext4 of 64 MiB in a file, where the machine allows one."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"no {command[0]} here")
        if done.returncode:
            pytest.skip(f"this machine allows no {command[0]}: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_stops_a_training_before_its_first_step(small_disk: Path):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(16 << 20))
    done = train(small_disk)
    assert done.returncode == 1 and done.stdout == "offloaded\n", done.stderr
    message = last_line(done)
    assert "StoreError: store allocate failed" in message and os.strerror(errno.ENOSPC) in message
    assert "more asked for" in message and "free on the file system" in message
    assert [path.name for path in small_disk.iterdir() if path.name != "lost+found"] == ["ballast"]


def test_a_store_that_fills_a_small_disk_to_the_brim_keeps_its_promise(small_disk: Path):
    """What `allocate` gave can be written, however little is left."""
    with Store(small_disk) as store:
        extents = []
        for nbytes in (8 << 20, 1 << 20, 64 << 10, PAGE):
            while True:
                try:
                    extents.append(store.allocate(nbytes))
                except StoreError as error:
                    assert error.errno == errno.ENOSPC
                    break
        data = filled(8 << 20, 1)
        for extent in extents:
            store.write(extent, data.data_ptr(), 0, extent.nbytes).wait()
        for extent in extents:
            back = aligned_empty(extent.nbytes)
            store.read(extent, back.data_ptr(), 0, extent.nbytes).wait()
            assert back.equal(data[: extent.nbytes])


def start_training(store: Path) -> forked.Running:
    process = forked.Running(TRAIN, store, 0, 64, 0.02)
    for line in process.stdout:
        if line == "step\n":
            return process
    raise AssertionError("the training ended before its first step")


def steps_go_on(process: forked.Running) -> bool:
    return all(process.stdout.readline() == "step\n" for _ in range(3))


def test_a_killed_training_leaves_an_orphan_that_clean_removes_beside_a_second_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    killed, other = start_training(tmp_path), start_training(tmp_path)
    try:
        assert steps_go_on(killed) and steps_go_on(other)
        killed.kill()
        (orphan,) = tmp_path.glob(f"zinf-scratch-{killed.pid}-*")
        (alive,) = tmp_path.glob(f"zinf-scratch-{other.pid}-*")
        assert main(["clean", str(tmp_path)]) == 0
        assert capsys.readouterr().out == f"removed  {orphan}\nin use   {alive}\n"
        assert list(tmp_path.iterdir()) == [alive]
        assert steps_go_on(other) and other.process.is_alive()
    finally:
        killed.kill()
        other.kill()


def test_without_libaio(tmp_path: Path):
    """Hidden by files of its names that are no libraries: the same system calls do the work."""
    for name in ("libaio.so.1", "libaio.so.1t64"):
        (tmp_path / name).touch()
    (tmp_path / "store").mkdir()
    program = (
        "import sys\nfrom zinf_fx.runtime.memory.host import aligned_empty\n"
        "from zinf_fx.runtime.disk.store import Store\n"
        "store = Store(sys.argv[1]); extent = store.allocate(9_000_000)\n"
        "data, back = aligned_empty(9_000_000).random_(0, 256), aligned_empty(9_000_000)\n"
        "store.write(extent, data.data_ptr(), 0, 9_000_000).wait()\n"
        "store.read(extent, back.data_ptr(), 0, 9_000_000).wait()\n"
        "assert back.equal(data); print(store.provider, *store.refused)\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("ZINF_IO_PROVIDER", None)
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["aio", "libaio"], done.stderr


def test_the_watchdog_names_what_is_awaited(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("zinf_fx.native.engine.WAIT_SLICE", 0.05)
    monkeypatch.setattr("zinf_fx.native.engine.STUCK_AFTER", 0.1)
    extent = store.allocate(NBYTES)
    inject(store, Fault("completion", delay=0.3))
    store.write(extent, filled(NBYTES, 1).data_ptr(), 0, NBYTES).wait()
    assert f"write of {extent.capacity} bytes at offset {extent.offset} of {store.path}" in caplog.text
