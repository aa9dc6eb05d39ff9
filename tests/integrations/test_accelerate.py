"""accelerate compiles with this backend."""

from __future__ import annotations

import copy
import pickle

import pytest

pytest.importorskip("accelerate")

from accelerate.utils import DynamoBackend, TorchDynamoPlugin

import zinf_fx.integrations.accelerate  # noqa: F401


def test_backend_is_known():
    plugin = TorchDynamoPlugin(backend="zinf")
    assert plugin.to_kwargs() == {"backend": "zinf"}
    assert plugin.backend != DynamoBackend.NO and plugin.backend == DynamoBackend("ZINF") and "ZINF" in DynamoBackend
    assert plugin.backend is DynamoBackend.ZINF and plugin.backend in list(DynamoBackend)
    assert copy.deepcopy(plugin.backend) == pickle.loads(pickle.dumps(plugin.backend)) == plugin.backend


def test_others_are_as_before():
    assert TorchDynamoPlugin(backend="inductor").backend is DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="ZINC"):
        TorchDynamoPlugin(backend="zinc")
