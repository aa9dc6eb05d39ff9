"""Tiers are shared by what has one store, and refused where gradients would go unreduced."""

from __future__ import annotations

import gc

import pytest
import torch

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.runtime.tiers import Tiers


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


def test_many_ranks_are_refused_before_anything_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="2 ranks"):
        Tiers.of(Config(store=tmp_path))
    assert list(tmp_path.iterdir()) == []
