"""Paths among the options that `torch.compile` is given, which the backend sees when the first graph is compiled.

A program may have gone to another directory by then, and again before the next graph. Relative paths are meant from
the working directory when they were given: of a model, when it was compiled; of a function, and with
`module.compile()`, nothing is known before the first graph. What `torch.compile` made of the backend gives absolute
ones from then on; a dict of the program's own stays as it is, and may be given again in another directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from zinf_fx.environment import path_from
from zinf_fx.errors import ConfigError

_PATHS = ("store", "plan")


def working_directory() -> str:
    """Where the program is; an empty text where the directory is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def keep_absolute(backend: object, options: Mapping[str, object], start: str) -> dict[str, object]:
    """A copy of options in which all paths are absolute. If `backend` is what `torch.compile` made of this one for
    these options, it gives that copy from now on.

    Raises: ConfigError for relative paths, where `start`, the directory from which they are meant, is gone.
    """

    def begin() -> str:
        if start:
            return start
        raise ConfigError(
            f"paths among the options {dict(options)} are relative, and the working directory is gone: name them from "
            "the root"
        )

    def absolute(given: object) -> object:
        if isinstance(given, (list, tuple)):
            return [absolute(member) for member in given]
        is_path = isinstance(given, (str, os.PathLike)) and os.fspath(given)  # an empty one is refused where it is read
        return os.fspath(path_from(begin, given)) if is_path else given

    kept = {name: absolute(value) if name in _PATHS else value for name, value in options.items()}
    arguments = getattr(backend, "kwargs", {})
    if arguments.get("options") is options:
        backend.kwargs = {**arguments, "options": kept}
    return kept
