"""Errors cross the border between processes as they are: pools send them from their workers by pickling."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle

import pytest

from zinf_fx import errors
from zinf_fx.errors import StoreError, ZinfError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, ZinfError)]
RAISED = [c("found this: do that") for c in CLASSES if c is not StoreError] + [
    StoreError("read", "/mnt/data-0", "a sum differs", offset=4096, length=8192, errno=errno.EIO),
    StoreError("open", "/mnt", "there is no such directory"),
]


def _seen(error: ZinfError) -> dict[str, object]:
    names = ("operation", "path", "detail", "offset", "length", "errno", "strerror", "filename")
    attributes = {name: getattr(error, name) for name in names if hasattr(error, name)}
    return {**attributes, **vars(error), "type": type(error), "args": error.args, "text": str(error)}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: f"{type(error).__name__}({len(vars(error))})")
def test_an_error_is_the_same_on_the_other_side(error: ZinfError):
    error.add_note("and then: another")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert _seen(pickle.loads(pickle.dumps(error, protocol))) == _seen(error)
    assert _seen(copy.copy(error)) == _seen(error)
