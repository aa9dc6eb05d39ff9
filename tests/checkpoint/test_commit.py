"""An export that is cut off leaves the old weights or the new ones, and nothing in the way of the next."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from breaking_files import LosingPower, put
from gate import slow
from torch import nn

import zinf_fx
from zinf_fx.checkpoint import export as export_module
from zinf_fx.checkpoint.copying import values_of
from zinf_fx.checkpoint.export import export
from zinf_fx.checkpoint.files import Files, locked
from zinf_fx.errors import CheckpointError

SEVERAL, ONE = 700, "5GB"  # limits


def net(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 16) for _ in range(2)), nn.Linear(8, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_in(directory: Path) -> float:
    """Return the value of all weights of an export. As transformers, a reader looks for a single file first."""
    model = net(0.0)
    zinf_fx.load_safetensors(model, directory)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


CALLS = ("fsync", "rename", "unlink", "posix_fallocate", "write")


def killed_at(number: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run `action` in a process that ends before the call with this number that changes files. Whether it did."""
    child = os.fork()
    if not child:
        count = 0

        def counted(call: Callable) -> Callable:
            def wrapper(*arguments: object, **options: object) -> object:
                nonlocal count
                count += 1
                if count == number:
                    os._exit(9)
                return call(*arguments, **options)

            return wrapper

        try:
            for name in CALLS:
                monkeypatch.setattr(os, name, counted(getattr(os, name)))
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    return os.waitstatus_to_exitcode(status) == 9


@pytest.mark.parametrize(("before", "after"), [slow(ONE, ONE), (ONE, SEVERAL), (SEVERAL, ONE), slow(SEVERAL, SEVERAL)])
def test_killed_exports_leave_the_old_weights_or_the_new(
    before: object, after: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old, new = net(1.0), net(2.0)
    zinf_fx.export_safetensors(old, tmp_path / "first", max_shard_size=before)
    values = []
    for number in range(1, 200):
        directory = shutil.copytree(tmp_path / "first", tmp_path / f"killed{number}")
        died = killed_at(number, lambda d=directory: zinf_fx.export_safetensors(new, d, after), monkeypatch)
        values.append(value_in(directory))
        zinf_fx.export_safetensors(net(3.0), directory, after)
        assert value_in(directory) == 3.0
        names = {path.name for path in directory.iterdir()}
        assert len(names) == (1 if after == ONE else 4), names
        if not died:
            break
    assert len(values) > 5 and values == sorted(values) and {*values} == {1.0, 2.0}


class Recorded(Files):
    """Notes what is synced, renamed and removed, by name."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.done.append(("rename", new.name))

    def remove(self, path: Path) -> None:
        if path.exists() and path.name != "lock":
            self.done.append(("remove", path.name))
        super().remove(path)


@pytest.mark.parametrize(("before", "after"), [(10**9, 10**9), (10**9, SEVERAL), (SEVERAL, 10**9), (SEVERAL, SEVERAL)])
def test_nothing_relies_on_what_a_power_failure_could_undo(before: int, after: int, tmp_path: Path):
    export(net(1.0), tmp_path, before)
    files = Recorded()
    export(net(2.0), tmp_path, after, files)
    last = "model.safetensors" if after > SEVERAL else "model.safetensors.index.json"
    renamed = [name for what, name in files.done if what == "rename"]
    assert renamed[-1] == last and len(renamed) == (1 if after > SEVERAL else 4)
    for name in renamed:
        assert files.done.index(("sync", name)) < files.done.index(("rename", name))
    names_synced = [number for number, operation in enumerate(files.done) if operation == ("sync", tmp_path.name)]
    committed = files.done.index(("rename", last))
    if renamed[:-1]:  # their names are on the disk before the one that makes them count
        assert any(files.done.index(("rename", renamed[-2])) < number < committed for number in names_synced)
    removed = [number for number, (what, _) in enumerate(files.done) if what == "remove"]
    assert any(committed < number for number in names_synced)
    assert all(any(committed < synced < number for synced in names_synced) for number in removed)
    assert value_in(tmp_path) == 2.0


@pytest.mark.parametrize("limit", [SEVERAL, 10**9])
def test_power_fails_when_an_export_to_a_new_directory_has_returned(limit: int, tmp_path: Path):
    root = tmp_path / "disk"
    root.mkdir()
    disk = LosingPower(root)
    export(net(2.0), root / "models" / "net", limit, disk)
    for content in disk.after():
        assert value_in(put(content, tmp_path / "image") / "models" / "net") == 2.0


def test_a_full_disk_leaves_the_old_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    zinf_fx.export_safetensors(net(1.0), tmp_path, SEVERAL)
    names = {path.name for path in tmp_path.iterdir()}

    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written = []
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "write", lambda *arguments: written.append(arguments))
    with pytest.raises(CheckpointError, match=r"reserving 2\.2 KiB .*No space left.*: free space, or"):
        zinf_fx.export_safetensors(net(2.0), tmp_path, SEVERAL)
    assert not written and {path.name for path in tmp_path.iterdir()} == names and value_in(tmp_path) == 1.0


@pytest.mark.parametrize("call", ["write", "rename", "fsync"])
def test_a_failing_disk_leaves_the_old_weights(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    zinf_fx.export_safetensors(net(1.0), tmp_path, SEVERAL)
    names = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        count, whole = 0, getattr(os, call)

        def failing(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return whole(*arguments)

        patch.setattr(os, call, failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            zinf_fx.export_safetensors(net(2.0), tmp_path, SEVERAL)
    assert {path.name for path in tmp_path.iterdir()} == names and value_in(tmp_path) == 1.0


def test_a_file_that_can_not_be_opened_is_told_when_all_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Other ranks count on this one until then."""
    zinf_fx.export_safetensors(net(1.0), tmp_path, SEVERAL)
    gathered, opened = [], os.open

    def failing(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE == os.O_WRONLY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        patch.setattr(export_module, "values_of", lambda tensor: (gathered.append(tensor), values_of(tensor))[1])
        with pytest.raises(CheckpointError, match=r"writing weights failed at .*-00001-of-.*: Too many open files"):
            zinf_fx.export_safetensors(net(2.0), tmp_path, SEVERAL)
    assert len(gathered) == len(list(net(2.0).parameters())) and value_in(tmp_path) == 1.0


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()])
def test_a_failure_behind_the_index_leaves_whole_weights(error: BaseException, tmp_path: Path):
    class Failing(Recorded):
        def sync(self, fd: int) -> None:
            if ("rename", "model.safetensors.index.json") in self.done:
                raise error
            super().sync(fd)

    zinf_fx.export_safetensors(net(1.0), tmp_path, SEVERAL)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        export(net(2.0), tmp_path, SEVERAL, Failing())
    assert value_in(tmp_path) == 2.0
    zinf_fx.export_safetensors(net(3.0), tmp_path, SEVERAL)
    assert value_in(tmp_path) == 3.0 and len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(("before", "after"), [(10**9, 10**9), (10**9, SEVERAL), (SEVERAL, 10**9)])
def test_a_configuration_appears_behind_the_weights(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        export_module, "_write_configuration", lambda model, folder: (folder / "config.json").write_text("")
    )
    export(net(1.0), tmp_path, before)
    files = Recorded()
    export(net(2.0), tmp_path, after, files)
    changed = [(what, name) for what, name in files.done if what != "sync"]
    weights = [number for number, (_, name) in enumerate(changed) if name.startswith("model")]
    assert changed.index(("rename", "config.json")) > max(weights)


def test_an_index_that_can_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match=r"writing the index of weights failed at .*No space left"):
        zinf_fx.export_safetensors(net(2.0), tmp_path, SEVERAL)
    assert not list(tmp_path.iterdir())


def test_other_files_stay(tmp_path: Path):
    kept = ["config.json", "model-card.md", "other.safetensors", "model-00001-of-00002.safetensors.md"]
    for name in kept:
        (tmp_path / name).write_text("kept")
    for limit in (SEVERAL, ONE):
        zinf_fx.export_safetensors(net(1.0), tmp_path, limit)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "model.safetensors"}
    assert all((tmp_path / name).read_text() == "kept" for name in kept)


def test_two_jobs_do_not_write_to_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def within(*arguments: object) -> None:
        with pytest.raises(CheckpointError, match="another process saves to it now"):
            zinf_fx.export_safetensors(net(2.0), tmp_path)
        calls.append(arguments)

    calls: list[object] = []
    fallocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *a: (calls or within(*a), fallocate(*a)))
    zinf_fx.export_safetensors(net(1.0), tmp_path)
    assert calls and value_in(tmp_path) == 1.0


def test_a_lock_is_that_of_the_file_that_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, flock, calls = tmp_path / "lock", fcntl.flock, 0

    def late(fd: int, how: int) -> None:
        nonlocal calls
        calls += 1
        if calls < 3:  # who had it goes between the opening of its file and the lock
            path.unlink()
        if calls == 2:
            path.write_text("")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert calls == 3
        with pytest.raises(CheckpointError, match="another process saves to it now"), locked(tmp_path):
            pass


def test_a_link_in_the_place_of_the_folder_for_new_files_is_refused(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".zinf-unfinished").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"zinf-unfinished is a link to another place"):
        zinf_fx.export_safetensors(net(1.0), tmp_path / "out")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["file"]


def test_a_directory_among_unfinished_files_is_refused(tmp_path: Path):
    (tmp_path / ".zinf-unfinished" / "mine").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"removing what is left .*zinf-unfinished/mine: Is a directory; .* move it"
    ):
        zinf_fx.export_safetensors(net(1.0), tmp_path)
    assert (tmp_path / ".zinf-unfinished" / "mine").is_dir()


def test_a_directory_that_can_not_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"making a folder .*file.*Not a directory"):
        zinf_fx.export_safetensors(net(1.0), tmp_path / "file")
