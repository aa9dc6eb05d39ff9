"""transformers' Trainer on two ranks, as torchrun starts it, accumulating two micro-batches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks.launching import on_ranks

pytest.importorskip("accelerate")


def trained(rank: int, folder: str) -> dict[str, object]:
    import transformers
    from test_trainer import logged, texts
    from test_transformers import _gpt2

    import zinf_fx
    from zinf_fx.integrations.transformers import Trainer

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    runs = {}
    for name, options in (("plain", {}), ("stored", {"torch_compile": True, "torch_compile_backend": "zinf"})):
        torch.manual_seed(0)
        model = _gpt2()
        arguments = transformers.TrainingArguments(
            output_dir=f"{folder}/{name}", per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_grad_norm=10, num_train_epochs=2, learning_rate=1e-2, weight_decay=0.1, logging_steps=1,
            save_strategy="no", eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **options,
        )  # fmt: skip
        if options:
            zinf_fx.offload(model, placement="zero-3", collective_timeout=60)
            torch._dynamo.reset()
        kind = Trainer if options else transformers.Trainer
        runs[name] = run = kind(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts(4))
        run.train()
    plain, stored = runs.values()
    same = [
        mine.equal(theirs) for mine, theirs in zip(*(run.model.parameters() for run in (stored, plain)), strict=True)
    ]
    wrapped = isinstance(stored.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    evaluated = [[e["eval_loss"] for e in run.state.log_history if "eval_loss" in e] for run in (plain, stored)]
    return {
        "logged": [logged(plain), logged(stored)],
        "evaluated": evaluated,
        "same": all(same),
        "wrapped": wrapped,
    }


@pytest.mark.slow
def test_trainer_equals_distributed_data_parallel(tmp_path: Path):
    for found in on_ranks(2, trained, str(tmp_path)):
        plain, stored = found["logged"]
        assert [loss for loss, _ in stored] == [loss for loss, _ in plain], found
        assert [norm for _, norm in stored] == pytest.approx([norm for _, norm in plain], rel=1e-6)  # of shards, summed
        assert found["evaluated"][0] == found["evaluated"][1] and found["same"] and not found["wrapped"], found
