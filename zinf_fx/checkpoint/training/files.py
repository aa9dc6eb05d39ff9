"""The files of a checkpoint: their names, and what of them is left of a save that was cut off.

[Note: commits]
Data files have names that no save used before. When their bytes are on the device, and their names too, the manifest
is written under a name of its own, synced, and renamed to `manifest.json`; then the directory is synced. So the name
`manifest.json` stands for the old checkpoint or for the new one, whatever of the last operations a crash undoes, and in
whatever order they reach the device. What the manifest doesn't name is removed behind that, or by the next save.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Collection
from pathlib import Path

from zinf_fx.checkpoint.commit import appear
from zinf_fx.checkpoint.files import FILES, LOCK, Files, locked, refusals, sync
from zinf_fx.errors import CheckpointError
from zinf_fx.regular_files import open_regular, read_regular
from zinf_fx.runtime.disk.ownership import is_alike, is_proven
from zinf_fx.sizes import PAGE

log = logging.getLogger("zinf_fx")

MANIFEST, NEW_MANIFEST = "manifest.json", "manifest.json.new"
FORMAT = "zinf_fx checkpoint"
FIRST_BYTES = f'{{"format":"{FORMAT}"'.encode()
"""Of every manifest."""

# Bytes that tell the files that are written here from others.
_BEGIN = 64
_DATA = re.compile(r"data-[0-9a-f]{8}-(?P<rank>[0-9]{1,9})-[0-9]{1,9}\.(safetensors|extents)")
# Bytes: of a manifest of ten trillion parameters.
_LARGEST_MANIFEST = 4 << 30


def data_name(save: str, rank: int, number: int) -> str:
    """The name of a data file: of which save, rank and number."""
    return f"data-{save}-{rank}-{number}.safetensors"


def link_name(save: str, rank: int, number: int) -> str:
    """The name of a store's data file in a checkpoint."""
    return f"data-{save}-{rank}-{number}.extents"


def rank_of(name: str) -> int | None:
    """The number of the rank that saved a data file; None for other names."""
    found = _DATA.fullmatch(name)
    return None if found is None else int(found["rank"])


def read_manifest(directory: Path) -> bytes:
    """The content of a checkpoint's manifest. Raises: CheckpointError when there is none, saying what there is."""
    path = directory / MANIFEST
    try:
        return read_regular(path, _LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no checkpoint to load: {_instead(directory)}") from None
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointError(
                f"{path} has more than {_LARGEST_MANIFEST} bytes, and no manifest has: it is another file"
            ) from None
        with refusals("reading a checkpoint", path):
            raise error


def manifest_in(directory: Path) -> bytes:
    """The same, of a directory that may have none: nothing then."""
    return read_manifest(directory) if os.path.lexists(directory / MANIFEST) else b""


def _instead(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory; name one that save_checkpoint() wrote"
    if leftovers(directory, b""):
        return f"a save was cut off before it wrote {MANIFEST}, and what it left is no checkpoint; use another one"
    return f"there is no {MANIFEST} in it; name a directory that save_checkpoint() wrote"


def is_data(name: str) -> bool:
    """Whether a file's name is one of a data file."""
    return _DATA.fullmatch(name) is not None


def is_link(name: str) -> bool:
    """Whether the name of a data file is one of a store's."""
    return name.endswith(".extents")


def is_ours(name: str) -> bool:
    """Whether a file's name is one that makes a checkpoint, or is left of one."""
    return name in (MANIFEST, NEW_MANIFEST) or is_data(name)


def leftovers(directory: Path, manifest: bytes, proven: Collection[Path] = ()) -> list[Path]:
    """What saves left in a directory that were cut off: files with our names, and what these say, that are nowhere in
    the manifest's text, which may be empty, or damaged. `proven`: those that are known to be what their names say."""
    with refusals("looking for what is left of a save", directory):
        found = sorted(os.listdir(directory))
    others = (name for name in found if name != MANIFEST and is_ours(name) and name.encode() not in manifest)
    return [path for path in (directory / name for name in others) if path in proven or _is_as_named(path)]


def _is_as_named(path: Path) -> bool:
    """Whether a file is what its name says, as far as a save that was cut off wrote it: its beginning may be zeros. One
    that only has the name may be anybody's."""
    try:
        fd = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        begin = os.pread(fd, _BEGIN, 0)
        if not begin.strip(b"\0"):
            return True
        if path.name == NEW_MANIFEST:
            return begin.startswith(FIRST_BYTES[: len(begin)])
        if is_link(path.name):
            return is_proven(fd) or (is_alike(fd) and os.fstat(fd).st_nlink > 1)  # which stays under another name
        return (8 + int.from_bytes(begin[:8], "little")) % PAGE == 0 and begin[8:9] in (b"{", b"\0")
    finally:
        os.close(fd)


def is_what_is_left(manifest: bytes, directory: Path) -> bool:
    """Whether the content of a `manifest.json`, which doesn't begin as ours, is what damage left of ours: that is no
    JSON, as another program's is, and lies beside data files of ours."""
    try:
        json.loads(manifest)
    except ValueError:
        return any(path.name != NEW_MANIFEST for path in leftovers(directory, b""))
    except RecursionError:  # JSON, nested deeply
        pass
    return False


def check_is_free(directory: Path) -> None:
    """Raises: CheckpointError where the name that a new manifest has until it is whole is somebody else's."""
    new = directory / NEW_MANIFEST
    if os.path.lexists(new) and not _is_as_named(new):
        raise CheckpointError(
            f"saving a checkpoint to {directory} was refused: its {NEW_MANIFEST} is another program's; move it "
            "elsewhere"
        )


def of_failed_save(directory: Path, save: str) -> list[Path]:
    """What a save that failed wrote: none of it when its manifest is that of the directory, in spite of the failure."""
    left = leftovers(directory, manifest_in(directory))
    return [path for path in left if path.name == NEW_MANIFEST or path.name.startswith(f"data-{save}-")]


def commit(files: Files, directory: Path, manifest: bytes) -> None:
    """Make the manifest that of the directory: see [Note: commits]. Its data files are on the device."""
    new = directory / NEW_MANIFEST
    files.remove(new)
    fd = files.create(new)
    try:
        files.write(fd, manifest)
    finally:
        os.close(fd)
    appear({new: directory / MANIFEST}, files)


def discard(directory: Path, proven: Collection[Path] = ()) -> None:
    """Remove a checkpoint, or what is left of a save: first what makes it one. What is not ours in the directory stays.
    `proven`: as of `leftovers`.

    Raises: CheckpointError when another process saves to it, when the manifest names a file that isn't what its name
    says, or it can't be removed.
    """
    if directory.is_symlink():
        raise CheckpointError(f"removing a checkpoint was refused: {directory} is a link to another place")
    with refusals("removing a checkpoint", directory):
        names = set(os.listdir(directory)) - {LOCK}
    if names and MANIFEST not in names and not leftovers(directory, b""):
        return
    with refusals("removing a checkpoint", directory), locked(directory):
        manifest, mine = manifest_in(directory), leftovers(directory, b"", proven)
        named = sorted(name for name in names if is_data(name) and name.encode() in manifest)
        if foreign := [name for name in named if directory / name not in mine]:
            raise CheckpointError(
                f"removing the checkpoint in {directory} was refused: {foreign[0]} has the name of a data file, and "
                "doesn't prove to be one of this user's; remove it by hand"
            )
        FILES.remove(directory / MANIFEST)
        sync(FILES, directory)
        for path in mine:
            FILES.remove(path)
        if not os.stat(directory / LOCK, follow_symlinks=False).st_size:  # else it was somebody's before
            FILES.remove(directory / LOCK)
        if not os.listdir(directory):
            os.rmdir(directory)
