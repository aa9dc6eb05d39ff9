"""All tests share these fixtures."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Test models are tiny: a second thread costs more than it computes. Before torch is imported, and for child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS gives the same bits each time only with this; it looks once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# A job in the background (a CI runner, say) starts with SIGINT ignored, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_finish() -> None:
    """Torch traces what it compiles, in long texts, for any handler of a logger that hands nothing on: pytest gives
    handlers of its own to loggers that are so."""
    logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(scope="module", autouse=True)
def garbage_is_looked_for_among_new_objects() -> None:
    """Many tests collect garbage, which looks at all objects of the libraries, too, unless these are set aside."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before is used again, and nothing stays."""
    import torch  # not with this file: some tests do without

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` is that of tests/golden/<name>; UPDATE_GOLDEN=1 in the environment writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text)
        expected = path.read_text() if path.exists() else ""
        assert text == expected, f"{path.name} differs; if that is right, run with UPDATE_GOLDEN=1 and look at the diff"

    return check
