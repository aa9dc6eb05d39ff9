"""Tiers are shared by what has one store, and refused where gradients would go unreduced."""

from __future__ import annotations

import gc

from zinf_fx.config import Config
from zinf_fx.runtime.tensor.tiers import Tiers


def test_one_store_directory_has_one_set_of_tiers(tmp_path):
    first = Tiers.of(Config(store=tmp_path))
    assert Tiers.of(Config(store=tmp_path, prefetch=None)) is first
    (tmp_path / "other").mkdir()
    assert Tiers.of(Config(store=tmp_path / "other")) is not first


def test_the_scratch_directory_is_made_on_first_use_and_goes_with_the_tiers(tmp_path):
    tiers = Tiers.of(Config(store=tmp_path))
    assert list(tmp_path.iterdir()) == []
    tiers.store.allocate(4096)
    assert len(list(tmp_path.iterdir())) == 1
    del tiers
    gc.collect()
    assert list(tmp_path.iterdir()) == []
