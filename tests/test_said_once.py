"""What has no effect, or costs more than was meant, is said once, with what to do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_frozen_formats import built
from torch import nn

import zinf_fx
from zinf_fx.runtime.disk import filesystem
from zinf_fx.runtime.disk.filesystem import note_memory

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@contextmanager
def said() -> Iterator[list[str]]:
    """Yield the warnings of zinf_fx in the block."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    words = ("frozen_dtype=", "the store ", "eager code computes")
    messages += [str(warning.message) for warning in caught if str(warning.message).startswith(words)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


TOKENS = torch.arange(8)

NOTHING = {
    "trains": (net, "nf4", "the 2 matrices that could be train: freeze the base first"),
    "patterns": (net, [("3.*", None), ("*", "int8")], "frozen_dtype='int8' has no effect"),
    "a table alone": (
        lambda: nn.Sequential(nn.Embedding(16, 64)).requires_grad_(False),
        "nf4",
        "no table of embeddings",
    ),
    "short rows": (lambda: nn.Sequential(nn.Linear(8, 64)).requires_grad_(False), "fp8", "rows of at least 64"),
}


@pytest.mark.parametrize("how", NOTHING)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_format_of_what_is_frozen_where_nothing_is(tmp_path: Path, how: str, compiled: bool):
    make, form, message = NOTHING[how]
    model = make()
    with said() as messages:
        if compiled:
            x = TOKENS if isinstance(model[0], nn.Embedding) else torch.ones(2, 8)
            options = {"store": tmp_path, "placement": "nvme", "frozen_dtype": form}
            run = torch.compile(model, backend="zinf", options=options)
            run(x), run(x)
        else:
            zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype=form)
    assert len(messages) == 1 and message in messages[0], messages


def test_a_format_that_something_is_stored_in_is_not_spoken_of(tmp_path: Path):
    with said() as messages:
        model = zinf_fx.offload(built(), store=tmp_path, placement="nvme", frozen_dtype="nf4")
        zinf_fx.offload(model, store=tmp_path, placement="nvme", frozen_dtype="nf4")
        torch.compile(model, backend="zinf", options={"frozen_dtype": "nf4"})(torch.randint(16, (4, 8)))
        with zinf_fx.offloading(store=tmp_path, placement="nvme", frozen_dtype="int8"):
            nn.Linear(64, 64)
        zinf_fx.offload(net(), store=tmp_path, placement="nvme", frozen_dtype=[("*", None)])
    assert not messages
    with said() as messages, zinf_fx.offloading(store=tmp_path, placement="nvme", frozen_dtype="int8"):
        small = nn.Linear(8, 8)
    assert len(messages) == 1 and "frozen_dtype='int8' has no effect" in messages[0] and small.weight.requires_grad


def test_a_store_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = [f"1 0 0:{os.stat(tmp_path).st_dev} / / rw - ext4 disk rw"]
    device = os.stat(tmp_path).st_dev
    lines.append(f"2 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - tmpfs none rw")
    (tmp_path / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "mounts")
    note_memory.cache_clear()
    with said() as messages:
        for _ in range(2):
            model = zinf_fx.offload(net(), store=tmp_path, placement="nvme")
            del model
    assert len(messages) == 1 and f"the store {tmp_path} is on tmpfs, whose bytes take host memory" in messages[0], (
        messages
    )
    (tmp_path / "mounts").write_text(lines[0])
    note_memory.cache_clear()
    with said() as messages:
        zinf_fx.offload(net(), store=tmp_path, placement="nvme")
    assert not messages


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_model_that_trains_eagerly(tmp_path: Path, tier: str):
    model = zinf_fx.offload(net(), store=tmp_path, placement=tier)
    optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
    with said() as messages:
        for _ in range(4):
            model(TOKENS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if model[1].weight.stored.in_place:
        assert not messages
        return
    assert (
        len(messages) == 1 and "each time for one operation" in messages[0] and "torch.compile(model" in messages[0]
    ), messages


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_compiled_model_of_which_another_method_is_called(tmp_path: Path, mode: type):
    class Generating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.net(tokens)

        def generate(self) -> torch.Tensor:
            tokens = TOKENS
            for _ in range(4):
                tokens = self(tokens).argmax(-1)
            return tokens

    model = zinf_fx.offload(Generating(), store=tmp_path, placement="nvme")
    with mode():
        with said() as messages:
            torch.compile(model, backend="zinf").generate()
        assert len(messages) == 1 and "model.compile(backend=" in messages[0], messages
        other = zinf_fx.offload(Generating(), store=tmp_path, placement="nvme", checksum=False)  # a store of its own
        other.compile(backend="zinf")
        with said() as messages:
            other.generate()
        assert not messages


def test_what_is_compiled_or_looked_at_is_not_spoken_of(tmp_path: Path):
    model = zinf_fx.offload(net(), store=tmp_path, placement="nvme")
    run = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters())
    with said() as messages:
        for _ in range(4):
            run(TOKENS).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            [parameter.full_tensor() for parameter in model.parameters()]
            [parameter.norm() for parameter in model.parameters()]
            model.state_dict()
        with torch.no_grad():
            for _ in range(4):
                run(TOKENS)
                model[1].weight.add_(0.1)
        zinf_fx.export_safetensors(model, tmp_path / "out")
        zinf_fx.export_plan(model, [TOKENS])
    assert not messages
