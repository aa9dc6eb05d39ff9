"""Which files are data files of stores: in any other file nothing is freed, and to none other is anything written.

[Note: proofs]
What a manifest says of a file is input: anybody may have written it. So the file itself has to prove that it is a
store's. The first page of a data file says so, and of which store; it belongs to this user. Data files of earlier
versions don't have that page. They are known by the form in which stores make them, and then only where the checksums
in the manifest are those of what the file has.
"""

from __future__ import annotations

import os
import stat

from zinf_fx.sizes import PAGE

_BEGIN = b"zinf_fx data file of the store in "
_MODE = 0o600


def begin(fd: int, store: str) -> None:
    """Write the first page of a data file, which is reserved. `store`: the name of its scratch directory. Raises:
    OSError."""
    os.pwrite(fd, (_BEGIN + store.encode() + b"\n").ljust(PAGE, b"\0"), 0)


def is_proven(fd: int) -> bool:
    """Whether an open file is a data file of this user's, as its first page says. Raises: OSError."""
    return _is_of_this_user(os.fstat(fd)) and os.pread(fd, len(_BEGIN), 0) == _BEGIN


def is_alike(fd: int) -> bool:
    """Whether an open file has the form of data files that earlier versions made. Raises: OSError."""
    info = os.fstat(fd)
    is_private = stat.S_IMODE(info.st_mode) == _MODE
    return _is_of_this_user(info) and is_private and info.st_size > 0 and info.st_size % PAGE == 0


def _is_of_this_user(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
