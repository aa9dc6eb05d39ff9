"""transformers' Trainer trains offloaded models: on one rank, two in a row, on two ranks; and saves them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_transformers
import torch
import transformers
from launching_programs import results_of
from rows import Row

import zinf_fx
import zinf_fx.integrations.accelerate

COMPILED = {"torch_compile": True, "torch_compile_backend": "zinf"}


def trainer(model: torch.nn.Module, directory: Path, **options: object) -> transformers.Trainer:
    settings = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
        learning_rate=1e-2, weight_decay=0.1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        **settings,
    )  # fmt: skip
    tokens = torch.randint(3, 64, (20, 12), generator=torch.Generator().manual_seed(1))
    texts = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model=model, args=arguments, train_dataset=texts[:16], eval_dataset=texts[16:])


def results(run: transformers.Trainer) -> list[torch.Tensor | float]:
    logged = [e[key] for e in run.state.log_history for key in ("loss", "grad_norm", "eval_loss") if key in e]
    return [*logged, *(p.detach() for p in run.model.parameters())]


def models(store: Path) -> dict[str, tuple[torch.nn.Module, dict[str, object]]]:
    """Return a plain model and its twin on disk, and what the Trainer is told of each."""
    made = {}
    for name, options in (("plain", {}), ("stored", COMPILED)):
        torch.manual_seed(0)
        made[name] = test_transformers._gpt2(), options
    zinf_fx.offload(made["stored"][0], store=store, placement="infinity-nvme")
    return made


@pytest.mark.row("transformers", "`Trainer`, GPT-2: clipping, accumulation, decay, evaluation, checkpoints")
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_one_rank(row: Row, tmp_path: Path, options: dict[str, object]) -> None:
    row.ran += ", `bf16=True`" if options else ""
    outcomes = {}
    for name, (model, compiled) in models(tmp_path / "store").items():
        run = trainer(model, tmp_path / name, **options, **compiled)
        run.train()
        outcomes[name] = results(run)
    row.compare(outcomes["stored"], outcomes["plain"])


@pytest.mark.row("transformers", "`Trainer`: `resume_from_checkpoint`")
def test_resuming(row: Row, tmp_path: Path) -> None:
    outcomes = []
    for resumed in (False, True):
        store = tmp_path / f"store{resumed}"
        store.mkdir()
        model, options = models(store)["stored"]
        run = trainer(model, tmp_path / "output", **options)
        run.train(resume_from_checkpoint=resumed and str(tmp_path / "output" / "checkpoint-4"))
        outcomes.append(results(run))
    row.compare(outcomes[1], outcomes[0], to="to the run without a break")


@pytest.mark.row("transformers", "two `Trainer`s in a row on one model")
def test_two_in_a_row(row: Row, tmp_path: Path) -> None:
    outcomes = {}
    for name, (model, options) in models(tmp_path / "store").items():
        outcomes[name] = []
        for number in (1, 2):
            run = trainer(model, tmp_path / name / str(number), num_train_epochs=1, save_strategy="no", **options)
            run.train()
            outcomes[name] += results(run)
    row.compare(outcomes["stored"], outcomes["plain"])


@pytest.mark.row("transformers", "`save_pretrained(max_shard_size=...)`, `from_pretrained` inside `offloading()`")
def test_saved_shards(row: Row, tmp_path: Path) -> None:
    trained = models(tmp_path / "store")
    plain, stored = trained["plain"][0], trained["stored"][0]
    for name, model in (("plain", plain), ("stored", stored)):
        model.save_pretrained(tmp_path / name, max_shard_size="40KB")
    files = {name: sorted(p.name for p in (tmp_path / name).glob("*.safetensors")) for name in ("plain", "stored")}
    assert files["stored"] == files["plain"] and len(files["plain"]) > 1
    with zinf_fx.offloading(store=tmp_path / "store", placement="nvme"):
        loaded = type(plain).from_pretrained(tmp_path / "stored")
    row.compare(loaded.parameters(), plain.parameters())


DDP = "to `DistributedDataParallel`"


@pytest.mark.row(
    "transformers",
    "`Trainer` under `torchrun`, 2 ranks: clipping, decay, evaluation, `save_pretrained`",
)
def test_two_ranks(row: Row, tmp_path: Path) -> None:
    outcomes = {how: results_of("with_trainer.py", 2, how, tmp_path, "1", "no") for how in ("plain", "stored")}
    row.compare(outcomes["stored"], outcomes["plain"], to=DDP)
    saved = [transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"{how}-model") for how in ("stored", "plain")]
    row.compare(*(model.parameters() for model in saved), to=DDP)


@pytest.mark.row("transformers", "the same, accumulating 2 micro-batches")
def test_two_ranks_accumulate(row: Row, tmp_path: Path) -> None:
    outcomes = {how: results_of("with_trainer.py", 2, how, tmp_path, "2", "no") for how in ("plain", "stored")}
    row.compare(outcomes["stored"], outcomes["plain"], to=DDP)


@pytest.mark.row(
    "transformers",
    '`zinf_fx.integrations.transformers.Trainer`, 2 ranks: `save_strategy="epoch"`, `resume_from_checkpoint`',
)
def test_two_ranks_resume(row: Row, tmp_path: Path) -> None:
    expected = results_of("with_trainer.py", 2, "plain", tmp_path, "2", "no")
    row.compare(results_of("with_trainer.py", 2, "stored", tmp_path, "2", "epoch"), expected, to=DDP)
    resumed = results_of("with_trainer.py", 2, "stored", tmp_path, "2", "epoch", "resumed")
    row.compare(resumed, expected, to=DDP)
    assert not list(tmp_path.rglob("optimizer.pt"))
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "stored" / "checkpoint-4")
    row.compare(saved.parameters(), expected[-len(list(saved.parameters())) :], to=DDP)


@pytest.mark.row(
    "transformers", 'transformers\' own `Trainer`, 2 ranks, `save_strategy="epoch"`: the first rank alone saves'
)
def test_one_rank_saves(row: Row, tmp_path: Path) -> None:
    (told,) = results_of("with_trainer.py", 2, "stored", tmp_path, "1", "epoch", "theirs", ends=False)
    assert "must ask for it at the same point" in told and "rank 1 in torch.distributed.all_gather()" in told
    row.add("refused: " + re.sub(r"/\S*/site-packages/", "", told))
