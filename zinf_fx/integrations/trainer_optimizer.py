"""The optimizer that a Trainer's arguments name, for stored models: that of zinf_fx, with fp32 masters.

transformers' Trainer steps bf16 parameters by PyTorch's own classes in bf16, without a master, so that updates smaller
than half of a bf16 value's last place are lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TrainingArguments

import zinf_fx.optim
from zinf_fx.errors import ConfigError
from zinf_fx.optim.forms import EIGHT_BITS

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
    """The class, and its options, of what `arguments.optim` names, for a model that is stored.

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
    kind, found = find(arguments, model)
    streamed = getattr(zinf_fx.optim, kind.__name__, None) if str(kind.__module__).startswith("torch.optim") else None
    if streamed is None:
        if options:
            raise ConfigError(
                f"{', '.join(options)}: optim={name!r} is {kind.__module__}.{kind.__name__}, without these"
            )
        return kind, found
    if options.get("step_in_backward"):
        _check_steps_in_backward(arguments)
    return streamed, found | options


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
    """Options of zinf_fx's optimizers in `optim_args`, and the others."""
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
