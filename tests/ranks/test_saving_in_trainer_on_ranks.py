"""Trainer and accelerate on two ranks, saving and resuming by zinf_fx's checkpoints, optimizer states on NVMe."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks.launching import on_ranks

pytest.importorskip("accelerate")


def _launched(rank: int, ranks: int) -> None:
    """As torchrun says it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")


def trained(rank: int, ranks: int, folder: str, resumed: str | bool | None) -> dict[str, object]:
    """Losses and gradient norms of 8 steps, the parameters after them, and the checkpoints that are kept."""
    import transformers
    from test_trainer import COMPILED, logged, texts
    from test_transformers import _gpt2

    import zinf_fx
    from zinf_fx.integrations.transformers import Trainer

    _launched(rank, ranks)
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2, max_grad_norm=0.5,
        learning_rate=1e-2, weight_decay=0.1, logging_steps=1, max_steps=8, save_strategy="steps", save_steps=3,
        eval_strategy="steps", eval_steps=3, save_total_limit=3, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        **COMPILED,
    )  # fmt: skip
    torch.manual_seed(0)
    model = zinf_fx.offload(_gpt2(), placement="infinity-nvme", collective_timeout=60)
    run = Trainer(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts(4))
    run.train(resume_from_checkpoint=resumed)
    return {
        "logged": logged(run),
        "wrapped": isinstance(run.model_wrapped, torch.nn.parallel.DistributedDataParallel),
        "first": run._initial_global_step,
        "values": {name: value.full_tensor().numpy() for name, value in model.state_dict().items()},
        "saved": sorted(one.name for one in Path(folder).iterdir()),
    }


@pytest.mark.slow
def test_a_resumed_trainer_ends_as_one_that_was_not_interrupted(tmp_path: Path):
    whole = on_ranks(2, trained, 2, str(tmp_path), None)
    resumed = on_ranks(2, trained, 2, str(tmp_path), str(tmp_path / "checkpoint-3"))
    for before, after in zip(whole, resumed, strict=True):
        assert (before["first"], after["first"]) == (0, 3) and len(before["logged"]) == 8
        assert after["logged"] == before["logged"] and after["saved"] == [
            "checkpoint-3",
            "checkpoint-6",
            "checkpoint-8",
        ]
        assert not before["wrapped"]
        assert all((value == before["values"][name]).all() for name, value in after["values"].items())


def accelerated(rank: int, ranks: int, folder: str, resumed: bool) -> dict[str, object]:
    """Two models with an optimizer each: losses of the two steps behind a save, and the parameters after them."""
    from torch import nn

    import zinf_fx
    from zinf_fx.integrations.accelerate import Accelerator

    _launched(rank, ranks)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    optimizers = []
    for number, model in enumerate(models):
        zinf_fx.offload(model, placement="infinity-nvme", collective_timeout=60)
        optimizers.append(zinf_fx.optim.AdamW(model.parameters(), lr=1e-2 * (number + 1)))
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9)
    wrapped = [accelerator.prepare_model(model, evaluation_mode=True) for model in models]
    for model in wrapped:
        model.no_sync = zinf_fx.no_sync
    *prepared, schedule = accelerator.prepare(*optimizers, schedule)
    losses = []

    def step(number: int) -> None:
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * number + rank))
        with accelerator.accumulate(*wrapped):
            loss = (wrapped[1](wrapped[0](batch)) - batch).square().mean()
            accelerator.backward(loss)
            for optimizer in prepared:
                optimizer.step()
            schedule.step()
            for optimizer in prepared:
                optimizer.zero_grad()
        losses.append(loss.item())

    if resumed:
        accelerator.load_state(folder)
    else:
        for number in range(4):
            step(number)
        accelerator.save_state(folder)
        losses.clear()
    for number in range(4, 8):
        step(number)
    values = [value.full_tensor().numpy() for model in models for value in model.parameters()]
    return {"losses": losses, "values": values, "rate": schedule.get_last_lr()}


@pytest.mark.slow
def test_what_accelerate_loads_goes_on_as_what_it_saved(tmp_path: Path):
    from safetensors.torch import load_file

    saved = on_ranks(2, accelerated, 2, str(tmp_path / "state"), False)
    loaded = on_ranks(2, accelerated, 2, str(tmp_path / "state"), True)
    for before, after in zip(saved, loaded, strict=True):
        assert after["losses"] == before["losses"] and after["rate"] == before["rate"] and len(after["losses"]) == 4
        assert all((value == other).all() for value, other in zip(after["values"], before["values"], strict=True))
    folder = tmp_path / "state"
    assert all(
        load_file(folder / name / "model.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
        for name in ("", "model_1")
    )
    assert not (folder / "optimizer.bin").exists()
    (alone,) = on_ranks(1, accelerated, 1, str(folder), True)
    assert alone["losses"][0] == saved[0]["losses"][0]
