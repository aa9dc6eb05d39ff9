"""transformers' Trainer, as its users run it: on an offloaded model, compiled, with its default optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from gate import slow
from test_transformers import _gpt2, _llama

import zinf_fx

pytest.importorskip("accelerate")

import zinf_fx.integrations.accelerate

COMPILED = {"torch_compile": True, "torch_compile_backend": "zinf"}
VOCABULARY, LENGTH = 64, 12


def texts(count: int = 16) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=random)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model: torch.nn.Module, directory: Path, **options: object) -> transformers.Trainer:
    """Clips, accumulates two micro-batches, decays the learning rate, and saves after every epoch."""
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
        num_train_epochs=2, learning_rate=1e-2, weight_decay=0.1, logging_steps=1, save_strategy="epoch",
        report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **options,
    )  # fmt: skip
    assert arguments.optim == "adamw_torch_fused"
    return transformers.Trainer(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts(4))


def logged(run: transformers.Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
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


@pytest.mark.slow
def test_evaluation_the_best_checkpoint_and_autocast(tmp_path: Path):
    options = {"eval_strategy": "epoch", "load_best_model_at_end": True, "bf16": True}
    runs = []
    for name, compiled in (("plain", {}), ("stored", COMPILED)):
        torch.manual_seed(0)
        model = _gpt2()
        if compiled:
            (tmp_path / "store").mkdir()
            zinf_fx.offload(model, store=tmp_path / "store", placement="nvme")
        run = trainer(model, tmp_path / name, **options, **compiled)
        run.train()
        runs.append(run)
    evaluated = [[entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] for run in runs]
    assert logged(runs[0]) == logged(runs[1]) and evaluated[0] == evaluated[1]
    for theirs, mine in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(mine.full_tensor(), theirs)
