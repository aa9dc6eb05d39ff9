"""Measurements move the bytes that they say, leave nothing behind, and come back as the profile of the file system."""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from injecting import Fault, inject

from zinf_fx.errors import StoreError
from zinf_fx.machine import fio
from zinf_fx.runtime.disk import measure
from zinf_fx.runtime.disk.filesystem import FileSystem, file_system_of, one_per_device
from zinf_fx.runtime.disk.measure import (
    OPERATIONS,
    Profile,
    Trial,
    load_profile,
    profiles_path,
    store_profile,
    weights_of,
)

MIB = 1 << 20
PROFILE = Profile(read=3e9, write=6e9, mixed=4e9, provider="aio", depth=8, block=4 * MIB, measured_at=1.0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZINF_IO_PROVIDER", raising=False)


@pytest.mark.parametrize("checksum", [False, True])
def test_every_operation_moves_the_files_bytes(tmp_path: Path, checksum: bool):
    with Trial(tmp_path, nbytes=5 * MIB, block=MIB, depth=2, checksum=checksum) as trial:
        assert trial.nbytes == 6 * MIB and trial.path.stat().st_size == 6 * MIB
        for operation in OPERATIONS:
            before = trial.engine.counters()
            rate = trial.run(operation)
            after = trial.engine.counters()
            moved = after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written
            assert moved == rate.nbytes == 6 * MIB and rate.bytes_per_second > 0
            assert (rate.check_seconds > 0) == checksum
    assert not list(tmp_path.iterdir())


def test_starting_a_transfer_is_measured_alone(tmp_path: Path):
    """The reads themselves, which are late here, don't count."""
    times, late = 4, 0.05
    called: list[float] = []
    with Trial(tmp_path, nbytes=2 * MIB, block=MIB, depth=2, checksum=True) as trial:
        inject(trial.engine, Fault("completion", operation="read", delay=late, count=times))
        began = time.perf_counter()
        seconds = trial.start_seconds(lambda: called.append(time.perf_counter()), times)
        assert 0 < times * seconds <= time.perf_counter() - began - times * late
        assert len(called) == times and trial.engine.counters().bytes_read == times * MIB


def test_what_a_block_takes_is_measured_beside_what_the_thread_does(tmp_path: Path):
    """Of three blocks that are read together, each of which is late, as `meanwhile` sees; `before` doesn't count."""
    late, pause = 0.05, 0.2
    done: list[str] = []
    with Trial(tmp_path, nbytes=4 * MIB, block=MIB, depth=2) as trial:
        inject(trial.engine, Fault("completion", operation="read", delay=late, count=6))
        began = time.perf_counter()
        seconds = trial.block_seconds(
            3, 2, lambda: done.append("before") or time.sleep(pause), lambda: done.append("meanwhile")
        )
        assert late / 3 <= seconds and 6 * seconds <= time.perf_counter() - began - 2 * pause
        assert trial.engine.counters().bytes_read == 6 * MIB
    assert done.count("before") == 2 and done[:2] == ["before", "meanwhile"]


def test_a_trial_that_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(StoreError, match=r"reserved|full|limit"):
        Trial(tmp_path, nbytes=1 << 60)
    assert not list(tmp_path.iterdir())


def test_a_profile_is_that_of_its_file_system(tmp_path: Path):
    assert load_profile(tmp_path) is None
    assert store_profile(tmp_path, PROFILE) == profiles_path()
    (tmp_path / "below").mkdir()
    assert load_profile(tmp_path / "below") == PROFILE
    assert load_profile("/proc") is None
    assert PROFILE.weight == pytest.approx(4e9)
    assert profiles_path().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 0, "profiles": {}}', '{"format": 1}', '{"format": 1, "profiles": []}']
)
def test_a_file_of_profiles_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str):
    profiles_path().parent.mkdir(parents=True)
    profiles_path().write_text(content)
    assert load_profile(tmp_path) is None
    store_profile(tmp_path, PROFILE)
    assert load_profile(tmp_path) == PROFILE


def test_a_profile_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    store_profile(tmp_path, PROFILE)
    before = sorted(profiles_path().parent.iterdir())
    monkeypatch.setattr(measure.json, "dumps", full)
    monkeypatch.setattr(measure.json, "dump", full)
    with pytest.raises(StoreError, match="can't be stored"):
        store_profile(tmp_path, PROFILE)
    assert sorted(profiles_path().parent.iterdir()) == before and load_profile(tmp_path) == PROFILE


def test_profiles_that_are_stored_at_the_same_time_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read = measure._profiles

    def slowly() -> dict[str, dict]:
        profiles = read()
        time.sleep(0.02)
        return profiles

    monkeypatch.setattr(measure, "file_system_of", lambda directory: SimpleNamespace(key=directory))
    monkeypatch.setattr(measure, "_profiles", slowly)
    names = [str(number) for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: store_profile(name, PROFILE), names))
    assert sorted(read()) == names


def test_an_entry_that_cannot_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store_profile(tmp_path, PROFILE)
    profiles_path().write_text(profiles_path().read_text().replace('"depth"', '"width"'))
    assert load_profile(tmp_path) is None and "bench-io" in caplog.text


def test_weights_are_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a, b = tmp_path / "a", tmp_path / "b"
    profiles = {a: PROFILE, b: Profile(1e9, 1e9, 1e9, "aio", 8, MIB, 1.0)}
    monkeypatch.setattr(measure, "load_profile", profiles.get)
    assert weights_of([(a, 1)]) == [1.0]
    assert weights_of([(a, 1), (b, 2)]) == pytest.approx([4e9, 1e9])
    assert weights_of([(a, 1), (a, 1), (b, 2)]) == pytest.approx([2e9, 2e9, 1e9])


def test_file_systems_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file_system = file_system_of(tmp_path)
    assert 0 < file_system.free <= file_system.total and file_system.kind != "unknown"
    assert file_system_of("/proc").kind == "proc"
    below = tmp_path / "below"
    below.mkdir()
    assert one_per_device((below, tmp_path, "/proc")) == [below, Path("/proc")]
    with pytest.raises(StoreError, match="does not exist"):
        file_system_of(tmp_path / "absent")
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mounts"
    line = f"1 2 {device >> 8}:{device & 255} / {str(tmp_path).replace('t', chr(92) + '164')} rw - nfs4 server:/x rw\n"
    mounts.write_text("0 1 0:1 / / rw - ext4 /dev/sda rw\n" + line)
    monkeypatch.setattr("zinf_fx.runtime.disk.filesystem.MOUNTS", mounts)
    file_system = file_system_of(tmp_path)
    assert (file_system.kind, file_system.source) == ("nfs4", "server:/x") and file_system.over_network
    monkeypatch.setattr("zinf_fx.runtime.disk.filesystem.MOUNTS", tmp_path / "absent")
    assert file_system_of(tmp_path).kind == "unknown"


def test_kinds_of_file_systems():
    def of(kind: str) -> FileSystem:
        return FileSystem(kind, "", "", 0, 0)

    assert of("tmpfs").in_memory and not of("ext4").in_memory
    assert of("fuse.sshfs").over_network and not of("xfs").over_network


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_fio_on_a_trials_file(tmp_path: Path):
    with Trial(tmp_path, nbytes=8 * MIB) as trial:
        for operation in OPERATIONS:
            rate = fio.run(trial.path, operation, fio.Shape("psync", MIB, 1), trial.nbytes)
            assert rate.nbytes == trial.nbytes and rate.bytes_per_second > 0
        with pytest.raises(StoreError, match="said"):
            fio.run(trial.path, "read", fio.Shape("floppy", MIB, 1), trial.nbytes)
