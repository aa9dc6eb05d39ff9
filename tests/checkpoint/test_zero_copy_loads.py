"""A checkpoint by generations is taken up where it lies: nothing is written, and it stays as it was."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from counting import Counting

import zinf_fx
from zinf_fx.checkpoint.entries import Matching
from zinf_fx.checkpoint.manifest import Manifest, SavedFile, SavedPiece, SavedTensor, ShardMetadata
from zinf_fx.checkpoint.sharing import ZeroCopyLoad
from zinf_fx.errors import CheckpointError, StoreError
from zinf_fx.plan.sharding import Shards
from zinf_fx.runtime.disk.copy_on_write import CopyOnWrite
from zinf_fx.runtime.disk.scratch import Scratch, survey
from zinf_fx.runtime.disk.store import Store


def saved_by_a_dead_job(tmp_path: Path, steps: int = 1, kept: str | None = None) -> Path:
    """Return the directory of a checkpoint whose store is gone; `kept`: the directory of one that was made a step
    before."""
    job = Counting(tmp_path / "first")
    if kept is not None:
        job.step()
        job.save(tmp_path / kept)
    for _ in range(steps):
        job.step()
    job.save(tmp_path / "saved")
    store_of(job).close()
    return tmp_path / "saved"


def store_of(job: Counting) -> Store:
    return job.model[0].weight.stored.tiers.store


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_nothing_is_written_and_no_space_is_taken(tmp_path: Path):
    saved = saved_by_a_dead_job(tmp_path, steps=3)
    (link,) = saved.glob("*.extents")
    job = Counting(tmp_path / "second")
    job.step()
    job.optimizer.finish()
    store = store_of(job)
    before, size, on_disk = store.counters(), store.volumes[0].size, taken(link)
    assert job.load(saved) == 3
    after = store.counters()
    assert after.bytes_written == before.bytes_written
    assert store.volumes[0].size == size
    (adopted,) = store.files[1:]
    assert adopted.path.samefile(link) and adopted.in_use > 0
    job.check()
    in_use = store.in_use
    for _ in range(3):
        job.step()
        job.save(saved)  # replaces what it was loaded from: the pages of that are written again
    job.check()
    assert store.in_use == in_use and store.volumes[0].size == size and taken(adopted.path) == on_disk
    assert Counting(tmp_path / "third").load(saved) == 6


def test_an_earlier_checkpoint_and_other_jobs_keep_what_they_have(tmp_path: Path):
    """They have pages in the same file, of which this job knows nothing."""
    saved = saved_by_a_dead_job(tmp_path, kept="earlier")
    jobs = [Counting(tmp_path / name) for name in ("second", "third")]
    for job in jobs:
        assert job.load(saved) == 2
    assert [len(store_of(job).files) for job in jobs] == [2, 1]
    shutil.rmtree(saved)
    for number, job in enumerate(jobs):
        for _ in range(3):
            job.step()
            job.save(tmp_path / f"saved by {number}")
        job.check()
    store_of(jobs[0]).close()
    jobs[1].check()
    reader = Counting(tmp_path / "reader")
    steps = [reader.load(tmp_path / name) for name in ("earlier", "saved by 0", "saved by 1")]
    assert steps == [1, 5, 5]


def test_a_job_that_is_alive_keeps_its_room_when_others_take_up_its_checkpoint(tmp_path: Path):
    """They copy: with a name of theirs the pages would not be its own again, and it would need those of a third set."""
    first, second = Counting(tmp_path / "first"), Counting(tmp_path / "second")
    first.step()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert len(store_of(second).files) == 1
    in_use = store_of(first).in_use
    for _ in range(3):
        first.step()
        first.save(tmp_path / "saved")
        second.check()
    assert store_of(first).in_use == in_use
    second.step()
    second.save(tmp_path / "saved by the second")
    first.step()
    first.check()
    second.check()


def test_another_model_in_the_same_store_copies(tmp_path: Path):
    """Two names of one file in a store would hide from it when a checkpoint is gone."""
    first, second = Counting(tmp_path / "first"), Counting(tmp_path / "first")
    assert store_of(first) is store_of(second)
    first.step()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    in_use = store_of(first).in_use
    for _ in range(3):
        first.step()
        first.save(tmp_path / "saved")
    first.check()
    second.check()
    assert store_of(first).in_use == in_use


def test_what_is_left_of_the_file_goes_with_the_last_who_has_it(tmp_path: Path):
    saved = saved_by_a_dead_job(tmp_path)
    (link,) = saved.glob("*.extents")
    job = Counting(tmp_path / "second")
    job.load(saved)
    job.step()
    job.optimizer.finish()
    before = taken(link)
    store_of(job).close()
    assert list((tmp_path / "second").iterdir()) == [] and link.stat().st_nlink == 1
    assert taken(link) == before
    assert Counting(tmp_path / "third").load(saved) == 1


def test_a_killed_job_leaves_the_checkpoint_and_names_that_are_swept(tmp_path: Path):
    saved = saved_by_a_dead_job(tmp_path)
    (link,) = saved.glob("*.extents")
    child = os.fork()
    if not child:
        job = Counting(tmp_path / "second")
        job.load(saved)
        os._exit(1)
    os.waitpid(child, 0)
    assert link.stat().st_nlink == 2
    survey(tmp_path / "second", remove=True)
    assert link.stat().st_nlink == 1 and Counting(tmp_path / "third").load(saved) == 1


def test_a_damaged_page_is_found_before_anything_is_taken_over(tmp_path: Path):
    saved = saved_by_a_dead_job(tmp_path)
    (link,) = saved.glob("*.extents")
    with link.open("r+b") as file:
        content = bytearray(file.read())
        for start in range(0, len(content), 4096):  # whichever pages it has
            content[start] ^= 1
        file.seek(0)
        file.write(content)
    job = Counting(tmp_path / "second")
    job.step()
    with pytest.raises(CheckpointError, match=f"{link.name} is damaged"):
        job.load(saved)
    assert link.stat().st_nlink == 1 and store_of(job).in_use == sum(v.in_use for v in store_of(job).volumes)
    (scratch,) = (tmp_path / "second").iterdir()
    assert sorted(path.name for path in scratch.iterdir()) == ["data-0", "lock"]


@pytest.mark.parametrize("refuses", ["link", "open"])
def test_a_file_that_can_not_be_adopted_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: str
):
    saved = saved_by_a_dead_job(tmp_path)
    job = Counting(tmp_path / "second")
    job.step()

    def refuse(self: Scratch, name: object, *_: object) -> None:
        raise StoreError(refuses, str(name), "the file system gives it no other name")

    monkeypatch.setattr(Scratch, refuses, refuse)
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        assert job.load(saved) == 1
    assert "is copied to the store: " in caplog.text and "no other name" in caplog.text
    (link,) = saved.glob("*.extents")
    assert link.stat().st_nlink == 1 and len(store_of(job).files) == 1


def test_what_is_read_meanwhile_is_waited_for(tmp_path: Path):
    """The space of frozen parameters goes back to the store, for anybody to write to."""
    saved = saved_by_a_dead_job(tmp_path)
    job = Counting(tmp_path / "second")
    weight, store = job.model.requires_grad_(False)[0].weight, store_of(job)
    before = weight.stored.bytes.allocation.in_store._live[0].extent
    seen: list[bool] = []

    class Read:
        def done(self) -> bool:
            return bool(seen)

        def wait(self) -> None:
            seen.append(before.generation in store._live)

    weight.stored.bytes.allocation.reads.append((range(1), Read()))
    job.load(saved)
    assert seen == [True] and before.generation not in store._live


def test_stripes_over_several_directories(tmp_path: Path):
    """An extent that lies in two files by turns lies so in the store that goes on with it."""
    values = {}
    for name in ("first", "second"):
        stores = [tmp_path / name / half for half in ("one", "two")]
        for path in stores:
            path.mkdir(parents=True)
        model = torch.nn.Linear(2048, 2048 + 1024, bias=False)
        zinf_fx.offload(model, store=stores, placement="nvme")
        store = model.weight.stored.tiers.store
        if name == "first":
            zinf_fx.save_checkpoint(tmp_path / "saved", model)
        else:
            zinf_fx.load_checkpoint(tmp_path / "saved", model)
            assert len(store.files) == 4
        values[name] = model.weight.full_tensor()
        store.close()
    assert torch.equal(values["first"], values["second"])


@pytest.mark.parametrize("tiles", [1, 2])
def test_shards_that_were_divided_otherwise_are_copied(tmp_path: Path, tiles: int):
    """Of three ranks and two tiles, the first has as many elements as in one tile, and others."""
    shards = Shards(12288, ranks=3, segment=12288, step=2048)
    pieces = [SavedPiece(part.start, len(part), rank, 0, 0) for rank in range(3) for part in shards.of_rank(rank)]
    saved = SavedTensor("model/w", torch.float32, (12288,), (ShardMetadata((0,), (12288,), tuple(pieces)),))
    files = tuple(SavedFile(f"data-00000000-{rank}-0.extents", 16384, of_store=True) for rank in range(3))
    manifest = Manifest("", "", 3, files, (saved,))
    now = replace(shards, segment=12288 // tiles)
    with Store(tmp_path) as store:
        in_store = CopyOnWrite(store, 4 * now.held_by(0))

        def page_range(elements: range) -> range:
            first = 4 * now.position(0, elements.start)
            return range(first, first + 4 * len(elements))

        allocation = mock.Mock(tiers=None, in_store=in_store)
        shard = SimpleNamespace(
            tiers=None,
            box=saved.boxes[0].box,
            wanted=list(now.of_rank(0)),
            page_range=page_range,
            allocation=allocation,
        )
        matching = Matching(manifest.by_name(), [], rank=0, ranks=3, ranks_then=3)
        matching.targets.append((saved, shard))
        assert len(ZeroCopyLoad(tmp_path, manifest, matching).others) == (tiles > 1)


def test_a_checkpoint_that_is_gone_meanwhile_is_no_fault_of_the_store(tmp_path: Path):
    with Store(tmp_path) as store:
        for missing in (tmp_path / "data-00000000-0-0.extents", tmp_path / "none" / "data"):
            with pytest.raises(StoreError, match=r"store adopt failed: .* it can't be looked at"):
                store.adopt(missing, [])
        assert len(store.files) == 1


def test_an_interrupt_leaves_a_training_that_can_load_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = saved_by_a_dead_job(tmp_path)
    job = Counting(tmp_path / "second")
    job.step()

    def interrupted(self: Store, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(Store, "adopted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.load(saved)
    for _ in range(2):
        assert job.load(saved) == 1
        job.step()
        job.save(tmp_path / "again")
    job.check()


def test_what_was_tied_and_is_not_any_more_is_taken_up_once(tmp_path: Path):
    """Two tensors in one place would be written over each other once the checkpoint is gone."""
    models = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
        if name == "first":
            model[1].weight = model[0].weight
        models.append(zinf_fx.offload(model, store=tmp_path / name, placement="nvme", pack=None))
    tied, untied = models
    zinf_fx.save_checkpoint(tmp_path / "saved", tied)
    tied[0].weight.stored.tiers.store.close()
    zinf_fx.load_checkpoint(tmp_path / "saved", untied)
    for step in range(4):
        with torch.no_grad():
            for number, layer in enumerate(untied):
                layer.weight.fill_(10 * step + number)
        zinf_fx.save_checkpoint(tmp_path / "saved", untied)
    assert [layer.weight.full_tensor().unique().tolist() for layer in untied] == [[30.0], [31.0]]
