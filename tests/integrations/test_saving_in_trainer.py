"""A Trainer saves and resumes by zinf_fx's checkpoints, on one rank and on several."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gate import slow
from ranks.launching import on_ranks
from test_trainer import COMPILED, as_by_torchrun, logged, texts
from test_transformers import _gpt2

import zinf_fx
from zinf_fx.runtime.tensor.storage import TensorStorage

pytest.importorskip("accelerate")

import transformers

from zinf_fx.integrations.transformers import ForStoredModels, Trainer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def trainer(folder: Path, kind: type = Trainer, **options: object) -> transformers.Trainer:
    """Saves after every second of 8 steps, each of 2 micro-batches."""
    torch.manual_seed(0)
    model = _gpt2()
    store = {} if dist.is_initialized() else {"store": folder}
    zinf_fx.offload(model, placement="infinity-nvme", collective_timeout=60, **store)
    settings = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "learning_rate": 1e-2} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "output"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_grad_norm=0.5, weight_decay=0.1, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=0, **COMPILED, **settings,
    )  # fmt: skip
    return kind(model=model, args=arguments, train_dataset=texts(), eval_dataset=texts(4))


def ended(run: transformers.Trainer) -> tuple[list, list[torch.Tensor]]:
    return logged(run), [parameter.full_tensor() for parameter in run.model.parameters()]


def assert_equal(actual: transformers.Trainer, expected: transformers.Trainer) -> None:
    (losses, values), (expected_losses, expected_values) = ended(actual), ended(expected)
    assert losses == expected_losses and len(losses) == 8
    assert all(torch.equal(*pair) for pair in zip(values, expected_values, strict=True))


def resume(rank: int, ranks: int, folder: Path, options: dict[str, object]) -> None:
    """Train, and train again from a checkpoint on that was saved in the middle of an epoch."""
    as_by_torchrun(rank, ranks)
    settings = {"max_steps": 8, "save_steps": 3, "save_total_limit": 3} | options
    whole = trainer(folder, **settings)
    whole.train()
    saved = folder / "output" / "checkpoint-3"
    for file in ("model.safetensors", "config.json", "zinf/manifest.json", "trainer_state.json", "training_args.bin"):
        assert (saved / file).is_file(), file
    assert not (saved / "optimizer.pt").exists()
    torch.compiler.reset()  # as in another process
    resumed = trainer(folder, **settings)
    resumed.train(resume_from_checkpoint=str(saved))
    assert (whole._initial_global_step, resumed._initial_global_step) == (0, 3)
    assert_equal(resumed, whole)
    assert not isinstance(whole.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    names = sorted(path.name for path in (folder / "output").glob("checkpoint-*"))
    assert names == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "output" / "checkpoint-8")
    values = zip(loaded.parameters(), whole.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs.full_tensor()) for mine, theirs in values)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), slow(1, {"bf16": True}), slow(2, {"eval_strategy": "steps", "eval_steps": 3})],
    ids=["fp32", "bf16", "two ranks"],
)
def test_what_is_resumed_ends_as_what_was_not_interrupted(tmp_path: Path, ranks: int, options: dict[str, object]):
    on_ranks(ranks, resume, ranks, tmp_path, options)


def test_nothing_is_gathered_to_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = trainer(tmp_path, save_strategy="no", max_steps=2)
    run.train()
    monkeypatch.setattr(TensorStorage, "value", lambda storage: pytest.fail("a whole tensor was gathered"))
    folder = str(tmp_path / "saved")
    run.save_model(folder)
    run._save_optimizer_and_scheduler(folder)
    run._load_from_checkpoint(folder)
    run._load_optimizer_and_scheduler(folder)


@pytest.mark.slow
def test_old_checkpoints_go_and_the_best_is_loaded(tmp_path: Path):
    """Losses fall; the highest is taken for the best."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    run = trainer(tmp_path, save_total_limit=2, **options)
    run.train()
    best = run.state.best_model_checkpoint
    folders = sorted(folder.name for folder in (tmp_path / "output").glob("checkpoint-*"))
    assert Path(best).name == "checkpoint-2" and folders == ["checkpoint-2", "checkpoint-8"]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(best)
    values = zip(loaded.parameters(), run.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs.full_tensor()) for mine, theirs in values)


@pytest.mark.slow
def test_what_was_cut_off_is_not_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = trainer(tmp_path)
    whole.train()
    last = tmp_path / "output" / "checkpoint-8"
    assert (last / "trainer_state.json").is_file()
    with monkeypatch.context() as patch:
        patch.setattr(whole, "_save_optimizer_and_scheduler", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # the second save of that step is cut off
            whole._save_checkpoint(whole.model, None)
    assert not (last / "trainer_state.json").exists()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 6
    assert_equal(resumed, whole)


def test_models_in_memory_are_left_to_the_trainer(tmp_path: Path):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(model=_gpt2(), args=arguments, train_dataset=texts()).train()
    saved = tmp_path / "checkpoint-1"
    assert (saved / "optimizer.pt").is_file() and not (saved / "zinf").exists()


def test_the_trainer_has_the_methods_that_are_overridden():
    names = ("save_model", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_load_from_checkpoint")
    for name in (*names, "_load_best_model", "_get_grad_norm"):
        mine, theirs = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (Trainer, transformers.Trainer)
        )
        assert mine == theirs, name
    overridden = {name for name, member in vars(ForStoredModels).items() if inspect.isfunction(member)}
    assert overridden & vars(transformers.Trainer).keys() == {
        *names, "__init__", "_get_grad_norm", "_load_best_model", "create_optimizer", "train",
    }  # fmt: skip
