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
