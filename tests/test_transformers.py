"""Models of the transformers library, from small random configurations, train as in eager PyTorch."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from gate import named, slow
from torch import Tensor, nn
from versions import BEFORE_2_12

import zinf_fx
from zinf_fx.compat import transformers as conversion
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

Inputs = dict[str, Tensor]
VOCABULARY, LENGTH, BATCH, STEPS = 64, 12, 2, 3


def _text() -> Inputs:
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def _masked_text() -> Inputs:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {**_text(), "attention_mask": mask}


def _images() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16), "labels": torch.tensor([0, 1])}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _llama(**options: object) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=4,
        num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def _checkpointed_llama() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable()
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "gpt2": (_gpt2, _text),
    "llama": (_llama, _text),
    "llama, gradient checkpointing": (_checkpointed_llama, _text),
    "mixtral": (_mixtral, _text),
    "bert": (_bert, _masked_text),
    "t5": (_t5, _text),
    "vit": (_vit, _images),
}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _losses(model: nn.Module, step: Callable, optimizer: torch.optim.Optimizer, batches: list[Inputs]) -> list[Tensor]:
    model.train()
    losses = []
    for batch in batches:
        loss = step(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _reference(plain: nn.Module) -> Callable:
    """Return eager PyTorch; up to torch 2.11, AOTAutograd rounds gradients of Llama otherwise, whatever the backend."""
    return torch.compile(plain, backend="aot_eager") if BEFORE_2_12 else plain


def _batches(inputs: Callable[[], Inputs]) -> list[Inputs]:
    torch.manual_seed(1)
    return [inputs() for _ in range(STEPS)]


def _assert_equal(model: nn.Module, plain: nn.Module, losses: list[Tensor], expected: list[Tensor]) -> None:
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    assert losses[-1] != losses[0]
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter, StoredTensor), name
        if getattr(model, "is_gradient_checkpointing", False):
            # Eager checkpointing runs backward in another engine call per block, which adds gradients in another order.
            torch.testing.assert_close(parameter.full_tensor(), other.detach(), msg=name)
        else:
            assert torch.equal(parameter.full_tensor(), other), name


def _assert_same_parameters(model: nn.Module, plain: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert isinstance(parameter, StoredTensor) and torch.equal(parameter, other[1]) and name == other[0], name


# In the gate, Llama trains with resized embeddings, ViT by the one-line use, and GPT-2 in test_trainer.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_offloaded_models_train_as_in_eager_pytorch(name: str, tmp_path: Path):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    batches = _batches(inputs)
    expected = _losses(plain, _reference(plain), torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    zinf_fx.offload(model, store=tmp_path, placement="infinity-nvme")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = _losses(model, torch.compile(model, backend="zinf"), optimizer, batches)
    _assert_equal(model, plain, losses, expected)


@pytest.mark.parametrize("name", MODELS)
def test_models_built_under_offloading_start_from_the_same_values(name: str, tmp_path: Path):
    build, _ = MODELS[name]
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        model = build()
    _assert_same_parameters(model, plain)


@pytest.mark.parametrize("large", [conversion._LARGE, 1])
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_pretrained_models_are_loaded_into_the_store(
    name: str, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conversion, "_LARGE", large)
    build, inputs = MODELS[name]
    build().save_pretrained(tmp_path / "pretrained")
    (tmp_path / "store").mkdir()
    kind = type(build())
    plain = kind.from_pretrained(tmp_path / "pretrained")
    with zinf_fx.offloading(store=tmp_path / "store", placement="nvme"):
        model = kind.from_pretrained(tmp_path / "pretrained")
    _assert_same_parameters(model, plain)
    assert torch.equal(model(**(batch := inputs())).loss, plain(**batch).loss)


@pytest.mark.parametrize(
    "name", named(["gpt2", "llama", "tied llama", "mixtral", "bert", "t5", "vit"], {"tied llama", "mixtral", "t5"})
)
def test_exported_models_are_read_by_plain_transformers(name: str, tmp_path: Path):
    torch.manual_seed(0)
    build, inputs = MODELS.get(name, (lambda: _llama(tie_word_embeddings=True), _text))
    model = build()
    (tmp_path / "store").mkdir()
    zinf_fx.offload(model, store=tmp_path / "store", placement="nvme")
    for limit in ("5GB", "20KB"):
        zinf_fx.export_safetensors(model, tmp_path / "out", max_shard_size=limit)
        plain, loading_info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(loading_info.values()), loading_info
        _assert_same_parameters(model, plain)
        assert torch.equal(model.eval()(**(batch := inputs())).loss, plain(**batch).loss)
        assert plain.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("mean_resizing", [slow(False), True])
@pytest.mark.parametrize("built", ["offloaded", "offloading", "resized within"])
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_are_stored(tied: bool, built: str, mean_resizing: bool, tmp_path: Path):
    def resize(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        model.resize_token_embeddings(VOCABULARY + 9, mean_resizing=mean_resizing)
        return model

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _llama(tie_word_embeddings=tied)

    plain = resize(build())
    fields = {"store": tmp_path, "placement": "nvme"}
    if built == "offloaded":
        model = resize(zinf_fx.offload(build(), **fields))
    else:
        with zinf_fx.offloading(**fields):
            model = resize(build()) if built == "resized within" else build()
        model = model if built == "resized within" else resize(model)
    _assert_same_parameters(model, plain)
    assert model.lm_head.weight.shape[0] == VOCABULARY + 9
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    if built != ("offloaded" if tied else "offloading") or mean_resizing:
        return  # these have the same parameters as models that train below
    tokens = torch.randint(3, VOCABULARY + 9, (BATCH, LENGTH))
    batches = [{"input_ids": tokens, "labels": tokens}] * STEPS
    expected = _losses(plain, _reference(plain), torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    losses = _losses(model, torch.compile(model, backend="zinf"), optimizer, batches)
    _assert_equal(model, plain, losses, expected)


LOADED = """
import sys, torch, zinf_fx
from transformers import LlamaForCausalLM as Llama
from zinf_fx.runtime.tensor.tiers import Tiers
saved, store, tests = sys.argv[1:]
sys.path.append(tests)
from injecting import Fault, inject
def memory(name): return int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1]) << 10
config = zinf_fx.Config(store=store, placement="nvme", host_memory="64MiB")
tiers = Tiers.of(config)
inject(tiers.store, Fault("completion", operation="write", count=10**6, delay=0.005))  # what reads ahead gets ahead
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins now
with zinf_fx.offloading(config):
    model = Llama.from_pretrained(saved, dtype=torch.float32)
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
def test_a_checkpoint_that_is_converted_is_never_whole_in_memory(tmp_path: Path):
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=8, vocab_size=4096)
    saved = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "saved")
    (tmp_path / "store").mkdir()
    command = [sys.executable, "-c", LOADED, tmp_path / "saved", tmp_path / "store", Path(__file__).parent]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
    nbytes = sum(p.nbytes for p in saved.parameters())
    assert peak < nbytes  # in fp32 it has twice as many; what is mapped of the file counts, too


@pytest.mark.parametrize("given", [None, "0"])
def test_transformers_reads_no_checkpoint_ahead_while_a_model_is_built(given: str | None, tmp_path: Path, monkeypatch):
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
    with zinf_fx.offloading(store=tmp_path, placement="nvme"):
        assert os.environ[name] == (given or "1")
    assert os.environ.get(name) == given


def test_the_one_line_use(tmp_path: Path):
    build, inputs = MODELS["vit"]
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    batches = _batches(inputs)
    expected = _losses(plain, _reference(plain), torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend="zinf", options={"placement": "infinity-nvme", "store": tmp_path})
    losses = _losses(model, compiled, optimizer, batches)
    _assert_equal(model, plain, losses, expected)


@pytest.mark.slow
def test_dropout_under_gradient_checkpointing_is_repeated_from_the_first_step_on(tmp_path: Path):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    )
    model.gradient_checkpointing_enable()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model.train(), backend="zinf", options={"placement": "nvme", "store": tmp_path})
    for step, batch in enumerate(_batches(_text)[:2]):
        for call in (plain, compiled):
            torch.manual_seed(step)
            call(**batch).loss.backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad.full_tensor(), other.grad), f"step {step}: {name}"
        model.zero_grad()
        plain.zero_grad()
