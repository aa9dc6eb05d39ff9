"""A store whose directory somebody removed while its job runs: a cleaner of temporary files, say."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import value_of

import zinf_fx
from zinf_fx.errors import StoreError


def scratch(data: Path) -> None:
    shutil.rmtree(data.parent)


def store(data: Path) -> None:
    shutil.rmtree(data.parent.parent)


@pytest.mark.parametrize("removed", [scratch, Path.unlink, store])
def test_training_goes_on_and_is_saved(
    tmp_path: Path, removed: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "store").mkdir()
    model = zinf_fx.offload(torch.nn.Linear(512, 512), store=tmp_path / "store", placement="nvme")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    checkpoints = zinf_fx.CheckpointManager(tmp_path / "run", model, optimizer, keep=2)

    def step(number: int) -> None:
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.finish()
        checkpoints.save(number)

    for number in range(3):
        step(number)
    of_store = model.weight.stored.tiers.store
    plain = of_store.in_use
    data = of_store.path
    removed(data)
    with caplog.at_level(logging.INFO, logger="zinf_fx"):
        for number in range(3, 7):
            step(number)
    assert f"{data} was removed while its job runs" in caplog.text
    assert f"Keep cleaners away from {tmp_path / 'store'}" in caplog.text
    assert f"by copying: the store's file {data} was removed by somebody else" in caplog.text
    assert of_store.in_use < plain  # what the checkpoints before had is the store's again
    expected = [value_of(parameter) for parameter in model.parameters()]
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    optimizer.finish()
    assert checkpoints.resume() == 6
    assert all(map(torch.equal, map(value_of, model.parameters()), expected))
    if removed is store:
        with pytest.raises(StoreError, match="the store's directory was removed while the job runs: make it anew"):
            torch.save(model.state_dict(), tmp_path / "model.pt")
    zinf_fx.export_safetensors(model, tmp_path / "out")
    of_store.close()
    assert not (tmp_path / "store").exists() or os.listdir(tmp_path / "store") == []
