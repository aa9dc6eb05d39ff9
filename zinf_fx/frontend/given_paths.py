"""Paths among the options that `torch.compile` is given, which the backend sees when the first graph is compiled.

A program may have gone to another directory by then, and again before the next graph. Relative paths are meant from
the working directory when they were given: of a model, when it was compiled; of a function, and with
`module.compile()`, nothing is known before the first graph.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zinf_fx.errors import ConfigError

_PATHS = ("store", "plan")

# By the id of a mapping of options with relative paths, the mapping, which so keeps its id, and where they are meant
# from.
_STARTS: dict[int, tuple[Mapping[str, object], str]] = {}


def working_directory() -> str:
    """Where the program is; an empty text where the directory is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def given_in(start: str, options: Mapping[str, object]) -> None:
    """Say from which directory relative paths among options are meant, unless that is known."""
    if with_paths_from(start, options) != with_paths_from("/", options):
        _STARTS.setdefault(id(options), (options, start))


def with_absolute_paths(options: Mapping[str, object]) -> dict[str, object]:
    """A copy of options in which all paths are absolute. Raises: ConfigError where the working directory is gone, from
    which some are meant."""
    if id(options) not in _STARTS:
        given_in(working_directory(), options)
    _, start = _STARTS.get(id(options), (options, "/"))
    if not start:
        raise ConfigError(
            f"paths among the options {dict(options)} are relative, and the working directory is gone: name them from "
            "the root"
        )
    return with_paths_from(start, options)


def with_paths_from(start: str, options: Mapping[str, object]) -> dict[str, object]:
    """A copy of options whose relative paths begin in a directory."""
    return {name: _joined(start, value) if name in _PATHS else value for name, value in options.items()}


def _joined(start: str, given: object) -> object:
    """One path or several, from a directory; anything else, and an empty path, as it is."""
    if isinstance(given, (list, tuple)):
        return [_joined(start, one) for one in given]
    if not isinstance(given, (str, os.PathLike)) or not (path := os.path.expanduser(os.fspath(given))):
        return given
    return os.path.join(start, path)
