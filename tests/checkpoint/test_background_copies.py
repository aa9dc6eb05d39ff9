"""A checkpoint on another file system is copied in the background, and is what there was when it was due."""

from __future__ import annotations

import errno
import itertools
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking_files import Failing, Killed, LosingPower, WithoutLinks, put
from counting import Counting
from forked import run
from gate import named, slow
from jobs import Job, assert_equal
from killing import killed_in

import zinf_fx
from zinf_fx.checkpoint import background
from zinf_fx.checkpoint.catalog import checkpoints_in
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.errors import CheckpointError, ConfigError, StoreError

CASES: dict[str, dict[str, Any]] = {
    "nvme": {},
    "at once": {"options": {"overlap": False}},
    "in the background": {"options": {"overlap": True}, "compiled": True, "scales": False},
    "in packs": {"compiled": True, "fields": {"pack": "auto"}, "scales": False},
    "each by itself": {"compiled": True, "fields": {"pack": None}},
    "fp32": {"dtype": torch.float32},
    "without checksums": {"fields": {"checksum": False}},
}


class Waiting(WithoutLinks):
    """No file is written before the event is set."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def start_write(self, *arguments: Any) -> Any:
        self.may_go_on.wait(60)
        return super().start_write(*arguments)


class KilledElsewhere(WithoutLinks, Killed):
    """Kills the process, on another file system."""


class FailingElsewhere(WithoutLinks, Failing):
    """Fails, on another file system."""


class LosingPowerElsewhere(WithoutLinks, LosingPower):
    """Loses power, on another file system."""


def managed(job: Job | Counting, directory: Path, files: Any, **options: Any) -> zinf_fx.CheckpointManager:
    if isinstance(job, Job):
        options |= {"schedule": job.schedule, "scaler": job.scaler}
    optimizer = job.adam if isinstance(job, Job) else job.optimizer
    manager = zinf_fx.CheckpointManager(directory, job.model, optimizer, every_steps=1, keep=9, **options)
    manager.files = files
    return manager


def loaded(directory: Path, other: Counting) -> int:
    other.steps = zinf_fx.load_checkpoint(directory, other.model, other.optimizer)["step"]
    other.check()
    return other.steps


@pytest.fixture
def other(tmp_path: Path) -> Counting:
    """One that loads what others saved."""
    return Counting(tmp_path / "other")


def store_of(job: Counting) -> Any:
    return job.model[0].weight.stored.tiers.store


@pytest.mark.parametrize("name", named(CASES, {"nvme", "in packs", "without checksums"}))
def test_what_is_resumed_goes_on_bit_for_bit(tmp_path: Path, name: str):
    """Everything is rewritten, more than once, before the first byte is copied."""
    how = CASES[name]
    job, files = Job(tmp_path / "store", seed=1, **how), Waiting()
    job.train(3)
    with managed(job, tmp_path / "run", files) as checkpoints:
        job.train(4)
        values = job.values()
        path = checkpoints.after_step(1)
        losses = job.train(8)
        assert not (path / "manifest.json").exists()
        files.may_go_on.set()
    assert manifest_of(path).in_store_nbytes == 0
    second = Job(tmp_path / "other", seed=2, **how)
    zinf_fx.load_checkpoint(path, second.model, second.adam, schedule=second.schedule, scaler=second.scaler)
    second.done = 4
    assert_equal(second.values(), values)
    assert second.train(8) == losses
    assert_equal(second.values(), job.values())


def test_a_save_waits_for_the_one_under_way(tmp_path: Path, other: Counting):
    job, files = Counting(tmp_path / "store"), Waiting()
    job.step()
    in_use = store_of(job).in_use
    with managed(job, tmp_path / "run", files) as checkpoints:
        paths = []
        for step in range(2, 5):
            job.step()
            threading.Timer(0.2, files.may_go_on.set).start()
            paths.append(checkpoints.after_step(step))
            assert all((path / "manifest.json").exists() for path in paths[:-1])
            files.may_go_on.clear()
        files.may_go_on.set()
        job.step()
        named = checkpoints.save(5, "named")
        assert (named / "manifest.json").exists()
    assert [loaded(path, other) for path in (*paths, named)] == [2, 3, 4, 5]
    job.step()
    job.check()
    assert store_of(job).in_use == in_use


def test_sigterm_ends_with_what_there_is(tmp_path: Path, other: Counting):
    job, files = Counting(tmp_path / "store"), Waiting()
    with managed(job, tmp_path / "run", files) as checkpoints:
        job.step()
        checkpoints.after_step(1)
        job.step()
        threading.Timer(0.2, files.may_go_on.set).start()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            checkpoints.after_step(2)
        assert [loaded(path, other) for path in sorted((tmp_path / "run").iterdir())] == [1, 2]


PROGRAM = """
import sys
sys.path[:0] = sys.argv[3:]
from counting import Counting
from pathlib import Path
from breaking_files import WithoutLinks
import zinf_fx
job = Counting(Path(sys.argv[1]))
job.step()
manager = zinf_fx.CheckpointManager(sys.argv[2], job.model, job.optimizer, every_steps=1, bandwidth="500KB/s")
manager.files = WithoutLinks()
manager.__enter__()
path = manager.after_step(1)
job.step()
assert not (path / "manifest.json").exists()
"""


def test_the_interpreter_waits_for_it(tmp_path: Path, other: Counting):
    here = Path(__file__).parent
    ended = run(PROGRAM, tmp_path / "store", tmp_path / "run", here, here.parent)
    assert ended.returncode == 0, ended.stderr
    assert loaded(tmp_path / "run" / "step-00000001", other) == 1


def killed(store: Path, directory: Path, number: int) -> bool:
    """In a process of its own, save, step, and save again behind steps until it is killed before the operation with
    this number, or train on and be killed then. Returns whether it was killed in a save."""

    def train() -> Counting:
        job = Counting(store)
        with managed(job, directory, KilledElsewhere(number)) as checkpoints:
            for step in range(1, 3):
                job.step()
                checkpoints.after_step(step)
            job.step()
        return job

    return killed_in(train, store)


@pytest.mark.parametrize("every", [4, slow(1)])
def test_kills_at_operations(tmp_path: Path, other: Counting, every: int):
    resumed_steps = []
    for number in itertools.count(1, every):
        store, directory = tmp_path / "store", tmp_path / str(number)
        store.mkdir(exist_ok=True)
        died = killed(store, directory, number)
        resumed = managed(other, directory, WithoutLinks())
        resumed_steps.append(resumed.resume())
        if resumed_steps[-1]:
            other.steps = resumed_steps[-1]
            other.check()
        other.step()
        resumed.save(other.steps)
        assert [folder.name for folder in directory.iterdir() if not (folder / "manifest.json").exists()] == []
        (store / "done").unlink(missing_ok=True)
        zinf_fx.runtime.disk.scratch.survey(store, remove=True)
        if not died:
            break
    assert (
        len(resumed_steps) > 20 / every and resumed_steps == sorted(resumed_steps) and set(resumed_steps) == {0, 1, 2}
    )


@pytest.mark.parametrize("ignores", ["", "sync", "sync_data"])
def test_power_fails_at_every_operation(tmp_path: Path, other: Counting, ignores: str):
    """A background copy is killed while a step runs. A disk that doesn't sync shows why copies do."""
    root, image = tmp_path / "disk", tmp_path / "image"
    root.mkdir()
    job = Counting(tmp_path / "store")
    manager = managed(job, root, WithoutLinks())
    job.step()
    manager.save(1)
    disk = manager.files = LosingPowerElsewhere(root, ignores)
    job.step()
    with manager:
        manager.after_step(2)
        job.step()

    def resumed(content: dict[str, bytes | None]) -> int:
        other.steps = managed(other, put(content, image), WithoutLinks()).resume()
        other.check()
        return other.steps

    def is_damaged(content: dict[str, bytes | None]) -> bool:
        return any(
            not checkpoint.is_whole and not checkpoint.is_left_over
            for checkpoint in checkpoints_in(put(content, image))
        )

    assert any(map(is_damaged, disk.images)) == bool(ignores)
    if not ignores:
        resumed_steps = [resumed(content) for content in disk.images]
        assert len(resumed_steps) > 10 and set(resumed_steps) == {1, 2}
        assert {resumed(content) for content in disk.after()} == {2}


FULL = StoreError("write", "somewhere", "no space", errno=errno.ENOSPC)


@pytest.mark.parametrize(
    ("number", "names", "error", "says"),
    [
        (1, ("make_directory",), PermissionError(errno.EACCES, "Permission denied"), None),
        (1, ("reserve",), OSError(errno.ENOSPC, "No space left on device"), "the file system is full"),
        (4, ("start_write",), FULL, "no space"),
        (1, ("sync_data",), OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (1, ("rename",), OSError(errno.EIO, "Input/output error"), "committing a checkpoint failed"),
    ],
)
def test_what_fails_leaves_training_and_the_checkpoint_as_they_were(
    tmp_path: Path,
    other: Counting,
    caplog: pytest.LogCaptureFixture,
    number: int,
    names: tuple[str, ...],
    error: BaseException,
    says: str | None,
):
    job = Counting(tmp_path / "store")
    with managed(job, tmp_path / "run", WithoutLinks()) as checkpoints:
        job.step()
        first = checkpoints.save(1)
        in_use = store_of(job).in_use
        checkpoints.files = FailingElsewhere(number, error, names)
        job.step()
        if says is None:  # before anything is copied
            with pytest.raises(CheckpointError, match="change its mode"):
                checkpoints.after_step(2)
        else:
            checkpoints.after_step(2)
            job.step()
            while "in the background failed, and training goes on without it" not in caplog.text:
                time.sleep(0.01)
            with pytest.raises((CheckpointError, StoreError), match=says):
                checkpoints.close()
        assert checkpoints.files.failed
        assert [path.name for path in (tmp_path / "run").glob("*/manifest.json")] == ["manifest.json"]
        assert not list((tmp_path / "run" / "step-00000002").glob("data-*"))
        assert store_of(job).in_use == in_use
        assert loaded(first, other) == 1
        job.check()
        job.step()
        path = checkpoints.after_step(job.steps)
    assert loaded(path, other) == job.steps
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [first.name, path.name]


def test_a_failure_is_raised_by_the_next_call_which_saves_all_the_same(tmp_path: Path, other: Counting):
    job = Counting(tmp_path / "store")
    with managed(job, tmp_path / "run", FailingElsewhere(1, FULL, ("start_write",))) as checkpoints:
        job.step()
        checkpoints.after_step(1)
        job.step()
        with pytest.raises(StoreError, match="no space"):
            checkpoints.after_step(2)
        job.step()
    assert [loaded(path, other) for path in (tmp_path / "run").iterdir()] == [2]


@pytest.mark.parametrize("why", ["no room in the store", "much in memory"])
def test_what_cannot_be_kept_is_copied_at_once(
    tmp_path: Path, other: Counting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, why: str
):
    job = Counting(tmp_path / "store")
    job.step()
    store = store_of(job)
    in_use, files = store.in_use, WithoutLinks()

    def full(nbytes: int) -> object:
        raise StoreError("allocate", "somewhere", "no space", errno=errno.ENOSPC)

    extra = {}
    if why == "no room in the store":
        store.checksum = False  # else it is looked for room to keep it by links
        monkeypatch.setattr(store, "allocate", full)
    else:
        extra["many"] = torch.zeros(5 << 20)
    with managed(job, tmp_path / "run", files, **extra) as checkpoints, caplog.at_level(logging.INFO, logger="zinf_fx"):
        path = checkpoints.after_step(1)
        assert (path / "manifest.json").exists()
    assert "is copied while training waits: " in caplog.text
    assert store.in_use == in_use
    other.steps = zinf_fx.load_checkpoint(path, other.model, other.optimizer, many=None)["step"] if extra else 0
    assert extra or loaded(path, other) == 1


def test_paces(monkeypatch: pytest.MonkeyPatch):
    """All the time while nobody else moves bytes, a share of it while somebody does, and no more than a bandwidth."""
    now, moved, waited = [100.0], [0], []
    monkeypatch.setattr(background.time, "monotonic", lambda: now[0])

    def kept(pace: background.Pace, seconds: float, others: int) -> float:
        monkeypatch.setattr(pace._hurries, "wait", waited.append)
        now[0] += seconds
        moved[0] += others
        pace.keep(16 << 20)
        return waited[-1]

    pace = background.Pace(lambda: moved[0])
    assert kept(pace, 0.1, 0) == 0 and kept(pace, 0.1, 1 << 20) == 0
    assert kept(pace, 0.1, 64 << 20) == pytest.approx(0.1 * (1 / background.SHARE - 1))
    assert kept(pace, 0.1, 0) == pytest.approx(0.1 * (1 / background.SHARE - 1))
    assert kept(pace, 2.0, 0) == 0
    limited = background.Pace(lambda: moved[0], 32 << 20)
    assert kept(limited, 0.1, 0) == pytest.approx(0.4)
    assert kept(limited, 2.0, 64 << 20) == 0


def test_a_bandwidth_is_kept_until_somebody_waits(tmp_path: Path):
    job = Counting(tmp_path / "store")
    job.step()
    with managed(job, tmp_path / "run", WithoutLinks(), bandwidth="1KB/s") as checkpoints:
        path = checkpoints.after_step(1)
        time.sleep(0.3)
        assert not (path / "manifest.json").exists()
    assert (path / "manifest.json").exists()
    with pytest.raises(ConfigError, match="bandwidth='much' is not a bandwidth"):
        managed(job, tmp_path / "run", WithoutLinks(), bandwidth="much")


MEMORY = """
import re, sys, torch, zinf_fx
sys.path.append(sys.argv[2])
from breaking_files import WithoutLinks
from torch import nn

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

folder = sys.argv[1]
with zinf_fx.offloading(store=folder, placement="nvme"):
    model = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(3)))
optimizer = zinf_fx.optim.AdamW(model.parameters())

def step():
    for parameter in model.parameters():
        parameter.grad = torch.full(parameter.shape, 0.1)
        optimizer.step()
        parameter.grad = None
    optimizer.finish()

step()
before = peak()
with zinf_fx.CheckpointManager(folder + "/run", model, optimizer, every_steps=1) as checkpoints:
    checkpoints.files = WithoutLinks()
    path = checkpoints.after_step(1)
    step()
    goes_on = not (path / "manifest.json").exists()
print(before, peak(), goes_on)
"""


def test_peaks(tmp_path: Path):
    """There are 288 MiB of states, while steps go on."""
    ended = run(MEMORY, tmp_path, Path(__file__).parents[1])
    assert ended.returncode == 0, ended.stderr
    before, after, goes_on = ended.stdout.split()
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()) > 285 << 20
    assert int(after) - int(before) <= 64 and goes_on == "True"
