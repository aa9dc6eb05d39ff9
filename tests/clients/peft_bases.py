"""A plugin for peft's own tests: the base models that they make are stored before adapters are added to them.

    pip install -e '.[test,clients]' scipy parameterized
    pip download --no-deps --no-binary :all: peft && tar xf peft-*.tar.gz && touch peft-*/tests/__init__.py && cd peft-*
    PYTHONPATH=.../tests/clients STORED=nf4 python -m pytest -o addopts= -p peft_bases tests/test_custom_models.py \
        -k "TestPeftCustomModel and LoraConfig"

STORED is "memory", where nothing is changed, "values", where bases are stored in their dtype, or a format of
`frozen_dtype`, for which they are frozen. What was found is in docs/libraries.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from torch import nn

import zinf_fx
from zinf_fx import quantisation

STORED = os.environ["STORED"]
# The matrices of these tests have rows of 10 to 30 values.
quantisation._FEWEST = 1


def stored(model: nn.Module) -> nn.Module:
    """Store the model on disk."""
    if STORED == "values":
        return zinf_fx.offload(model, placement="nvme")
    return zinf_fx.offload(model.requires_grad_(False), placement="nvme", frozen_dtype=STORED)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for models in {item.module.MockTransformerWrapper for item in items} if STORED != "memory" else ():
        make = models.from_pretrained
        models.from_pretrained = staticmethod(lambda *given, make=make, **options: stored(make(*given, **options)))
