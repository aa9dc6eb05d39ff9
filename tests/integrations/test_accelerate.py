"""accelerate compiles with this backend, in whichever order the two are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("accelerate")

SCRIPT = """
import {first}
import {second}
import copy, pickle
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
plugin = TorchDynamoPlugin(backend="zinf")
assert plugin.to_kwargs() == {{"backend": "zinf"}}, plugin.to_kwargs()
assert plugin.backend != DynamoBackend.NO and plugin.backend == DynamoBackend("ZINF") and "ZINF" in DynamoBackend
assert copy.deepcopy(plugin.backend) == pickle.loads(pickle.dumps(plugin.backend)) == plugin.backend
assert TorchDynamoPlugin(backend="inductor").backend is DynamoBackend.INDUCTOR
try:
    TorchDynamoPlugin(backend="zinc")
except ValueError as error:
    assert "ZINC" in str(error)
else:
    raise AssertionError("any name is accepted")
"""


@pytest.mark.parametrize(("first", "second"), [("zinf_fx", "accelerate"), ("accelerate", "zinf_fx")])
def test_backend_is_known(first: str, second: str):
    script = SCRIPT.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_is_not_imported_for_that():
    script = "import sys, zinf_fx; assert 'accelerate' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
