"""The one family of exceptions. Every message says what was attempted, what was found, and what to do."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable


class ZinfError(RuntimeError):
    """Base class of every error that zinf_fx raises on purpose."""


class ConfigError(ZinfError, ValueError):
    """An option is unknown, contradicts another, or has a value that can't be used."""


class StoredTensorError(ZinfError):
    """An operation on a stored tensor that can't be honoured."""


class PlanError(ZinfError):
    """A plan breaks an invariant of the graph, exceeds a budget, or doesn't belong to the model at hand."""


class PlanFileError(PlanError):
    """A file is no sound plan, or can't be read or written."""


class BudgetError(PlanError):
    """What must be in memory at once exceeds a budget."""


class OptimizerError(ZinfError):
    """An optimizer that can't step over stored parameters, or was used in a way that would lose an update."""


class CheckpointError(ZinfError):
    """A checkpoint that can't be written, is damaged, or doesn't fit the model at hand."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was saved: a file is missing, or has other bytes."""


class UnfitValueError(CheckpointError, ValueError):
    """A value in a checkpoint that whatever is to have it refuses."""


class RanksError(ZinfError):
    """Ranks that train together disagree, or one of them is gone."""


class StoreError(ZinfError, OSError):
    """An operation on the store failed.

    Attributes:
        operation: what was attempted ("read", "write", "allocate", ...).
        path: the file or directory.
        detail: what was found, and what to do.
        offset, length: in bytes, where they apply.
        errno: the operating system's error number, where there is one.
    """

    def __init__(
        self,
        operation: str,
        path: str | os.PathLike[str],
        detail: str,
        *,
        offset: int | None = None,
        length: int | None = None,
        errno: int | None = None,
    ) -> None:
        where = str(path)
        if offset is not None:
            where += f" at offset {offset}"
        if length is not None:
            where += f", {length} bytes"
        cause = f" [errno {errno}: {os.strerror(errno)}]" if errno else ""
        super().__init__(f"store {operation} failed: {where}: {detail}{cause}")
        self.operation = operation
        self.path = str(path)
        self.detail = detail
        self.offset = offset
        self.length = length
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Callable[[], StoreError], tuple[()], dict[str, object]]:
        """An exception is unpickled by calling its class with `args`, which here are not what `__init__` takes."""
        given = {"offset": self.offset, "length": self.length, "errno": self.errno}
        return functools.partial(type(self), self.operation, self.path, self.detail, **given), (), self.__dict__
