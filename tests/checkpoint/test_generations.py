"""What stays in the store for a checkpoint: nothing more is moved, and it stays as it was, whatever comes behind it."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import named
from jobs import Job, assert_equal
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.runtime.tensor.tiers import Tiers

CASES = {
    "nvme": {},
    "infinity-nvme": {"placement": "infinity-nvme", "compiled": True},
    "at once": {"options": {"overlap": False}},
    "in the background": {"options": {"overlap": True}, "compiled": True, "scales": False},
    "in backward": {"options": {"step_in_backward": True}, "compiled": True, "scales": False},
    "in packs": {"compiled": True, "fields": {"pack": "auto"}, "scales": False},
    "each by itself": {"compiled": True, "fields": {"pack": None}},
    "fp32": {"dtype": torch.float32},
}


def tiers_of(model: nn.Module) -> Tiers:
    return next(iter(model.parameters())).stored.tiers


def is_by_generations(directory: Path) -> bool:
    manifest = manifest_of(directory)
    return manifest.in_store_nbytes > 0.8 * manifest.nbytes


@pytest.mark.parametrize("name", named(CASES, {"infinity-nvme", "in the background"}))
def test_what_is_resumed_goes_on_bit_for_bit(tmp_path: Path, name: str):
    """It goes on from each of three checkpoints in the same store, after all of it was written anew, more than once."""
    how = CASES[name]
    first = Job(tmp_path / "store", seed=1, **how)
    values, losses = {}, {}
    for until in (4, 7, 10, 14):
        losses[until] = first.train(until)
        first.save(tmp_path / str(until))
        values[until] = first.values()
        assert is_by_generations(tmp_path / str(until))
    first.train(16)
    for until in (4, 7, 10):
        second = Job(tmp_path / "other", seed=2, **how)
        second.load(tmp_path / str(until))
        assert_equal(second.values(), values[until])
        assert second.train(14) == [loss for end, some in losses.items() if end > until for loss in some]
        assert_equal(second.values(), values[14])


class Filled:
    """A model on disk whose gradients are given, so that a step is all that is done."""

    def __init__(self, store: Path, frozen: bool = False, **fields: Any) -> None:
        store.mkdir(exist_ok=True, parents=True)
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(64, 64 + 64 * number, bias=number > 1) for number in range(3)))
        self.model[0].requires_grad_(not frozen)
        zinf_fx.offload(self.model.bfloat16(), store=store, placement="nvme", **fields)
        self.optimizer = zinf_fx.optim.AdamW(self.model.parameters(), lr=0.1)
        self.store = tiers_of(self.model).store
        self.step()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.finish()

    def moved(self, action: Any) -> tuple[int, int]:
        """Return bytes that the store read and wrote meanwhile."""
        before = self.store.counters()
        action()
        tiers_of(self.model).drain()
        after = self.store.counters()
        return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and states."""
        states = [t for entry in self.optimizer.state.values() for t in entry.values() if t.dim()]
        return [*self.model.parameters(), *states]

    @property
    def capacity(self) -> int:
        """Return bytes of the store that they take."""
        return sum(
            allocation.in_store.capacity for allocation in {tensor.stored.bytes.allocation for tensor in self.tensors}
        )

    def values(self) -> list[torch.Tensor]:
        return [tensor.full_tensor() for tensor in self.tensors]

    def loaded(self, directory: Path) -> list[torch.Tensor]:
        """Return what another one has, once it has loaded a checkpoint."""
        other = Filled(directory.parent / "other")
        zinf_fx.load_checkpoint(directory, other.model, other.optimizer)
        return other.values()


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other) for tensor, other in zip(some, others, strict=True))


def test_no_byte_more_is_moved(tmp_path: Path):
    job = Filled(tmp_path / "store")
    plain = job.moved(job.step)
    for _ in range(3):
        assert job.moved(lambda: zinf_fx.save_checkpoint(tmp_path / "saved", job.model, job.optimizer)) == (0, 0)
        assert job.moved(job.step) == plain
    assert plain[1] > 0 and is_by_generations(tmp_path / "saved")


@pytest.mark.parametrize("keep", [1, 3])
def test_each_checkpoint_that_is_kept_takes_its_bytes_and_no_more(tmp_path: Path, keep: int):
    job = Filled(tmp_path / "store")
    plain = job.store.in_use
    manager = zinf_fx.CheckpointManager(tmp_path / "run", job.model, job.optimizer, every_steps=1, keep=keep)
    taken, values = [], {}
    for step in range(1, 8):
        path = manager.after_step(step)
        values[path] = job.values()
        taken.append(job.store.in_use)
        job.step()
    assert taken == [plain + job.capacity * min(step, keep) for step in range(1, 8)]
    there = sorted((tmp_path / "run").iterdir())
    assert len(there) == keep
    for path in there:
        assert same(job.loaded(path), values[path])
    manager.save(9, "final")
    assert job.store.in_use == plain + job.capacity * (1 + keep)


def test_what_is_removed_by_whoever_is_free_for_the_next(tmp_path: Path):
    job = Filled(tmp_path / "store")
    plain = job.store.in_use
    for name in "abc":
        zinf_fx.save_checkpoint(tmp_path / name, job.model, job.optimizer)
        job.step()
    assert job.store.in_use == plain + 3 * job.capacity
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "c")
    zinf_fx.save_checkpoint(tmp_path / "d", job.model, job.optimizer)
    assert job.store.in_use == plain + 2 * job.capacity


def test_what_has_moved_is_left_alone(tmp_path: Path):
    job = Filled(tmp_path / "store")
    zinf_fx.save_checkpoint(tmp_path / "a", job.model, job.optimizer)
    expected = job.values()
    (tmp_path / "a").rename(tmp_path / "b")
    for _ in range(3):
        job.step()
        zinf_fx.save_checkpoint(tmp_path / "c", job.model, job.optimizer)
    job.step()
    assert same(job.loaded(tmp_path / "b"), expected)


def test_frozen_parameters_are_shared(tmp_path: Path):
    job = Filled(tmp_path / "store", frozen=True)
    plain = job.store.in_use
    frozen = job.model[0].weight.stored.bytes.allocation.in_store.capacity
    for name in "abc":
        zinf_fx.save_checkpoint(tmp_path / name, job.model, job.optimizer)
        job.step()
    assert job.store.in_use == plain + 3 * (job.capacity - frozen)
    expected = job.values()
    zinf_fx.save_checkpoint(tmp_path / "d", job.model, job.optimizer)
    with torch.no_grad():
        job.model[0].weight.zero_()
    job.step()
    assert same(job.loaded(tmp_path / "d"), expected)


def test_gradients_under_way(tmp_path: Path):
    """They are freed by the training, and stay for the checkpoint."""
    job = Filled(tmp_path / "store")
    for parameter in job.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    zinf_fx.save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
    job.optimizer.zero_grad()
    for _ in range(2):
        job.step()
    other = Filled(tmp_path / "other")
    zinf_fx.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
    assert all((parameter.grad.full_tensor() == 0.5).all() for parameter in other.model.parameters())


def test_another_file_system_gets_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shm = Path("/dev/shm") / f"zinf-generations-{os.getpid()}"
    if not os.access(shm.parent, os.W_OK):
        pytest.skip("no tmpfs")
    job = Filled(tmp_path / "store")
    try:
        with caplog.at_level(logging.INFO, logger="zinf_fx"):
            zinf_fx.save_checkpoint(shm, job.model, job.optimizer)
            zinf_fx.save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
        copied, kept = [record.message for record in caplog.records if "saved to" in record.message]
        assert copied.endswith(", by copying: the store is on another file system")
        assert ", by generations: " in kept and kept.endswith("the others stay in the store's files")
        assert manifest_of(shm).in_store_nbytes == 0 and is_by_generations(tmp_path / "saved")
        assert same(job.loaded(tmp_path / "saved"), job.values())
        (tmp_path / "copied").symlink_to(shm)
        assert same(job.loaded(tmp_path / "copied"), job.values())
    finally:
        shutil.rmtree(shm)


def test_a_store_without_checksums_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = Filled(tmp_path / "store", checksum=False)
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        zinf_fx.save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
    assert "by copying: the store keeps no checksums" in caplog.text
    assert same(job.loaded(tmp_path / "saved"), job.values())


def test_a_store_of_several_directories(tmp_path: Path):
    stores = [tmp_path / "one", tmp_path / "two"]
    for path in stores:
        path.mkdir()
    model = nn.Linear(2048, 2048, bias=False)
    zinf_fx.offload(model, store=stores, placement="nvme")
    expected = model.weight.full_tensor()
    zinf_fx.save_checkpoint(tmp_path / "saved", model)
    with torch.no_grad():
        model.weight.zero_()
    assert len(list((tmp_path / "saved").glob("*.extents"))) == 2
    assert manifest_of(tmp_path / "saved").in_store_nbytes == expected.nbytes
    zinf_fx.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(model.weight.full_tensor(), expected)


def test_a_store_goes_with_its_model(tmp_path: Path):
    job = Filled(tmp_path / "store")
    zinf_fx.save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
    expected = job.values()
    del job
    gc.collect()  # the optimizer's circles
    assert list((tmp_path / "store").iterdir()) == []
    other = Filled(tmp_path / "other")
    zinf_fx.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
    assert same(other.values(), expected)
