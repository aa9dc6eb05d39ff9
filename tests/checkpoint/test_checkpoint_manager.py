"""A manager decides when a run's checkpoints are saved, which stay, and from which one a run goes on."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
import torch
from forked import Running
from torch import nn

import zinf_fx
from zinf_fx.checkpoint import manager, manifest
from zinf_fx.checkpoint import save as save_module
from zinf_fx.checkpoint.manifest import manifest_of
from zinf_fx.cli import main
from zinf_fx.errors import CheckpointError, ConfigError


class Run:
    """A training whose only weight counts its steps."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.checkpoints = zinf_fx.CheckpointManager(directory, self.model, self.optimizer, **options)

    @property
    def steps(self) -> int:
        return int(self.model.weight)

    def train(self, until: int) -> None:
        while self.steps < until:
            self.model(-torch.ones(1)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.checkpoints.after_step(self.steps)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_so_many_steps_the_last_are_kept_and_those_with_names(tmp_path: Path):
    run = Run(tmp_path, every_steps=2, keep=2)
    assert run.checkpoints.resume() == 0
    run.train(5)
    run.checkpoints.save(5, name="best")
    run.train(11)
    assert names(tmp_path) == ["best", "step-00000008", "step-00000010"]
    again = Run(tmp_path, every_steps=2, keep=2)
    assert again.checkpoints.resume() == again.steps == 10
    again.train(13)
    assert names(tmp_path) == ["best", "step-00000010", "step-00000012"]


def test_the_newest_may_have_a_name(tmp_path: Path):
    run = Run(tmp_path, every_steps=4, text="of the run")
    run.train(5)
    run.checkpoints.save(5, name="by.hand")
    again = Run(tmp_path, text="another one")
    assert again.checkpoints.resume() == 5 and again.checkpoints.values == {"text": "of the run"}


def test_every_so_many_minutes(tmp_path: Path):
    run = Run(tmp_path, every_minutes=0.005)
    run.train(1)
    assert not tmp_path.joinpath("step-00000001").exists()
    time.sleep(0.31)
    run.train(3)
    assert names(tmp_path) == ["step-00000002"]


def test_what_is_damaged_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = Run(tmp_path, every_steps=1, keep=4)
    run.train(4)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    (data,) = (tmp_path / "step-00000003").glob("data-*")
    content = bytearray(data.read_bytes())
    content[-4096] ^= 1
    data.write_bytes(content)
    again = Run(tmp_path, every_steps=1, keep=4)
    assert again.checkpoints.resume() == again.steps == 2
    assert "not resumed from" in caplog.text and "step-00000003" in caplog.text
    again.train(3)
    assert names(tmp_path) == [f"step-0000000{step}" for step in (1, 2, 3)]  # what was cut off is gone


def zeros(content: bytes) -> bytes:
    """Return a manifest whose blocks a disk lost."""
    return bytes(len(content))


def with_another_bit(content: bytes) -> bytes:
    return content[:300] + bytes([content[300] ^ 1]) + content[301:]


@pytest.mark.parametrize("damage", [zeros, with_another_bit])
@pytest.mark.parametrize("name", ["step-00000002", "by-hand"])
def test_a_newest_checkpoint_with_a_damaged_manifest_is_told_of_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], name: str
):
    run = Run(tmp_path)
    run.checkpoints.save(1)
    path = run.checkpoints.save(2, None if name.startswith("step-") else name) / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    again = Run(tmp_path)
    assert again.checkpoints.resume() == 1
    (said,) = (message for message in caplog.messages if "not resumed from" in message)
    assert f"{path} is damaged" in said
    again.checkpoints.save(2, None if name.startswith("step-") else name)
    assert Run(tmp_path).checkpoints.resume() == 2
    assert len(list(path.parent.glob("data-*"))) == 1


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path):
    run = Run(tmp_path, every_steps=1)
    run.train(2)
    for path in tmp_path.glob("*/data-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole.*is missing"):
        run.checkpoints.resume()
    other = zinf_fx.CheckpointManager(tmp_path / "step-00000001" / "none", run.model)
    assert other.resume() == 0


def test_a_checkpoint_that_does_not_fit_is_no_reason_to_take_an_older_one(tmp_path: Path):
    Run(tmp_path, every_steps=1).train(2)
    with pytest.raises(CheckpointError, match="doesn't fit"):
        zinf_fx.CheckpointManager(tmp_path, nn.Linear(1, 2, bias=False)).resume()


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_minutes": -1}, {"keep": 0}, {"step": 3}])
def test_options_that_can_not_be_meant(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Run(tmp_path, **options)


@pytest.mark.parametrize("name", ["step-7", "a/b", ".", ""])
def test_names_that_are_none(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="is no name for a checkpoint"):
        Run(tmp_path).checkpoints.save(1, name=name)


def test_a_clock_that_was_set_back_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Before(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) - timedelta(days=1)

    run = Run(tmp_path, every_steps=1, keep=1)
    run.train(1)
    run.checkpoints.save(1, name="best")
    monkeypatch.setattr(save_module, "datetime", Before)
    run.train(3)
    assert names(tmp_path) == ["best", "step-00000003"]
    assert Run(tmp_path).checkpoints.resume() == 3


def test_what_was_cut_off_is_gone_before_the_next_needs_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Run(tmp_path, every_steps=1)
    run.train(2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    there: list[str] = []
    monkeypatch.setattr(manager, "save", lambda *_, **__: there.extend(names(tmp_path)))
    run.checkpoints.save(3)
    assert there == ["step-00000001"]


def test_foreign_files_stay(tmp_path: Path):
    run = Run(tmp_path, every_steps=1, keep=1)
    run.train(1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-elsewhere").mkdir()
    run.train(2)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-elsewhere"]
    assert names(tmp_path / "step-00000001") == ["notes.txt"]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Directories that may not be listed: root, as whom tests run, is refused none."""
    unlisted, list_them = set(), os.listdir

    def listdir(path: Path | str) -> list[str]:
        if Path(path) in unlisted:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return list_them(path)

    monkeypatch.setattr(os, "listdir", listdir)
    return unlisted


def test_directories_that_nobody_may_read_are_left_out(
    tmp_path: Path, kept: set[Path], capsys: pytest.CaptureFixture[str]
):
    run = Run(tmp_path, every_steps=1)
    run.train(1)
    (tmp_path / "lost+found").mkdir()
    kept.add(tmp_path / "lost+found")
    again = Run(tmp_path, every_steps=1)
    assert again.checkpoints.resume() == 1
    again.train(2)
    for arguments in (["checkpoint", "list"], ["checkpoint", "verify"], ["clean"]):
        assert main([*arguments, str(tmp_path)]) == 0
    assert "lost+found" not in capsys.readouterr().out
    kept.add(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match=r"looking for checkpoints failed at .*step-00000002: Permission denied"):
        Run(tmp_path).checkpoints.resume()
    assert main(["checkpoint", "list", str(tmp_path)]) == 2
    assert "step-00000002: Permission denied; it is not accessible for this user" in capsys.readouterr().err


@pytest.mark.parametrize("where", [".", "page"])
def test_a_manifest_of_another_program_is_no_checkpoint(where: str, tmp_path: Path):
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / where / "manifest.json").write_text('{"name": "a web page"}')
    run = Run(tmp_path, every_steps=1)
    assert run.checkpoints.resume() == 0
    run.train(2)
    again = Run(tmp_path, every_steps=1)
    assert again.checkpoints.resume() == again.steps == 2


PROGRAM = """
import sys, time, torch, zinf_fx
from torch import nn
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with zinf_fx.CheckpointManager(sys.argv[1], model, optimizer, every_steps=1000) as checkpoints:
    for step in range(checkpoints.resume(), 10_000):
        model(-torch.ones(1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step + 1, flush=True)
        time.sleep(0.02)
        checkpoints.after_step(step + 1)
"""


def test_sigterm_saves_and_ends(tmp_path: Path):
    running = Running(PROGRAM, tmp_path)
    assert running.stdout.readline() == "1\n"
    os.kill(running.pid, signal.SIGTERM)
    ended = running.end()
    last = int(("1\n" + ended.stdout).split()[-1])
    assert ended.returncode == 143, ended.stderr
    run = Run(tmp_path)
    assert run.checkpoints.resume() == run.steps == last


def test_sigterm_where_no_step_follows_is_not_lost(tmp_path: Path):
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        with Run(tmp_path).checkpoints:
            signal.raise_signal(signal.SIGTERM)
            assert not calls
        assert calls == [signal.SIGTERM]
        with Run(tmp_path).checkpoints:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert len(calls) == 2  # the second one is the program's
        assert len(calls) == 3
    finally:
        signal.signal(signal.SIGTERM, before)


def test_saves_read_no_manifest_that_this_run_wrote_and_notice_one_that_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, read = Run(tmp_path, every_steps=1, keep=2), []
    monkeypatch.setattr(manifest, "manifest_of", lambda path: (read.append(path.name), manifest_of(path))[1])
    run.train(3)
    assert read == []
    damaged = tmp_path / "step-00000003" / "manifest.json"
    damaged.write_bytes(b"{" + damaged.read_bytes())
    run.train(5)
    assert read and set(read) == {"step-00000003"}
    assert names(tmp_path) == [
        "step-00000003",
        "step-00000004",
        "step-00000005",
    ]  # what is damaged is nobody's to remove
