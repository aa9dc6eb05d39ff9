"""transformers' Trainer, as its users run it: on an offloaded model, compiled, with its default optimizer; on several
ranks, the Trainer of the integration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from gate import slow
from ranks.launching import on_ranks
from test_transformers import _gpt2, _llama

import zinf_fx

pytest.importorskip("accelerate")

import zinf_fx.integrations.accelerate
from zinf_fx.integrations.transformers import Trainer

COMPILED = {"torch_compile": True, "torch_compile_backend": "zinf"}
VOCABULARY, LENGTH = 64, 12


def texts(count: int = 16) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=random)
    return [{"input_ids": row, "labels": row} for row in tokens]


def as_by_torchrun(rank: int, ranks: int) -> None:
    """Set what torchrun says to one of several ranks."""
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")


def trainer(
    model: torch.nn.Module, directory: Path, kind: type = transformers.Trainer, **options: object
) -> transformers.Trainer:
    """Clips, accumulates two micro-batches, decays the learning rate, and saves after every epoch."""
    settings = {"save_strategy": "epoch", "max_grad_norm": 0.5} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=1e-2, weight_decay=0.1, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    assert arguments.optim == "adamw_torch_fused"
    return kind(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts(4))


def logged(run: transformers.Trainer) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in run.state.log_history if "loss" in entry]


# With the Trainer's loss, AOTAutograd rounds some gradients of Llama otherwise than eager autograd, for every backend.
MODELS = {"gpt2": (_gpt2, {}), "llama": (_llama, {"torch_compile": True, "torch_compile_backend": "aot_eager"})}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize(("name", "placement"), [("gpt2", "nvme"), slow("llama", "infinity-nvme")])
def test_logs_and_weights_equal_the_plain_run_also_from_a_checkpoint_on(tmp_path: Path, name: str, placement: str):
    make, plain_options = MODELS[name]
    runs = []
    for directory, options, resumed in (
        ("plain", plain_options, None),
        ("stored", COMPILED, None),
        ("stored", COMPILED, tmp_path / "stored" / "checkpoint-4"),
    ):
        torch.manual_seed(0)
        model = make()
        if directory == "stored":
            (tmp_path / "store").mkdir(exist_ok=True)
            zinf_fx.offload(model, store=tmp_path / "store", placement=placement)
        run = trainer(model, tmp_path / directory, **options)
        run.train(resume_from_checkpoint=resumed and str(resumed))
        runs.append(run)
    plain, *stored = runs
    assert len(logged(plain)) == 8
    for run in stored:
        assert logged(run) == logged(plain)
        optimizer = run.optimizer.optimizer
        assert type(optimizer) is torch.optim.AdamW
        for theirs, mine in zip(plain.model.parameters(), run.model.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs)
            assert isinstance(optimizer.state[mine]["exp_avg"], zinf_fx.StoredTensor)
    for checkpoint in ("checkpoint-4", "checkpoint-8"):  # safetensors of the model, and the optimizer's state
        saved = [type(plain.model).from_pretrained(tmp_path / name / checkpoint) for name in ("plain", "stored")]
        for theirs, mine in zip(*(model.parameters() for model in saved), strict=True):
            assert torch.equal(mine, theirs)
        theirs, mine = (torch.load(tmp_path / name / checkpoint / "optimizer.pt") for name in ("plain", "stored"))
        for index, states in theirs["state"].items():
            for state, value in states.items():
                assert torch.equal(mine["state"][index][state], value)


def train_and_evaluate(rank: int, ranks: int, folder: Path, placement: str, options: dict[str, object]) -> None:
    """Train a plain model, in DistributedDataParallel on several ranks, and a stored one."""
    as_by_torchrun(rank, ranks)
    runs = []
    for name, compiled in (("plain", {}), ("stored", COMPILED)):
        torch.manual_seed(0)
        model = _gpt2()
        if compiled:
            zinf_fx.offload(model, placement=placement, collective_timeout=60)
        kind = Trainer if compiled and ranks > 1 else transformers.Trainer
        run = trainer(model, folder / name, kind, **options, **compiled)
        run.train()
        runs.append(run)
    plain, stored = runs
    assert [loss for loss, _ in logged(stored)] == [loss for loss, _ in logged(plain)]
    norms, expected = ([norm for _, norm in logged(run)] for run in (stored, plain))
    assert norms == expected if ranks == 1 else norms == pytest.approx(expected, rel=1e-6)  # of shards, summed
    evaluated = [[entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] for run in runs]
    assert evaluated[0] == evaluated[1]
    assert not isinstance(stored.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    for theirs, mine in zip(plain.model.parameters(), stored.model.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "placement", "options"),
    [
        (1, "nvme", {"load_best_model_at_end": True, "bf16": True}),
        (2, "zero-3", {"save_strategy": "no", "max_grad_norm": 10}),
    ],
    ids=["the best checkpoint and autocast", "two ranks"],
)
def test_training_and_evaluation_equal_the_plain_run(
    tmp_path: Path, ranks: int, placement: str, options: dict[str, object]
):
    on_ranks(ranks, train_and_evaluate, ranks, tmp_path, placement, {"eval_strategy": "epoch"} | options)
