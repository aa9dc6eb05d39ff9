"""From which directory paths are meant: those in variables of the environment, from where the program was when it
began."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

STORE = "ZINF_STORE"
"""The directory of the store, or several."""

_CACHE = "XDG_CACHE_HOME"


@cache
def seen_in(variable: str, value: str) -> str:
    """The working directory in which this value of a variable was first seen: what is relative in it is meant from
    there, wherever the program goes later. Raises: FileNotFoundError where that directory is gone."""
    return os.getcwd()


with contextlib.suppress(FileNotFoundError):  # which is raised once the directory is needed
    for _variable in filter(os.environ.get, (STORE, _CACHE)):
        seen_in(_variable, os.environ[_variable])


def path_from(start: Callable[[], str], given: str | os.PathLike[str]) -> Path:
    """An absolute path. `start`: gives the directory from which a relative one is meant; called for such only."""
    path = Path(os.path.expanduser(given))
    return path if path.is_absolute() else Path(start(), path)


def cache_directory() -> Path:
    """Where zinf_fx keeps what it can make anew; below the root for a user without a home."""
    if configured := os.environ.get(_CACHE):
        return path_from(lambda: seen_in(_CACHE, configured), configured) / "zinf_fx"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    return Path("/", home, ".cache", "zinf_fx")
