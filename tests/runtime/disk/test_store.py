"""The store keeps data, has space, and its scratch directory lives and dies with the job."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from gate import providers
from injecting import Fault, inject

from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.runtime.disk.scratch import survey
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.arena import Arena
from zinf_fx.runtime.memory.host import aligned_empty


@pytest.fixture(autouse=True)
def no_forced_provider(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ZINF_IO_PROVIDER", raising=False)


@pytest.fixture(params=providers())
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    try:
        made = Store(tmp_path, provider=request.param)
    except StoreError as error:
        assert request.param == "libaio"
        pytest.skip(str(error))
    yield made
    made.close()
    assert not list(tmp_path.iterdir())


def fill(data: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return data.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def reclaim(directory: Path) -> list[Path]:
    """Remove the scratch directories of dead jobs, and return them."""
    return [path for path, stays in survey(directory, remove=True).items() if stays is None]


# Data


@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097, 1_000_003, (4 << 20) + 1, 9_999_999])
def test_round_trip_at_odd_sizes(store: Store, nbytes: int):
    arena = Arena("host", 32 << 20)
    extent = store.allocate(nbytes)
    assert (extent.nbytes, extent.capacity % 4096, extent.offset % 4096) == (nbytes, 0, 0)
    written, back = arena.allocate(nbytes), arena.allocate(nbytes)
    data = fill(written.tensor((nbytes,), torch.uint8))
    store.write(extent, written.address, 0, nbytes).wait()
    store.read(extent, back.address, 0, nbytes).wait()
    assert back.tensor((nbytes,), torch.uint8).equal(data)
    assert store.counters().bytes_written == store.counters().bytes_read == extent.capacity
    assert store.counters().read_seconds > 0 and store.counters().write_seconds > 0


def test_a_seeded_life_against_a_dictionary(store: Store):
    """Random allocations, writes, partial writes, reads and frees; the store must agree with a dictionary of bytes."""
    generator = torch.Generator().manual_seed(1)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    expected: dict[object, torch.Tensor] = {}
    for step in range(300):
        what = draw(4)
        if what == 0 or not expected:
            extent = store.allocate(1 + draw(200_000))
            data = fill(aligned_empty(extent.capacity), seed=step)
            store.write(extent, data.data_ptr(), 0, extent.nbytes, owner=data).wait()
            expected[extent] = data
            continue
        extent = list(expected)[draw(len(expected))]
        first = 4096 * draw(extent.capacity // 4096)
        count = 1 + draw(extent.capacity - first)
        if what == 1:
            expected.pop(extent)
            store.free(extent)
        elif what == 2:
            data = fill(aligned_empty(count), seed=step)
            store.write(extent, data.data_ptr(), first, count).wait()
            expected[extent][first : first + data.numel()] = data
        else:
            back = aligned_empty(count)
            store.read(extent, back.data_ptr(), first, count).wait()
            assert back.equal(expected[extent][first : first + back.numel()])
    assert store.in_use == sum(extent.capacity for extent in expected)


def test_requests_in_flight_are_independent(store: Store):
    extents = [store.allocate(50_000) for _ in range(64)]
    data = [fill(aligned_empty(50_000), seed=i) for i in range(64)]
    for ticket in [store.write(e, d.data_ptr(), 0, 50_000) for e, d in zip(extents, data, strict=True)]:
        ticket.wait()
    inject(store, Fault("completion", count=7, delay=0.6))
    held = [aligned_empty(50_000) for _ in range(7)]
    slow = [store.read(extents[0], memory.data_ptr(), 0, 50_000) for memory in held]
    time.sleep(0.1)
    back = [aligned_empty(50_000) for _ in extents]
    quick = [store.read(e, b.data_ptr(), 0, 50_000) for e, b in zip(extents, back, strict=True)]
    quick[-1].wait()
    assert back[-1].equal(data[-1]) and not slow[0].done()
    for ticket in quick + slow:
        ticket.wait()
    assert all(a.equal(b) for a, b in zip(back, data, strict=True))


def test_an_error_names_the_data_file(store: Store):
    extent = store.allocate(8192)
    memory = aligned_empty(8192)
    inject(store, Fault("completion", errno=errno.EIO, operation="read"))
    store.write(extent, memory.data_ptr(), 0, 8192).wait()
    with pytest.raises(StoreError) as caught:
        store.read(extent, memory.data_ptr(), 4096, 4096).wait()
    error = caught.value
    assert (error.operation, error.path, error.offset, error.length) == (
        "read",
        str(store.path),
        extent.offset + 4096,
        4096,
    )
    with pytest.raises(StoreError, match="an earlier request"):
        store.write(extent, memory.data_ptr(), 0, 8192).wait()


# Space


def test_space_is_reserved_at_once_and_reused(store: Store):
    extents = [store.allocate(1 << 20) for _ in range(8)]
    assert os.stat(store.path).st_blocks * 512 >= 8 << 20
    reserved = os.stat(store.path).st_size
    for extent in extents[2:5]:
        store.free(extent)
    assert store.allocate(3 << 20).offset == extents[2].offset
    assert os.stat(store.path).st_size == reserved


def test_a_small_store_takes_little_space(store: Store):
    store.allocate(1)
    assert os.stat(store.path).st_size <= 4 << 20


def test_misuse_is_asserted(store: Store):
    extent = store.allocate(8192)
    memory = aligned_empty(8192)
    address = memory.data_ptr()
    for arguments, message in [
        ((extent, address, 0, 8193), "exceed"),
        ((extent, address, 4096, 4097), "exceed"),
        ((extent, address, -4096, 4096), "offset"),
        ((extent, address, 100, 10), "offset"),
        ((extent, address + 8, 0, 10), "address"),
        ((extent, address, 0, 0), "0 bytes"),
    ]:
        with pytest.raises(AssertionError, match=message):
            store.read(*arguments)
    store.free(extent)
    with pytest.raises(AssertionError, match="freed before"):
        store.free(extent)
    with pytest.raises(AssertionError, match="not allocated"):
        store.read(extent, address, 0, 10)


def test_a_limit_on_file_sizes_shows_at_allocation(store: Store):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        extent = store.allocate(1 << 19)
        with pytest.raises(
            StoreError, match=r"allocate failed: .* more asked for, [\d.,]+ [KMG]iB free.*limit"
        ) as caught:
            store.allocate(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    store.free(extent)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 8 MiB, where the machine allows one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"no mount: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_file_system_shows_at_allocation(small_disk: Path):
    with Store(small_disk) as store:
        kept = [store.allocate(5 << 20)]
        with pytest.raises(StoreError, match=r"6.0 MiB more asked for, [\d.,]+ [KMG]iB free") as caught:
            store.allocate(6 << 20)
        assert caught.value.errno == errno.ENOSPC
        kept.append(store.allocate(2 << 20))  # the step doesn't fit, the exact size does
        memory = aligned_empty(5 << 20)
        store.write(kept[0], memory.data_ptr(), 0, 5 << 20).wait()
    assert not list(small_disk.iterdir())


def test_a_file_system_that_is_full_already(small_disk: Path):
    with open(small_disk / "ballast", "wb") as file, pytest.raises(OSError):
        while True:
            os.write(file.fileno(), bytes(1 << 20))
    with pytest.raises(StoreError, match="full") as caught:
        Store(small_disk)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_a_read_only_file_system(small_disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="read-only"):
        Store(small_disk)


# Opening


def test_a_missing_directory(tmp_path: Path):
    with pytest.raises(StoreError, match="does not exist; create it") as caught:
        Store(tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "absent").exists()


def test_a_file_instead_of_a_directory(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="not a directory"):
        Store(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path: Path):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="not writable"):
        Store(tmp_path)


def test_an_unwritable_directory_in_a_child_without_privileges(tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    tmp_path.chmod(0o500)
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        try:
            Store(tmp_path)
        except StoreError as error:
            os._exit(0 if error.errno == errno.EACCES else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_unknown_providers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="'floppy' in provider; accepted: auto, libaio, aio, threads, buffered"):
        Store(tmp_path, provider="floppy")
    monkeypatch.setenv("ZINF_IO_PROVIDER", "tape")
    with pytest.raises(ConfigError, match="'tape' in ZINF_IO_PROVIDER"):
        Store(tmp_path)
    monkeypatch.setenv("ZINF_IO_PROVIDER", "threads")
    with Store(tmp_path) as store:
        assert store.provider == "threads"
    with pytest.raises(ConfigError, match="strict_direct"):
        Store(tmp_path, provider="buffered", strict_direct=True)
    assert not list(tmp_path.iterdir())


def test_files_are_private_and_nameless(tmp_path: Path):
    with Store(tmp_path) as store:
        (scratch,) = tmp_path.iterdir()
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert {path.name: path.stat().st_mode & 0o777 for path in scratch.iterdir()} == {
            "lock": 0o600,
            "data-0": 0o600,
        }
        assert store.path.parent == scratch


# Life and death


def test_two_stores_in_one_directory(tmp_path: Path):
    with Store(tmp_path) as a, Store(tmp_path) as b:
        assert a.path != b.path
        stores = {a: fill(aligned_empty(4096), 1), b: fill(aligned_empty(4096), 2)}
        extents = {store: store.allocate(4096) for store in stores}
        for store, data in stores.items():
            store.write(extents[store], data.data_ptr(), 0, 4096).wait()
        a_back = aligned_empty(4096)
        a.read(extents[a], a_back.data_ptr(), 0, 4096).wait()
        assert a_back.equal(stores[a])
        assert reclaim(tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_close_finishes_requests_and_keeps_tickets(tmp_path: Path):
    store = Store(tmp_path)
    extent = store.allocate(4096)
    memory = aligned_empty(4096)
    inject(store, Fault("completion", delay=0.3))
    ticket = store.write(extent, memory.data_ptr(), 0, 4096)
    store.close()
    store.close()
    assert ticket.done() and store.counters().bytes_written == 4096
    ticket.wait()
    for use in (lambda: store.allocate(1), lambda: store.read(extent, memory.data_ptr(), 0, 1)):
        with pytest.raises(StoreError, match="closed"):
            use()


def test_a_collected_store_leaves_nothing(tmp_path: Path):
    store = Store(tmp_path)
    store.allocate(1)
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_what_others_put_there_stays(tmp_path: Path):
    store = Store(tmp_path)
    stranger = store.path.parent / "thesis.txt"
    stranger.write_text("years of work")
    store.close()
    assert stranger.read_text() == "years of work"


WORK = """
import os, sys, time
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.runtime.disk.store import Store
store = Store(sys.argv[1])
extent = store.allocate(8 << 20)
memory = aligned_empty(8 << 20)
print("ready", flush=True)
"""
LOOP = "while True: store.write(extent, memory.data_ptr(), 0, 8 << 20).wait()"


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_the_interpreters_exit_leaves_nothing(tmp_path: Path):
    ends = ("raise ValueError", "ticket = store.write(extent, memory.data_ptr(), 0, 8 << 20)")
    processes = [start(WORK + end, tmp_path) for end in ends]
    codes = [process.wait(timeout=30) for process in processes]
    errors = [process.communicate()[1] for process in processes]
    assert not errors[1]
    assert codes == [1, 0]
    assert not list(tmp_path.iterdir())


def test_control_c_leaves_nothing(tmp_path: Path):
    process = forked.Running(WORK + LOOP, tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    ended = process.end(30)
    assert "KeyboardInterrupt" in ended.stderr and ended.returncode != 0
    assert not list(tmp_path.iterdir())


def test_kill_leaves_an_orphan_that_reclaim_removes_beside_a_live_store(tmp_path: Path):
    with Store(tmp_path) as store:
        extent = store.allocate(4096)
        process = forked.Running(WORK + LOOP, tmp_path)
        assert process.stdout.readline() == "ready\n"
        live = {path for path in tmp_path.iterdir() if f"-{process.pid}-" in path.name}
        assert reclaim(tmp_path) == []
        process.kill()
        assert reclaim(tmp_path) == sorted(live) and len(live) == 1
        assert reclaim(tmp_path) == []
        memory = aligned_empty(4096)
        store.write(extent, memory.data_ptr(), 0, 4096).wait()


def test_reclaim_leaves_everything_else(tmp_path: Path):
    """Things resemble a dead job's directory, each in one respect not."""
    name = "zinf-scratch-1-0123456789abcde"

    def directory(number: int, *files: str, mode: int = 0o700) -> Path:
        path = tmp_path / f"{name}{number}"
        path.mkdir()
        for file in files:
            (path / file).touch(mode=0o600)
        path.chmod(mode)
        return path

    directory(0, "data-0")
    directory(1, "lock", "data-0", "thesis.txt")
    directory(2, "lock", mode=0o755)
    directory(3, "lock")
    (tmp_path / f"{name}3" / "data-0").mkdir()
    directory(4)
    (tmp_path / f"{name}4" / "lock").symlink_to(tmp_path / f"{name}0" / "data-0")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "lock").touch()
    (tmp_path / f"{name}5").symlink_to(outside)
    (tmp_path / f"{name}6").touch()
    (tmp_path / "zinf-scratch-mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert reclaim(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
    orphan = directory(7, "lock", "data-0")
    assert reclaim(tmp_path) == [orphan]
    with pytest.raises(StoreError, match="does not exist"):
        reclaim(tmp_path / "absent")


FORK = """
child = os.fork()
if child == 0:
    try:
        store.allocate(1)
    except Exception as error:
        assert "fork" in str(error), error
        print("refused")
    try:
        store.read(extent, memory.data_ptr(), 0, 4096)
    except Exception as error:
        assert "fork" in str(error), error
        print("refused", flush=True)
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
store.write(extent, memory.data_ptr(), 0, 8 << 20).wait()
print(len(os.listdir(sys.argv[1])))
"""


def test_a_forked_child_neither_uses_nor_removes_the_store(tmp_path: Path):
    done = forked.run(WORK + FORK, tmp_path)
    assert done.returncode == 0 and done.stdout.split() == ["ready", "refused", "refused", "1"], done.stderr
    assert not list(tmp_path.iterdir())


ORPHANED_CHILD = """
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_child_that_survives_its_parent_holds_no_lock(tmp_path: Path):
    process = forked.Running(WORK + ORPHANED_CHILD, tmp_path)
    assert process.stdout.readline() == "ready\n"
    child = int(process.stdout.readline())
    try:
        assert reclaim(tmp_path) == []
        process.kill()
        assert len(reclaim(tmp_path)) == 1
    finally:
        os.kill(child, signal.SIGKILL)
