"""What ranks do together to save and load a checkpoint: each its part, and all or none."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from breaking_files import Failing, Timed
from jobs import Job
from ranks.launching import on_ranks
from safetensors.torch import load_file
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.entries import state_entries
from zinf_fx.checkpoint.files import FILES
from zinf_fx.checkpoint.save import save
from zinf_fx.cli import main
from zinf_fx.errors import CheckpointError, OptimizerError, StoreError
from zinf_fx.runtime.gradients.state import GradientState


def codes_in_tiles(rank: int) -> str:
    model = zinf_fx.offload(nn.Linear(256, 256), placement="infinity-nvme", tile="32KiB")
    with pytest.raises(OptimizerError) as refused:
        zinf_fx.optim.AdamW(model.parameters(), state_dtype="8bit")
    return str(refused.value)


def test_codes_in_tiles_over_ranks_are_refused():
    for text in on_ranks(2, codes_in_tiles):
        assert "no whole pages of the store; use tile=None or state_dtype=torch.bfloat16" in text


def shares(rank: int, directory: Path) -> tuple[int, list[int]]:
    model = zinf_fx.offload(nn.Linear(256, 256), placement="infinity-nvme")
    zinf_fx.save_checkpoint(directory, model, zinf_fx.optim.AdamW(model.parameters()))
    dist.barrier()
    manifest = json.loads((directory / "manifest.json").read_text())
    return manifest["ranks"], [file["nbytes"] for file in manifest["files"]]


def test_each_rank_writes_its_share(tmp_path: Path):
    for ranks, sizes in on_ranks(2, shares, tmp_path):
        assert ranks == 2 and len(sizes) == 2 and max(sizes) < 1.2 * min(sizes)


def of_each_rank(rank: int, directory: Path) -> dict[str, Any]:
    """Load plain values and tensors that differ between ranks, and random states."""
    job, generator = Job(None, rank, "infinity-cpu"), torch.Generator().manual_seed(rank)
    sampler = Sampler(torch.arange(5000) + rank)
    torch.manual_seed(rank)
    job.save(directory, sampler=sampler, generator=generator, number=rank, text="same")
    expected = torch.rand(2), torch.rand(3, generator=generator)
    sampler.order, generator = torch.zeros(1), torch.Generator()
    loaded = job.load(directory, sampler=sampler, generator=generator)
    drawn = torch.rand(2), torch.rand(3, generator=generator)
    return loaded | {
        "order": bool(torch.equal(sampler.order, torch.arange(5000) + rank)),
        "drawn": all(map(torch.equal, drawn, expected)),
    }


class Sampler:
    def __init__(self, order: torch.Tensor) -> None:
        self.order = order
        self.error: Exception | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.order = state["order"]


def test_what_differs_between_ranks_comes_back_to_each(tmp_path: Path):
    loaded = on_ranks(2, of_each_rank, tmp_path)
    assert loaded == [{"number": n, "text": "same", "order": True, "drawn": True} for n in range(2)]


def refusal(rank: int, directory: Path) -> str:
    job = Job(None, rank, "infinity-cpu")
    try:
        job.load(directory, sampler=Sampler(torch.zeros(1)))
    except CheckpointError as error:
        loaded = job.load(directory, sampler=None, number=None, generator=None)
        return f"{error}; {loaded}"
    return ""


def test_of_another_number_of_ranks_nobody_knows_which_has_what(tmp_path: Path):
    on_ranks(2, of_each_rank, tmp_path)
    (text,) = on_ranks(1, refusal, tmp_path)
    assert "'sampler' was another one on each of 2 ranks, and 1 are here" in text and "sampler=None" in text
    assert text.endswith("{'text': 'same'}")


def under_no_sync(rank: int, directory: Path, load: bool) -> str | bool:
    """Save gradients of each rank alone."""
    job = Job(None, rank, "infinity-nvme")
    if load:
        try:
            job.load(directory)
        except CheckpointError as error:
            return str(error)
    trained = [p for p in job.model.parameters() if p.requires_grad]
    with zinf_fx.no_sync():
        job.loss(rank).backward()
    job.save(directory)
    expected = [p.grad.full_tensor() for p in trained]
    job.adam.zero_grad()
    job.load(directory)
    same = all(map(torch.equal, [p.grad.full_tensor() for p in trained], expected))
    job.loss(rank).backward()
    return same and not any(p.grad.stored.gradient_state is GradientState.LOCAL for p in trained)


def test_gradients_that_each_rank_has_alone(tmp_path: Path):
    assert on_ranks(2, under_no_sync, tmp_path, False) == [True, True]
    (text,) = on_ranks(1, under_no_sync, tmp_path, True)
    assert "accumulated on each of 2 ranks alone, under no_sync, and 1 are here" in text


def failing(rank: int, folder: Path) -> list[str]:
    """One rank fails, in three ways; each time both are told, and the checkpoint before stays."""
    job = Job(None, rank, "infinity-cpu")
    return [_failing(rank, job, folder / how, how) for how in ("full", "value", "torn")]


def _failing(rank: int, job: Job, directory: Path, how: str) -> str:
    job.save(directory)
    before = sorted(path.name for path in directory.iterdir())
    extra: dict[str, Any] = {}
    if rank == 1 and how == "value":
        extra["value"] = object()
    if rank == 1 and how == "torn":
        job.adam.torn = "torn here"
    parts = state_entries(job.model, job.adam, {**job.extra, "done": job.done, **extra})
    full = Failing(1, OSError(errno.ENOSPC, "No space left"), ("rename",)) if how == "full" else FILES
    try:
        save(directory, parts, full)
    except Exception as error:
        dist.barrier()
        assert sorted(path.name for path in directory.iterdir()) == before
        job.adam.torn = None
        job.load(directory)
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_fails_on_one_rank_fails_on_all_and_leaves_no_rank_s_files(tmp_path: Path):
    (first, *firsts), (second, *seconds) = on_ranks(2, failing, tmp_path)
    assert "No space left" in first and "failed on rank 0 of 2: CheckpointError: committing" in second
    for why, first, second in zip(("can't be saved without pickling", "torn here"), firsts, seconds, strict=True):
        expected = "CheckpointError: collecting what is to be saved failed on rank 1 of 2: "
        assert first.startswith(expected) and why in first
        assert why in second and "on rank" not in second


def timed(rank: int, folder: Path) -> list[tuple[float, str, list[str]]]:
    """Return what each rank does to files for the second of two checkpoints, and when."""
    job, files = Job(folder / "store", rank), Timed()
    job.train(2)
    job.save(folder / "saved")
    job.train(4)
    save(folder / "saved", state_entries(job.model, job.adam, job.extra), files)
    return files.begun


def test_a_power_failure_can_not_take_what_any_rank_wrote_from_a_checkpoint(tmp_path: Path):
    (tmp_path / "store").mkdir()
    ranks = on_ranks(2, timed, tmp_path)
    (committed,) = (when for when, what, names in ranks[0] if what == "rename" and "manifest.json" in names)
    for begun in ranks:
        synced = {what: {} for what in ("sync", "sync_data")}  # by names, when last
        for when, what, names in begun:
            if what in synced and when < committed:
                synced[what][names[0]] = when
        # Files that come by the names that they are synced by: a link's is that of the store's file.
        come = [(when, names[0]) for when, what, names in begun if what in ("create", "link") and "data" in names[0]]
        assert come and all(when < synced["sync_data"][name] < synced["sync"]["saved"] for when, name in come)
        assert all(committed < when for when, what, names in begun if what == "remove" and "data" in names[0])


def loading_fails(rank: int, directory: Path) -> list[str]:
    """One rank alone loads another checkpoint, or can't load."""
    job = Job(None, rank, "infinity-cpu")
    for number in range(2):
        job.save(directory / str(number) / "saved")
        job.train(2 * number + 2)
    job.adam.finish()
    return [_loading_fails(rank, job, directory, how) for how in ("other", "step")]


def _loading_fails(rank: int, job: Job, directory: Path, how: str) -> str:
    if rank == 1 and how == "step":

        def failing() -> None:
            raise StoreError("write", "somewhere", "the device failed")

        job.adam.finish = failing
    try:
        os.chdir(directory / str(rank if how == "other" else 0))  # what a path leads to may be another place on each
        job.load(Path("saved"))
    except (CheckpointError, StoreError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_do_not_load_different_checkpoints_nor_behind_a_step_that_fails_on_one(tmp_path: Path):
    (other, first), (another, second) = on_ranks(2, loading_fails, tmp_path)
    for text in (other, another):
        assert re.match(r"CheckpointError: loading \S+/saved was refused: ranks have different checkpoints there", text)
    assert first.startswith("CheckpointError: matching") and "rank 1 of 2: StoreError: store write failed" in first
    assert second.startswith("StoreError: store write failed")


def damaged_and_refused(rank: int, directory: Path) -> tuple[str, str]:
    """The bytes that one rank reads of the newest checkpoint are damaged, and what another one loads refuses them."""
    job, sampler = Job(None, rank, "infinity-cpu"), Sampler(torch.zeros(1))
    parts = job.extra | {"sampler": sampler}
    manager = zinf_fx.CheckpointManager(directory, job.model, job.adam, every_steps=1, **parts)
    for step in (1, 2):
        manager.after_step(step)
    if rank == 1:
        (path,) = (directory / "step-00000002").glob("data-*-1-0.safetensors")
        content = bytearray(path.read_bytes())
        content[8192] ^= 1
        path.write_bytes(content)
    dist.barrier()
    outcomes = []
    for error in (None, ValueError("another order")):
        if rank == 0:
            sampler.error = error
        try:
            outcomes.append(str(manager.resume()))
        except (CheckpointError, ValueError) as raised:
            outcomes.append(f"{type(raised).__name__}: {raised}")
    return tuple(outcomes)


def test_all_ranks_resume_from_the_checkpoint_before_or_none(tmp_path: Path):
    first, second = on_ranks(2, damaged_and_refused, tmp_path)
    assert first[0] == second[0] == "1"
    assert first[1].startswith("UnfitValueError: ") and "ValueError: another order" in first[1]
    assert second[1].startswith("CheckpointError: loading") and "rank 0 of 2: UnfitValueError: " in second[1]


def with_a_part_of_its_own(rank: int, directory: Path) -> dict[str, torch.Tensor]:
    """The first rank alone saves a model besides, and converts it."""
    job = Job(None, rank, "infinity-cpu")
    teacher = {"teacher": nn.Linear(4, 4)} if rank == 0 else {}
    zinf_fx.save_checkpoint(directory / "saved", job.model, job.adam, **teacher)
    if not teacher:
        return {}
    where = [str(directory / "saved"), "-o", str(directory / "converted")]
    assert main(["checkpoint", "convert", *where, "--part", "teacher"]) == 0
    return {name: tensor.detach() for name, tensor in teacher["teacher"].state_dict().items()}


def test_a_part_that_one_rank_alone_has_is_converted(tmp_path: Path):
    saved, _ = on_ranks(2, with_a_part_of_its_own, tmp_path)
    (path,) = (tmp_path / "converted").glob("*.safetensors")
    converted = load_file(path)
    assert saved.keys() == converted.keys() and all(torch.equal(saved[name], converted[name]) for name in saved)


def managed(rank: int, directory: Path) -> list[object]:
    """One rank is told to end: all save, and end."""
    job = Job(None, rank, "infinity-cpu")
    manager = zinf_fx.CheckpointManager(directory, job.model, job.adam, every_steps=2, keep=1, **job.extra)
    outcomes: list[object] = [manager.resume()]
    with manager:
        try:
            for step in range(1, 9):
                job.train(2 * step)
                if rank == 1 and step == 5:
                    signal.raise_signal(signal.SIGTERM)
                outcomes.append(manager.after_step(step) is not None)
        except SystemExit as ended:
            outcomes.append(ended.code)
    return [*outcomes, manager.resume()]


def test_all_ranks_end_when_one_is_told_to(tmp_path: Path):
    expected = [0, False, True, False, True, 143, 5]
    assert on_ranks(2, managed, tmp_path) == [expected, expected]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
