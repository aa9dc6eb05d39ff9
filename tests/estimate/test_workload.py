"""Workloads: of a Transformer's dimensions, and of modules that are run without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zinf_fx.errors import ConfigError
from zinf_fx.estimate import of_module, of_transformer
from zinf_fx.estimate.workload import states_of


class TwoLinears(nn.Module):
    """`up` and its activation, then `down`; the loss is the mean."""

    def __init__(self, dtype: torch.dtype = torch.float32, checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32, bias=False, dtype=dtype)
        self.down = nn.Linear(32, 8, bias=False, dtype=dtype)
        self.register_buffer("scale", torch.ones(8, dtype=dtype))
        self.checkpointed = checkpointed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin()) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return y.mean()


FORWARD = 2 * 4 * (8 * 32 + 32 * 8)  # FLOP for 4 rows


def test_a_transformer_of_a_trillion_parameters():
    """The third row of ZeRO-Infinity's figure 2a, for 4 sequences per device."""
    found = of_transformer(layers=128, hidden=25600, heads=256, batch=4, sequence=1024, dtype="float16")
    assert found.parameters == 12 * 128 * 25600**2
    assert found.work == 8 * 4 * 1024 * found.parameters
    assert found.checkpoints == 2 * 4 * 1024 * 25600 * 128
    assert round(found.working_states / 2**30, 2) == 9.77
    assert round(found.working_activations / 2**30, 2) == 3.56
    assert (found.states.parameters, found.states.gradients, found.states.optimizer) == (2, 2, 12)


def test_full_precision_takes_twice_the_room_for_values_and_no_master():
    half, full = (
        of_transformer(layers=2, hidden=64, heads=4, batch=1, sequence=32, dtype=dtype)
        for dtype in ("float16", "float32")
    )
    assert (full.states.parameters, full.states.gradients, full.states.optimizer) == (4, 4, 8)
    assert full.checkpoints == 2 * half.checkpoints and full.working_states == 2 * half.working_states
    assert full.work == half.work


def test_optimizer_bytes_can_be_said():
    assert states_of("bfloat16", 16).total == 20


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_module(device: str):
    with torch.device(device):
        found = of_module(TwoLinears(), (torch.zeros(4, 8),), name="x")
    assert found.parameters == 2 * 8 * 32 and found.dtype == "float32"
    assert found.work == FORWARD + 2 * FORWARD - 2 * 4 * 8 * 32  # the inputs need no gradient
    # Saved: what sin and down work on; not the input, the weights or the buffer, which exist anyway.
    assert found.checkpoints == 4 * (4 * 32 + 4 * 32)
    assert found.working_states == 2 * 4 * 8 * 32
    assert (found.states.parameters, found.states.gradients, found.states.optimizer) == (4, 4, 8)


def test_a_checkpointed_module_keeps_nothing_and_computes_forward_again():
    plain = of_module(TwoLinears(), (torch.zeros(4, 8),), name="x")
    found = of_module(TwoLinears(checkpointed=True), (torch.zeros(4, 8),), name="x")
    assert found.checkpoints == 0
    # What the recomputation needs: up, not down, whose result no gradient depends on. PyTorch stops early.
    assert plain.work < found.work <= plain.work + FORWARD


def test_frozen_parameters_have_no_gradients_and_no_states():
    model = TwoLinears(torch.bfloat16)
    model.up.requires_grad_(False)
    found = of_module(model, {"x": torch.zeros(4, 8, dtype=torch.bfloat16)}, name="x")
    assert found.dtype == "bfloat16"
    assert (found.states.parameters, found.states.gradients, found.states.optimizer) == (2, 1, 6)


def test_parameters_of_several_types_are_averaged():
    model = TwoLinears(torch.bfloat16)
    model.norm = nn.LayerNorm(8)  # 16 parameters in fp32 beside 512 in bf16
    found = of_module(model, (torch.zeros(4, 8, dtype=torch.bfloat16),), name="x")
    assert found.dtype == "bfloat16" and found.parameters == 528
    assert found.states.parameters * 528 == pytest.approx(512 * 2 + 16 * 4)
    assert found.states.optimizer * 528 == pytest.approx(512 * 12 + 16 * 8)


def test_tied_parameters_are_counted_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.tokens(tokens)), tokens)

    assert of_module(Tied(), (torch.zeros(4, dtype=torch.long),), name="x").parameters == 16 * 8


def test_a_model_that_trains_nothing():
    with pytest.raises(ConfigError, match="x trains nothing"):
        of_module(TwoLinears().requires_grad_(False), (torch.zeros(4, 8),), name="x")
