from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from zinf_fx.checkpoint import files
from zinf_fx.checkpoint.files import Files


@pytest.fixture
def closing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Files are given back when this is set."""
    allowed, close = threading.Event(), os.close

    def slowly(fd: int) -> None:
        if threading.current_thread().name.startswith("zinf: freeing"):
            assert allowed.wait(20)
        close(fd)

    monkeypatch.setattr(os, "close", slowly)
    yield allowed
    allowed.set()
    files.wait_for_room()


def is_under_way() -> bool:
    """Return whether a file is being given back."""
    return any(thread.name.startswith("zinf: freeing") for thread in threading.enumerate())


def large(path: Path) -> Path:
    """Return a file that takes as much of the disk as one that is given back by a thread."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, files.LARGE)
    return path


def test_the_name_of_a_large_file_is_gone_at_once(tmp_path: Path, closing: threading.Event) -> None:
    path = large(tmp_path / "data")
    Files().remove(path)
    assert not path.exists() and is_under_way()
    closing.set()
    files.wait_for_room()
    assert not is_under_way()


def test_what_needs_the_room_waits_for_it(
    tmp_path: Path, closing: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, allocate = [], os.posix_fallocate

    def full_until_freed(fd: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        if not closing.is_set():
            threading.Timer(0.05, closing.set).start()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, nbytes)

    path = large(tmp_path / "old")
    monkeypatch.setattr(os, "posix_fallocate", full_until_freed)
    files = Files()
    files.remove(path)
    fd = files.create(tmp_path / "new")
    files.reserve(fd, 4096)
    os.close(fd)
    assert asked == [4096, 4096] and (tmp_path / "new").stat().st_size == 4096

    closing.clear()
    with pytest.raises(OSError, match="No space left"):  # nothing is on its way to be given back
        files.reserve(fd, 4096)


def open_files() -> list[str]:
    """Return the paths of this process's open files."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return paths


def test_a_process_made_by_fork_has_none_of_them(tmp_path: Path, closing: threading.Event) -> None:
    Files().remove(large(tmp_path / "data"))
    assert any(path.startswith(str(tmp_path)) for path in open_files())
    threading.Timer(0.05, closing.set).start()
    if (pid := os.fork()) == 0:
        os._exit(any(path.startswith(str(tmp_path)) for path in open_files()))
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("kind", ["small", "link", "directory", "missing", "linked twice"])
def test_others_are_removed_as_ever(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "one"
    if kind == "small":
        path.write_bytes(b"content")
    elif kind == "link":
        path.symlink_to(large(tmp_path / "target"))
    elif kind == "directory":
        path.mkdir()
        with pytest.raises(OSError):
            Files().remove(path)
        return
    elif kind == "linked twice":
        os.link(large(tmp_path / "target"), path)
    Files().remove(path)
    assert not path.exists() and not path.is_symlink() and not is_under_way()
    assert (tmp_path / "target").exists() == (kind in ("link", "linked twice"))
