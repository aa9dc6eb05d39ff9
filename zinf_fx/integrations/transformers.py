"""transformers' Trainer for stored models: all ranks save and resume, by the checkpoints of zinf_fx, in bounded memory.

transformers' own Trainer writes all states of an optimizer to one file, on its first rank alone. Here all ranks save,
each its shards. A folder `checkpoint-N` has the weights as safetensors files, which `from_pretrained` reads, a
checkpoint of the optimizer and the scheduler in `zinf/`, and beside them what the Trainer writes for any model.

[Note: the Trainer's methods]
`train`, `create_optimizer` and `save_model` are public. What of an optimizer is saved, how anything is loaded, and the
norm of gradients that are not clipped, the Trainer leaves to methods whose names begin with an underscore;
tests/integrations/test_saving_in_trainer.py looks for them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

import zinf_fx.integrations.accelerate
import zinf_fx.optim
from zinf_fx.checkpoint.export import INDEX, WHOLE, export_safetensors
from zinf_fx.checkpoint.weights import load_safetensors
from zinf_fx.errors import ConfigError
from zinf_fx.integrations.checkpoints import STATES, is_stored, load_beside_weights, save_beside_weights
from zinf_fx.optim.formats import EIGHT_BITS, MasterDtype, StateDtype
from zinf_fx.runtime.gradients.reduction import no_sync

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


_Trainer: Any = object
"""What `ForStoredModels` stands before: a Trainer of any library."""


class ForStoredModels(_Trainer):
    """Makes a Trainer of any library one for stored models: `class Mine(ForStoredModels, SFTTrainer)`.

    All ranks call `save_model`. Compiled models are trained without DistributedDataParallel, which would hold memory
    for all gradients. Of a model of which nothing is stored, nothing is done differently.

    `optim` of the training arguments names the optimizer. Names of AdamW, and of PyTorch's other classes, stand for
    those of `zinf_fx.optim`, whose bf16 parameters have fp32 masters; `adamw_8bit` and its like for
    `state_dtype="8bit"`. `state_dtype`, `master_dtype` and `step_in_backward` are theirs; `optim_args` takes them, too.
    """

    def __init__(
        self,
        *arguments: Any,
        state_dtype: StateDtype | None = None,
        master_dtype: MasterDtype | None = None,
        step_in_backward: bool | None = None,
        **options: Any,
    ) -> None:
        self._of_optimizer = {
            "state_dtype": state_dtype, "master_dtype": master_dtype, "step_in_backward": step_in_backward,
        }  # fmt: skip
        super().__init__(*arguments, **options)

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer, streamed for a stored model. Raises: ConfigError for options that can't be honoured."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and is_stored(self.model):
            find = self.get_optimizer_cls_and_kwargs
            self.optimizer_cls_and_kwargs = optimizer_of(self.args, self.model, self._of_optimizer, find)
        elif given := [name for name, value in self._of_optimizer.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(given)}: the Trainer has an optimizer already, or no parameter of its model is stored, so "
                "that no optimizer of zinf_fx.optim is made; leave this out"
            )
        return super().create_optimizer(*arguments, **options)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any) -> Any:
        """Train, as the Trainer does. `resume_from_checkpoint=True` takes the last folder that was saved to its end."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_whole(Path(self.args.output_dir)) or True
        if self.args.world_size > 1 and self.model_wrapped is self.model and is_stored(self.model):
            self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)
            self.model_wrapped.no_sync = no_sync
        return super().train(resume_from_checkpoint, *arguments, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not is_stored(self.model):
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or self.args.output_dir)
        if _internal_call and self.args.should_save:  # the Trainer writes it last: until then, nothing here is whole
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        if _has_adapters(self.model):
            trained = _with_trained_values(self.model)
            if self.args.should_save:
                self._save(str(folder), trained)
        else:
            export_safetensors(self.model, folder)
            if self.args.should_save:
                self._save_what_reads_texts(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_what_reads_texts(self, folder: Path) -> None:
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if getattr(getattr(self.optimizer, "optimizer", self.optimizer), "step_in_backward", False):
            return None  # the gradients are gone
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if is_stored(self.model):
            save_beside_weights(Path(output_dir, STATES), self.model, self.optimizer, scheduler=self.lr_scheduler)
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not self._load_weights(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_weights(Path(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _load_weights(self, folder: Path) -> bool:
        """Load the weights in a folder, piece by piece, if it has those of a whole model that is stored."""
        if not is_stored(self.model) or not any((folder / name).is_file() for name in (WHOLE, INDEX)):
            return False
        load_safetensors(self.model, folder)
        return True

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (states := Path(checkpoint, STATES)).is_dir():
            load_beside_weights(states, self.model, self.optimizer, scheduler=self.lr_scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)


class Trainer(ForStoredModels, transformers.Trainer):
    """transformers' Trainer for stored models, whose ranks save and resume together, each its shards."""


def _last_whole(folder: Path) -> str | None:
    """Return the last checkpoint's folder that has all that a Trainer writes there."""
    folders = (path.parent for path in folder.glob(f"*/{TRAINER_STATE_NAME}"))
    whole = [checkpoint for checkpoint in folders if _CHECKPOINT.fullmatch(checkpoint.name)]
    return str(max(whole, key=lambda checkpoint: int(checkpoint.name.partition("-")[2]))) if whole else None


def _has_adapters(model: torch.nn.Module) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _with_trained_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with adapters, with trained parameters gathered. All ranks call this."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = model.state_dict()
    gathered = {name for name, value in state.items() if name in trained and hasattr(value, "full_tensor")}
    return {name: value.full_tensor() if name in gathered else value for name, value in state.items()}


ADAMW = "adamw_torch_fused"
# Names of AdamW whose arithmetic is that of PyTorch's; of 8 bits, and paged, which the store is for.
_OF_ADAMW = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit", "paged_adamw"}
_OF_8_BITS = {"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"}

_DTYPES = {"8bit": EIGHT_BITS, "split": "split", "bfloat16": torch.bfloat16, "float32": torch.float32}
_SWITCHES = {"true": True, "false": False}
# Options of zinf_fx's optimizers, and what texts stand for their values.
OPTIONS = {"state_dtype": _DTYPES, "master_dtype": _DTYPES, "step_in_backward": _SWITCHES, "overlap": _SWITCHES}

Find = Callable[[TrainingArguments, torch.nn.Module], tuple[Any, dict[str, Any]]]


def optimizer_of(
    arguments: TrainingArguments, model: torch.nn.Module, given: Mapping[str, object], find: Find
) -> tuple[Any, dict[str, Any]]:
    """Return the class that `arguments.optim` names, and its options, for a model that is stored.

    `given`: options of zinf_fx's optimizers; `arguments.optim_args` may have them, too. `find`: the Trainer's own way.

    Raises: ConfigError for an option that isn't accepted, and for names of 8 bits that aren't AdamW's.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    options, rest = _parted(arguments.optim_args)
    options |= {option: value for option, value in given.items() if value is not None}
    if name in _OF_ADAMW | _OF_8_BITS:
        if rest:
            raise ConfigError(
                f"optim_args has {', '.join(rest)}, and of optim={name!r}, {', '.join(OPTIONS)} are accepted"
            )
        if name in _OF_8_BITS and options.setdefault("state_dtype", EIGHT_BITS) != EIGHT_BITS:
            raise ConfigError(
                f"optim={name!r} has states of 8 bits, and state_dtype={options['state_dtype']!r} is given"
            )
        name = ADAMW
    elif "8bit" in name or "4bit" in name:
        raise ConfigError(
            f"optim={name!r} isn't there for stored models, with states of fewer bits in the store: use "
            "optim='adamw_8bit', which is AdamW with state_dtype='8bit'"
        )
    arguments = copy.copy(arguments)
    arguments.optim, arguments.optim_args = name, ",".join(f"{k}={v}" for k, v in rest.items()) or None
    kind, found_options = find(arguments, model)
    streamed = getattr(zinf_fx.optim, kind.__name__, None) if str(kind.__module__).startswith("torch.optim") else None
    if streamed is None:
        if options:
            raise ConfigError(
                f"{', '.join(options)}: optim={name!r} is {kind.__module__}.{kind.__name__}, without these"
            )
        return kind, found_options
    if options.get("step_in_backward"):
        _check_steps_in_backward(arguments)
    return streamed, found_options | options


def _check_steps_in_backward(arguments: TrainingArguments) -> None:
    if arguments.max_grad_norm:
        raise ConfigError(
            f"step_in_backward=True, and max_grad_norm={arguments.max_grad_norm}: no gradient is there to be clipped "
            "after backward; give TrainingArguments max_grad_norm=0"
        )
    if arguments.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"step_in_backward=True, and gradient_accumulation_steps={arguments.gradient_accumulation_steps}: each "
            "backward pass is a step then; give TrainingArguments gradient_accumulation_steps=1"
        )


def _parted(text: str | None) -> tuple[dict[str, object], dict[str, str]]:
    """Return the options of zinf_fx's optimizers in `optim_args`, and the others."""
    options: dict[str, object] = {}
    rest: dict[str, str] = {}
    for assignment in (text or "").replace(" ", "").split(","):
        option, _, value = assignment.partition("=")
        if option not in OPTIONS:
            rest |= {option: value} if option else {}
            continue
        values = OPTIONS[option]
        key = value.removeprefix("torch.") if value.removeprefix("torch.") in values else value.lower()
        if key not in values:
            raise ConfigError(f"optim_args has {option}={value}: {', '.join(values)} are accepted")
        options[option] = values[key]
    return options, rest
