"""Every small model through every pass: values stay bitwise those of eager PyTorch."""

from __future__ import annotations

import pytest
from capturing import assert_trains_like_eager
from models import CASES

from zinf_fx.config import Config


@pytest.mark.parametrize("prefetch", [(1, 2, 3), None], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("name", CASES)
def test_trains_like_eager(name: str, prefetch: tuple[int, int, int] | None) -> None:
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=Config(placement="infinity-nvme", prefetch=prefetch))
