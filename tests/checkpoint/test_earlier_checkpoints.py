"""Checkpoints that earlier versions wrote load with every value as it was saved, and training goes on from them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from earlier_jobs import DIGESTS, EARLIER, JOBS, digests_of
from ranks.launching import on_ranks

from zinf_fx.cli import main


def unpacked(name: str, directory: Path) -> dict[str, str]:
    """Unpack a checkpoint; return the digests of what it has."""
    with tarfile.open(EARLIER / f"{name}.tar.xz") as packed:
        packed.extractall(directory, filter="data")
    digests = directory / DIGESTS
    expected = json.loads(digests.read_text())
    digests.unlink()
    return expected


def loaded(rank: int, name: str, directory: Path, store: Path) -> dict[str, str]:
    """Return the digests of what a fresh job loads, which then trains on, saves, and is loaded again."""
    _, kind, how = JOBS[name]
    job = kind(store / str(rank), 4, **how)
    job.load(directory)
    digests = digests_of(job)
    assert job.done == 5
    job.train(7)
    job.save(directory.with_name("again"))
    again = kind(store / f"{rank}-again", 5, **how)
    again.load(directory.with_name("again"))
    assert digests_of(again) == digests_of(job)
    return digests


@pytest.mark.parametrize("name", [name for name, (ranks, _, _) in JOBS.items() if ranks == 1])
def test_a_checkpoint_of_an_earlier_version_is_resumed(name: str, tmp_path: Path):
    expected = unpacked(name, tmp_path / "saved")
    assert loaded(0, name, tmp_path / "saved", tmp_path) == expected
    for manifest in (tmp_path / "saved").rglob("manifest.json"):
        main(["checkpoint", "verify", str(manifest.parent)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_two_ranks_of_an_earlier_version_is_resumed(ranks: int, tmp_path: Path):
    expected = unpacked("two-ranks", tmp_path / "saved")
    assert on_ranks(ranks, loaded, "two-ranks", tmp_path / "saved", tmp_path) == [expected] * ranks
