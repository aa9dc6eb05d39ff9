"""Whatever ends a save by generations, or the training behind it, what loads is one checkpoint or another."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from breaking_files import Failing, Killed, LosingPower, put
from counting import Counting
from killing import killed_in

import zinf_fx
from zinf_fx.checkpoint.catalog import give_back_unnamed, look_at
from zinf_fx.checkpoint.manifest import Manifest
from zinf_fx.errors import CheckpointError, StoreError


@pytest.fixture
def other(tmp_path: Path) -> Counting:
    """One that loads what others saved."""
    return Counting(tmp_path / "other")


def assert_only_one(directory: Path) -> None:
    names = sorted(path.suffix or path.name for path in directory.iterdir())
    assert names == [".extents", ".json", "lock"]


def killed(store: Path, directory: Path, number: int) -> bool:
    """In a process of its own, save, step, and save again until it is killed before the operation with this number, or
    train on and be killed then. Returns whether it was killed in the second save."""

    def train() -> Counting:
        job = Counting(store)
        job.step()
        job.save(directory)
        job.step()
        job.save(directory, Killed(number))
        job.step()
        job.step()
        return job

    return killed_in(train, store)


def test_kills_at_every_operation(tmp_path: Path, other: Counting):
    steps = []
    for number in range(1, 100):
        store, directory = tmp_path / f"store-{number}", tmp_path / str(number)
        died = killed(store, directory, number)
        steps.append(other.load(directory))
        zinf_fx.runtime.disk.scratch.survey(store, remove=True)
        other.step()
        other.save(directory)
        assert_only_one(directory)
        assert other.load(directory) == steps[-1] + 1
        shutil.rmtree(store)
        if not died:
            break
    assert not died and len(steps) > 10
    assert steps == sorted(steps) and set(steps) == {1, 2}


def test_power_fails_at_every_operation(tmp_path: Path, other: Counting):
    """Of two saves that replace a checkpoint, with steps behind each, which write to the extents that were freed."""
    root, image = tmp_path / "disk", tmp_path / "image"
    root.mkdir()
    job = Counting(tmp_path / "store")
    job.step()
    job.save(root / "saved")
    disk = LosingPower(root)
    for _ in range(2):
        job.step()
        disk.remember()
        job.save(root / "saved", disk)
        disk.remember()
    job.step()
    disk.remember()
    job.check()
    steps = [other.load(put(content, image) / "saved") for content in disk.images]
    assert len(steps) > 15 and set(steps) == {1, 2, 3}
    last = [other.load(put(content, image) / "saved") for content in disk.after()]
    assert set(last) == {3}


@pytest.mark.parametrize("ignores", ["sync", "sync_data"])
def test_a_disk_that_does_not_sync_shows_why_saves_do(tmp_path: Path, other: Counting, ignores: str):
    root, image = tmp_path / "disk", tmp_path / "image"
    root.mkdir()
    job = Counting(tmp_path / "store")
    job.step()
    disk = LosingPower(root, ignores)
    job.save(root / "saved", disk)
    damaged = 0
    for content in disk.images:
        try:
            assert other.load(put(content, image) / "saved") == 1
        except CheckpointError as error:
            damaged += "saved/manifest.json" in content and "is damaged" in str(error)
    assert damaged


@pytest.mark.parametrize(
    ("number", "names", "error", "says"),
    [
        (1, ("link",), PermissionError(errno.EACCES, "Permission denied"), "change its mode"),
        (1, ("link",), OSError(errno.ENOSPC, "No space left on device"), "the file system is full"),
        (1, ("sync_data",), OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (1, ("create",), OSError(errno.ENOSPC, "No space left on device"), "committing a checkpoint failed"),
        (1, ("write",), OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up"),
        (1, ("rename",), OSError(errno.EIO, "Input/output error"), "committing a checkpoint failed"),
        (1, ("link",), KeyboardInterrupt(), None),
    ],
)
def test_what_fails_leaves_training_and_the_checkpoint_as_they_were(
    tmp_path: Path, other: Counting, number: int, names: tuple[str, ...], error: BaseException, says: str | None
):
    job = Counting(tmp_path / "store")
    job.step()
    job.save(tmp_path / "saved")
    job.step()
    before = {path.name for path in (tmp_path / "saved").iterdir()}
    store = job.model[0].weight.stored.tiers.store
    in_use = store.in_use
    failing = Failing(number, error, names)
    with pytest.raises((CheckpointError, StoreError, KeyboardInterrupt), match=says):
        job.save(tmp_path / "saved", failing)
    assert failing.failed
    assert {path.name for path in (tmp_path / "saved").iterdir()} == before
    assert other.load(tmp_path / "saved") == 1
    assert store.in_use == in_use
    job.check()
    job.step()
    job.save(tmp_path / "saved")
    assert_only_one(tmp_path / "saved")
    job.step()
    job.check()
    assert other.load(tmp_path / "saved") == 3


def test_where_the_commit_itself_fails_both_checkpoints_are_kept(tmp_path: Path, other: Counting):
    """What is on the device, then, is the one or the other."""
    job = Counting(tmp_path / "store")
    job.step()
    job.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "manifest.json").read_bytes()
    job.step()
    with pytest.raises(CheckpointError, match="committing a checkpoint failed"):
        job.save(tmp_path / "saved", Failing(3, OSError(errno.EIO, "Input/output error"), ("sync",)))
    job.step()
    job.check()
    assert other.load(tmp_path / "saved") == 2
    (tmp_path / "saved" / "manifest.json").write_bytes(before)
    assert other.load(tmp_path / "saved") == 1


def test_a_full_disk_is_refused_before_anything_is_changed(
    tmp_path: Path, other: Counting, monkeypatch: pytest.MonkeyPatch
):
    job = Counting(tmp_path / "store")
    job.step()
    job.save(tmp_path / "saved")
    before = {path.name for path in (tmp_path / "saved").iterdir()}
    store = job.model[0].weight.stored.tiers.store
    in_use, allocate, left = store.in_use, store.allocate, [1]

    def full(nbytes: int) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError("allocate", "somewhere", "no space", errno=errno.ENOSPC)
        return allocate(nbytes)

    def save(directory: Path) -> None:
        with monkeypatch.context() as during:
            during.setattr(store, "allocate", full)
            job.save(directory)

    job.step()
    with pytest.raises(CheckpointError, match="there is no room to write the next step to"):
        save(tmp_path / "elsewhere")  # besides the other one
    assert store.in_use == in_use and left[0] < 0
    for _ in range(3):  # replaces the one that is there, whose extents are the next step's
        save(tmp_path / "saved")
        assert other.load(tmp_path / "saved") == job.steps
        job.step()
        job.check()
    assert store.in_use == in_use
    assert before != {path.name for path in (tmp_path / "saved").iterdir()}


def test_a_job_that_ends_or_is_killed_leaves_what_checkpoints_name(tmp_path: Path, other: Counting):
    """The rest of its store is given back, by the job, or by whoever sweeps when its scratch directory is gone."""
    child = os.fork()
    if not child:
        job = Counting(tmp_path / "store")
        for _ in range(3):
            job.step()
            job.save(tmp_path / "saved")
        job.step()
        if (tmp_path / "kill").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        job.optimizer.finish()
        job.model[0].weight.stored.tiers.store.close()
        os._exit(0)
    os.waitpid(child, 0)
    (link,) = (tmp_path / "saved").glob("*.extents")
    named = sum(map(len, look_at(tmp_path / "saved").manifest.content_of(link.name)))
    assert link.stat().st_nlink == 1
    assert named <= link.stat().st_blocks * 512 < link.stat().st_size / 2
    assert other.load(tmp_path / "saved") == 3


def test_a_killed_job(tmp_path: Path, other: Counting, monkeypatch: pytest.MonkeyPatch):
    assert not killed(tmp_path / "store", tmp_path / "saved", 99)
    (link,) = (tmp_path / "saved").glob("*.extents")
    checkpoints = [look_at(tmp_path / "saved")]
    named = sum(map(len, checkpoints[0].manifest.content_of(link.name)))
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "content_of", None)  # of which many pieces may have to be looked at
        give_back_unnamed(checkpoints)  # its scratch directory has another name of the file
    assert link.stat().st_nlink == 2 and link.stat().st_blocks * 512 == link.stat().st_size
    assert zinf_fx.runtime.disk.scratch.survey(tmp_path / "store", remove=True).popitem()[1] is None
    give_back_unnamed(checkpoints)
    assert named <= link.stat().st_blocks * 512 < link.stat().st_size / 2
    assert other.load(tmp_path / "saved") == 2


def test_what_a_living_job_has_is_left_alone(tmp_path: Path):
    job = Counting(tmp_path / "store")
    job.step()
    job.save(tmp_path / "saved")
    give_back_unnamed([look_at(tmp_path / "saved")])
    job.step()
    job.check()
