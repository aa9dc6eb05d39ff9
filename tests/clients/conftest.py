"""The rows of the clients' page: each test is one, and says what it found through the fixture `row`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Nothing comes from the network. Before the libraries are imported, and for child processes.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import pytest
import torch
import vision  # noqa: F401  (before transformers, which imports torchvision where it is installed)
from rows import Row


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """Return the row of this test, begun with its marker's words: `@pytest.mark.row(library, ran)`."""
    row = Row(*request.node.get_closest_marker("row").args)
    request.node.user_properties.append(("row", vars(row)))  # goes with the test's report
    return row


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    result = yield
    assert pyfuncitem.funcargs["row"].results, "nothing was compared"
    return result


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left of the test before; stores are in a folder of their own."""
    monkeypatch.setenv("ZINF_STORE", str(tmp_path / "store"))
    (tmp_path / "store").mkdir()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
