"""A save that waits for the next step has what there was when it was due."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import slow
from jobs import Job, assert_equal
from torch import nn

import zinf_fx
from zinf_fx.checkpoint import background, entries
from zinf_fx.errors import CheckpointError

HOW: dict[str, Any] = {"compiled": True, "scales": False}
STEPS = 4


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step go on in the background for long; of small models, some are over at once."""
    monkeypatch.setattr(background, "_goes_on", lambda optimizer: True)


def managed(job: Job, directory: Path) -> zinf_fx.CheckpointManager:
    return zinf_fx.CheckpointManager(directory, job.model, job.adam, every_steps=1, keep=9, schedule=job.schedule)


@pytest.mark.parametrize("placement", [slow("nvme"), "infinity-nvme", slow("host")])
def test_what_is_resumed_goes_on_bit_for_bit(tmp_path: Path, placement: str):
    """Forward and backward change buffers, random states and gradients before the save is made."""
    twin, job = (Job(tmp_path / name, seed=1, placement=placement, **HOW) for name in ("twin", "store"))
    values, losses = {}, {}
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        losses[step] = twin.train(2 * step)
        values[step] = twin.values()
    with managed(job, tmp_path / "run") as checkpoints:
        for step in range(1, STEPS + 1):
            torch.manual_seed(step)
            assert job.train(2 * step - 1) == losses[step][:1]
            if step > 1:
                assert not (tmp_path / "run" / f"step-{step - 1:08d}").exists()
            assert job.train(2 * step) == losses[step][1:]
            path = checkpoints.after_step(step)
            assert not path.exists()
            if step > 1:
                assert (tmp_path / "run" / f"step-{step - 1:08d}" / "manifest.json").exists()
    assert path.exists()
    for step in range(1, STEPS + 1):
        second = Job(tmp_path / "other", seed=2, placement=placement, **HOW)
        again = zinf_fx.load_checkpoint(
            tmp_path / "run" / f"step-{step:08d}", second.model, second.adam, schedule=second.schedule
        )
        assert again["step"] == step
        second.done = 2 * step
        assert_equal(second.values(), values[step])
        for later in range(step + 1, STEPS + 1):
            torch.manual_seed(later)
            assert second.train(2 * later) == losses[later]
        assert_equal(second.values(), values[STEPS])


def test_random_states_and_options_are_those_of_then(tmp_path: Path):
    job = Job(tmp_path / "store", seed=1, **HOW)
    job.train(2)
    with managed(job, tmp_path / "run") as checkpoints:
        expected, rate = torch.get_rng_state(), job.adam.param_groups[0]["lr"]
        path = checkpoints.after_step(1)
        torch.rand(7)
        job.adam.param_groups[0]["lr"] = 123.0
    zinf_fx.load_checkpoint(path, job.model, job.adam, schedule=job.schedule)
    assert torch.equal(torch.get_rng_state(), expected) and job.adam.param_groups[0]["lr"] == rate


def test_who_asks_for_it_gets_it(tmp_path: Path):
    job = Job(tmp_path / "store", seed=1, **HOW)
    job.train(2)
    with managed(job, tmp_path / "run") as checkpoints:
        first = checkpoints.after_step(1)
        assert not first.exists()
        named = checkpoints.save(1, "named")
        assert first.exists() and named.exists()
        job.train(4)
        second = checkpoints.after_step(2)
        assert not second.exists()
        assert checkpoints.resume() == 2 and second.exists()
        job.done = 4
        job.train(6)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            checkpoints.after_step(3)
        assert (tmp_path / "run" / "step-00000003" / "manifest.json").exists()


def test_outside_of_the_block_it_is_made_at_once(tmp_path: Path):
    job = Job(tmp_path / "store", seed=1, **HOW)
    job.train(2)
    assert managed(job, tmp_path / "run").after_step(1).exists()


def test_gradients_and_large_tensors_in_memory_are_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(tmp_path / "store", seed=1, **HOW)
    with managed(job, tmp_path / "run") as checkpoints:
        job.train(3)
        assert checkpoints.after_step(1).exists()
        job.train(4)
        monkeypatch.setattr(entries, "LARGEST", 64)
        assert checkpoints.after_step(2).exists()


def test_what_is_loaded_meanwhile_is_not_saved_as_what_was_due(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = Job(tmp_path / "store", seed=1, **HOW)
    job.train(2)
    job.save(tmp_path / "saved")
    with managed(job, tmp_path / "run") as checkpoints:
        job.train(4)
        path = checkpoints.after_step(2)
        job.load(tmp_path / "saved")
        job.train(4)
    assert not path.exists() and "a checkpoint that was due is not saved" in caplog.text


@pytest.mark.parametrize("then", ["after_step", "save", "close"])
def test_an_error_is_raised_by_the_manager_and_not_by_the_step(tmp_path: Path, then: str, caplog):
    model = zinf_fx.offload(nn.Linear(64, 64), store=tmp_path, placement="nvme")
    plain = nn.Linear(64, 64)
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    optimizers = zinf_fx.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    run = tmp_path / "run"

    def step() -> None:
        for optimizer, net in zip(optimizers, (model, plain), strict=True):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    step()
    with zinf_fx.CheckpointManager(run, model, optimizers[0], every_steps=1) as checkpoints:
        checkpoints.after_step(1)
        run.write_text("no directory")
        step()
        assert "could not be saved before the step that followed" in caplog.text
        assert torch.equal(model.weight.full_tensor(), plain.weight)
        run.unlink()
        with pytest.raises(CheckpointError, match="a part of the path is no directory"):
            getattr(checkpoints, then)(*() if then == "close" else (2,))
        checkpoints.close()  # it was said once
        step()
        checkpoints.after_step(3)
    assert torch.equal(model.weight.full_tensor(), plain.weight)
    steps = {path.name for path in run.iterdir()}
    assert "step-00000003" in steps and "step-00000001" not in steps
    assert ("step-00000002" in steps) == (then != "close")
