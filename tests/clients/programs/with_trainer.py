"""transformers' Trainer, as users write it for `torchrun`: plainly (DistributedDataParallel), or with zinf.

torchrun --standalone --nproc-per-node 2 with_trainer.py plain|stored DIRECTORY MICRO_BATCHES no|epoch [resumed|theirs]

How many micro-batches a step accumulates, and the Trainer's `save_strategy`. `resumed`: from the first epoch's
checkpoint; `theirs`: a stored model with transformers' own Trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import vision  # noqa: F401
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers import Trainer as TheirTrainer

import zinf_fx
import zinf_fx.errors
from zinf_fx.integrations.transformers import Trainer

how, directory, micro_batches, saves = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resumed, theirs = sys.argv[5:] == ["resumed"], how == "plain" or sys.argv[5:] == ["theirs"]
compiled = {"torch_compile": True, "torch_compile_backend": "zinf"} if how == "stored" else {}
arguments = TrainingArguments(  # first of all: this is what initialises torch.distributed
    output_dir=str(directory / how), per_device_train_batch_size=2, gradient_accumulation_steps=micro_batches,
    max_grad_norm=0.5, num_train_epochs=2, learning_rate=1e-2, weight_decay=0.1, logging_steps=1, save_strategy=saves,
    eval_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True, seed=0, **compiled,
)  # fmt: skip
config = GPT2Config(
    vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
if how == "stored":  # then the model: it is divided over the ranks that there are
    zinf_fx.offload(
        model, store=directory / f"store{arguments.process_index}", placement="infinity-nvme", collective_timeout=20
    )

tokens = torch.randint(3, 64, (20, 12), generator=torch.Generator().manual_seed(1))
texts = [{"input_ids": row, "labels": row} for row in tokens]
trainer = (TheirTrainer if theirs else Trainer)(
    model=model, args=arguments, train_dataset=texts[:16], eval_dataset=texts[16:]
)
try:
    trainer.train(resume_from_checkpoint=resumed and str(directory / how / f"checkpoint-{4 // micro_batches}"))
except zinf_fx.errors.RanksError as error:
    torch.save([str(error)], directory / f"{how}.pt")
    raise
measured = trainer.evaluate()["eval_loss"]
values = [p.full_tensor() if how == "stored" else p.detach() for p in model.parameters()]
whole = {name: v.full_tensor() if how == "stored" else v for name, v in model.state_dict().items()}  # on every rank
model.save_pretrained(directory / f"{how}-model", state_dict=whole)  # which the first rank writes
if arguments.process_index == 0:
    keys = ("loss", "grad_norm", "eval_loss")
    logged = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
    torch.save([*logged, measured, *values], directory / f"{how}.pt")
