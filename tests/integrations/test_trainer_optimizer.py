"""Which optimizer a Trainer makes for a stored model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from gate import slow
from test_trainer import COMPILED, texts
from test_transformers import _gpt2

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import ConfigError

pytest.importorskip("accelerate")

import transformers

from zinf_fx.integrations.transformers import Trainer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def trainer(folder: Path, model: torch.nn.Module, given: dict[str, object], **options: object) -> Trainer:
    settings = {"max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.1} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "output"), per_device_train_batch_size=2, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, seed=0, **COMPILED, **settings,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=texts(), **given)


def stored(folder: Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return zinf_fx.offload(_gpt2().to(dtype), store=folder, placement="nvme")


# `optim`, `optim_args`, arguments of the Trainer itself; the class, its states' form and its masters'.
MADE = {
    "default": ({}, {}, optim.AdamW, None, None),
    "adamw_torch": ({"optim": "adamw_torch"}, {}, optim.AdamW, None, None),
    "paged": ({"optim": "paged_adamw_32bit"}, {}, optim.AdamW, None, None),
    "bnb": ({"optim": "adamw_bnb_8bit"}, {}, optim.AdamW, "8bit", None),
    "8bit": ({"optim": "adamw_8bit", "optim_args": "master_dtype=split"}, {}, optim.AdamW, "8bit", "split"),
    "paged 8bit": ({"optim": "paged_adamw_8bit"}, {"master_dtype": "split"}, optim.AdamW, "8bit", "split"),
    "torch 8bit": ({"optim": "adamw_torch_8bit"}, {}, optim.AdamW, "8bit", None),
    "optim_args": ({"optim_args": "state_dtype=torch.bfloat16, overlap=False"}, {}, optim.AdamW, torch.bfloat16, None),
    "own": ({}, {"state_dtype": "8bit", "master_dtype": "split"}, optim.AdamW, "8bit", "split"),
    "sgd": ({"optim": "sgd"}, {}, optim.SGD, None, None),
    "rmsprop": ({"optim": "rmsprop"}, {"master_dtype": "split"}, optim.RMSprop, None, "split"),
    "adagrad": ({"optim": "adagrad"}, {}, optim.Adagrad, None, None),
}


@pytest.mark.parametrize(("options", "given", "kind", "state_dtype", "master_dtype"), MADE.values(), ids=MADE)
def test_what_is_made(tmp_path: Path, options: dict, given: dict, kind: type, state_dtype, master_dtype):
    made = trainer(tmp_path, stored(tmp_path), given, **options).create_optimizer()
    assert type(made) is kind
    assert (made.kept_as.state_dtype, made.kept_as.master_dtype) == (state_dtype, master_dtype)
    assert {group["weight_decay"] for group in made.param_groups} == {0.0, 0.1}
    assert {group["lr"] for group in made.param_groups} == {1e-3}


REFUSED = {
    "lion of 8 bits": ({"optim": "lion_8bit"}, {}, "optim='lion_8bit'.*adamw_8bit"),
    "4 bits": ({"optim": "adamw_torch_4bit"}, {}, "optim='adamw_torch_4bit'.*adamw_8bit"),
    "galore of 8 bits": ({"optim": "galore_adamw_8bit"}, {}, "optim='galore_adamw_8bit'"),
    "two forms": ({"optim": "adamw_8bit"}, {"state_dtype": torch.bfloat16}, "states of 8 bits, and state_dtype"),
    "misspelt": ({"optim_args": "state_dtyp=8bit"}, {}, "optim_args has state_dtyp.*state_dtype"),
    "a form that isn't there": ({"optim_args": "state_dtype=4bit"}, {}, "state_dtype=4bit: 8bit"),
    "clipping": ({"optim_args": "step_in_backward=true"}, {}, "max_grad_norm=0"),
    "accumulation": (
        {"max_grad_norm": 0, "gradient_accumulation_steps": 2},
        {"step_in_backward": True},
        "gradient_accumulation_steps=1",
    ),
    "another class": ({"optim": "adafactor"}, {"state_dtype": "8bit"}, "state_dtype: optim='adafactor'"),
}


@pytest.mark.parametrize(("options", "given", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(tmp_path: Path, options: dict, given: dict, reason: str):
    with pytest.raises(ConfigError, match=reason):
        trainer(tmp_path, stored(tmp_path), given, **options).create_optimizer()


def test_options_of_an_optimizer_that_is_there_already(tmp_path: Path):
    model = stored(tmp_path)
    own = optim.SGD(model.parameters(), lr=0.1)
    assert trainer(tmp_path, model, {"optimizers": (own, None)}).create_optimizer() is own
    with pytest.raises(ConfigError, match="state_dtype: the Trainer has an optimizer already"):
        trainer(tmp_path, model, {"optimizers": (own, None), "state_dtype": "8bit"}).create_optimizer()


@pytest.mark.parametrize("given", [{}, slow({"master_dtype": "split"}), slow({"step_in_backward": True})], ids=str)
def test_a_bf16_model_is_trained_through_masters(tmp_path: Path, given: dict[str, object]):
    """Bitwise as a loop over fp32 masters, in which small updates add up; without them, few values change."""
    torch.manual_seed(0)
    plain = _gpt2().to(torch.bfloat16).eval()
    run = trainer(tmp_path, zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme"), given,
                  learning_rate=1e-5, lr_scheduler_type="constant", max_grad_norm=0, data_seed=0)  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without an fp32 master")
        run.train()
    name, parameter = next(iter(run.model.named_parameters()))
    state = run.optimizer.optimizer.state[parameter]
    assert any(key.startswith("master") for key in state)
    if "master" in state and not given:
        master = state["master"].full_tensor()
        assert torch.equal(master.to(torch.bfloat16), parameter.full_tensor())
        assert not torch.equal(master, plain.get_parameter(name).float())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize(("dtype", "warned"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 0)], ids=str)
def test_a_plain_optimizer_without_masters_is_warned_of_once(tmp_path: Path, kind: type, dtype, warned: int):
    model = zinf_fx.offload(torch.nn.Linear(8, 8).to(dtype), store=tmp_path, placement="nvme")
    optimizer = kind(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert sum("without an fp32 master" in str(warning.message) for warning in seen) == warned
