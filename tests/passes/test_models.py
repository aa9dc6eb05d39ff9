"""Every small model through every pass: values stay bitwise those of eager PyTorch."""

from __future__ import annotations

import pytest
from capturing import assert_trains_like_eager
from models import CASES, trained

from zinf_fx.config import Config


@pytest.mark.parametrize("name", CASES)
def test_trains_like_eager(name: str) -> None:
    assert trained(name).captures == 1


@pytest.mark.parametrize("name", ["mlp", "tied_far_apart", "weights_fetched_at_the_top", "checkpointed_dropout"])
def test_trains_like_eager_without_prefetch(name: str) -> None:
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=Config(placement="infinity-nvme", prefetch=None))
