"""Whatever ends a save, what loads is the checkpoint before or the new one, never a mixture."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from breaking_files import Failing, Killed, LosingPower, put
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.entries import state_entries
from zinf_fx.checkpoint.files import FILES, Files
from zinf_fx.checkpoint.save import save
from zinf_fx.errors import CheckpointError, StoreError


def net(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 300))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save_net(directory: Path, value: float, files: Files = FILES) -> None:
    model = net(value)
    save(directory, state_entries(model, torch.optim.SGD(model.parameters(), lr=value), {"value": value}), files)


def value_in(directory: Path) -> float:
    """Return the value of all weights, of the options, and the plain one."""
    model = net(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain = zinf_fx.load_checkpoint(directory, model, optimizer)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    values |= {plain["value"], optimizer.param_groups[0]["lr"]}
    assert len(values) == 1, f"a mixture: {values}"
    return values.pop()


def assert_only_one(directory: Path) -> None:
    names = sorted(path.name for path in directory.iterdir())
    assert len(names) == 3 and names[1:] == ["lock", "manifest.json"] and names[0].startswith("data-")


def killed(directory: Path, number: int) -> bool:
    """Save in a process that is killed before the operation with this number. Returns whether it was."""
    child = os.fork()
    if not child:
        try:
            save_net(directory, 2.0, Killed(number))
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_kills_at_every_operation(tmp_path: Path):
    save_net(tmp_path / "first", 1.0)
    values = []
    for number in range(1, 100):
        directory = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        died = killed(directory, number)
        values.append(value_in(directory))
        save_net(directory, 3.0)
        assert_only_one(directory)
        assert value_in(directory) == 3.0
        if not died:
            break
    assert not died and len(values) > 10
    assert values == sorted(values) and set(values) == {1.0, 2.0}


def test_kills_of_the_first_save(tmp_path: Path):
    loaded = 0
    for number in range(1, 100):
        directory = tmp_path / str(number)
        died = killed(directory, number)
        try:
            loaded += value_in(directory) == 2.0
        except CheckpointError as error:
            assert died and (
                "cut off" in str(error) or "no such directory" in str(error) or "no manifest" in str(error)
            )
        save_net(directory, 3.0)
        assert_only_one(directory)
        if not died:
            break
    assert not died and loaded > 1


@pytest.mark.parametrize("is_first", [True, False])
def test_power_fails_at_every_operation(tmp_path: Path, is_first: bool):
    """Of a save that makes its directory and one above it, and of one that replaces a checkpoint."""
    root = tmp_path / "disk"
    root.mkdir()
    if not is_first:
        save_net(root / "runs" / "saved", 1.0)
    disk = LosingPower(root)
    save_net(root / "runs" / "saved", 2.0, disk)
    disk.remember()
    values = []
    for content in disk.images:
        directory = put(content, tmp_path / "image") / "runs" / "saved"
        try:
            values.append(value_in(directory))
        except CheckpointError:
            assert is_first and "runs/saved/manifest.json" not in content
        save_net(directory, 3.0)
        assert_only_one(directory)
        assert value_in(directory) == 3.0
    assert len(disk.images) > 6 and set(values) == ({2.0} if is_first else {1.0, 2.0})
    for content in disk.after():
        assert value_in(put(content, tmp_path / "image") / "runs" / "saved") == 2.0


@pytest.mark.parametrize("ignores", ["sync", "sync_data"])
def test_a_disk_that_does_not_sync_shows_why_saves_do(tmp_path: Path, ignores: str):
    save_net(tmp_path / "saved", 1.0)
    disk = LosingPower(tmp_path / "saved", ignores)
    save_net(tmp_path / "saved", 2.0, disk)
    damaged = 0
    for content in disk.images:
        try:
            value_in(put(content, tmp_path / "image"))
        except CheckpointError:
            damaged += 1
    assert damaged


@pytest.mark.parametrize(
    ("number", "names", "error", "says"),
    [
        (1, ("reserve",), OSError(errno.ENOSPC, "No space left on device"), "the file system is full: free space"),
        (1, ("create",), PermissionError(errno.EACCES, "Permission denied"), "change its mode"),
        (2, ("start_write",), StoreError("write", "somewhere", "the device failed", errno=errno.EIO), "device failed"),
        (1, ("sync_data",), OSError(errno.EIO, "Input/output error"), "Input/output error; see the system's log"),
        (2, ("create",), OSError(errno.ENOSPC, "No space left on device"), "committing a checkpoint failed"),
        (1, ("write",), OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk quota is used up"),
        (1, ("rename",), OSError(errno.EIO, "Input/output error"), "committing a checkpoint failed"),
    ],
)
def test_what_fails_leaves_training_and_the_checkpoint_as_they_were(
    tmp_path: Path, number: int, names: tuple[str, ...], error: OSError, says: str
):
    directory = tmp_path / "saved"
    model = zinf_fx.offload(nn.Linear(64, 64), store=tmp_path, placement="nvme", checksum=False)  # so that it is copied
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(64)).sum().backward()
        optimizer.step()
    zinf_fx.save_checkpoint(directory, model, optimizer)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    expected = model.weight.full_tensor()
    failing = Failing(number, error, names)
    with pytest.raises((CheckpointError, StoreError), match=says):
        save(directory, state_entries(model, optimizer, {}), failing)
    assert failing.failed
    after = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert after == before
    assert torch.equal(model.weight.full_tensor(), expected)
    assert model.weight.stored.tiers.host.in_use == 0
    optimizer.step()
    zinf_fx.save_checkpoint(directory, model, optimizer)
    assert_only_one(directory)


def test_where_the_commit_itself_fails_neither_checkpoint_is_removed(tmp_path: Path):
    """What is on the device, then, is the one or the other."""
    save_net(tmp_path, 1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    failing = Failing(3, OSError(errno.EIO, "Input/output error"), ("sync",))
    with pytest.raises(CheckpointError, match="committing a checkpoint failed"):
        save_net(tmp_path, 2.0, failing)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() > before.keys() and after["manifest.json"] != before["manifest.json"]
    assert value_in(tmp_path) == 2.0
    (tmp_path / "manifest.json").write_bytes(before["manifest.json"])
    assert value_in(tmp_path) == 1.0


def test_an_interrupt_leaves_nothing_open(tmp_path: Path):
    model = zinf_fx.offload(nn.Linear(64, 64), store=tmp_path, placement="nvme", checksum=False)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "saved", state_entries(model, None, {}), Failing(2, KeyboardInterrupt(), ("start_write",)))
    assert model.weight.stored.tiers.host.in_use == 0
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["lock"]


def test_two_jobs_do_not_save_to_one_directory_at_a_time(tmp_path: Path):
    class Meanwhile(Files):
        def sync_data(self, fd: int) -> None:
            with pytest.raises(CheckpointError, match="another process saves to it now"):
                save_net(tmp_path, 2.0)
            super().sync_data(fd)

    save_net(tmp_path, 1.0, Meanwhile())
    assert value_in(tmp_path) == 1.0
    assert_only_one(tmp_path)
