"""Workloads: of a Transformer's dimensions, and of modules that are run without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zinf_fx.errors import ConfigError
from zinf_fx.estimate import Optimizer, estimate, of_module, of_transformer
from zinf_fx.plan.hardware import load


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
    assert Optimizer(16).states_of(torch.bfloat16).total == 20


def test_states_of_fewer_bytes():
    """Scales are 8 bytes for 256 elements, and of a split master, a byte has a bit for each of eight."""
    few = Optimizer(state_dtype="8bit", master_dtype="split")
    half, full = few.states_of(torch.bfloat16), few.states_of(torch.float32)
    assert (half.optimizer, half.reread) == (2 + 2 + 8 / 256 + 1 / 8, 2)
    assert (full.optimizer, full.reread) == (2 + 8 / 256, 4) and Optimizer().states_of(torch.bfloat16).reread == 0
    with pytest.raises(ConfigError, match=r"'split' is for bfloat16 parameters, and these are torch\.float16"):
        few.states_of(torch.float16)


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


def test_products_that_pytorch_does_not_count():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 32, 16, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight, ends).mean()

    inputs = torch.zeros(64, 32, dtype=torch.bfloat16), torch.tensor([8, 16, 16, 64], dtype=torch.int32)
    assert of_module(Experts(), inputs, name="x").work == 2 * 2 * 64 * 32 * 16  # the inputs need no gradient


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


def test_adapters_beside_a_frozen_transformer():
    """By hand, for 2 layers of 64: 12 x 2 x 64^2 frozen parameters in nf4, and adapters of rank 4 in fp32."""
    dimensions = {"layers": 2, "hidden": 64, "heads": 2, "batch": 3, "sequence": 5}
    whole = of_transformer(**dimensions)
    lora = of_transformer(**dimensions, lora=4, frozen="nf4")
    base, adapters = 12 * 2 * 64**2, 2 * 4 * ((64 + 3 * 64) + (64 + 64) + (64 + 4 * 64) + (4 * 64 + 64))
    assert lora.parameters == base + adapters
    parameters, gradients, optimizer = (
        lora.parameters * each for each in (lora.states.parameters, lora.states.gradients, lora.states.optimizer)
    )
    assert parameters == pytest.approx(base * (0.5 + 4 / 64) + 4 * adapters)
    assert gradients == pytest.approx(4 * adapters) and optimizer == pytest.approx(8 * adapters)
    # Of the frozen layers: forward, its recomputation, and the gradient of what comes in.
    assert lora.work == pytest.approx(whole.work * 3 / 4 + 2 * 4 * 15 * adapters)
    assert lora.working_states == 4 * 64 * 64 * (0.5625 + 2)
    with pytest.raises(ConfigError, match="all are trained: give --lora RANK"):
        of_transformer(**dimensions, frozen="nf4")


def test_frozen_matrices_of_a_module_count_in_their_format():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[0].requires_grad_(False)
    inputs = (torch.zeros(2, 64),)
    plain = of_module(model, inputs, name="two")
    packed = of_module(model, inputs, name="two", frozen="int8")
    saved = (plain.states.parameters - packed.states.parameters) * plain.parameters
    assert saved == pytest.approx(64 * 64 * 4 - 64 * 68)
    assert plain.work == packed.work and plain.states.optimizer == packed.states.optimizer


def test_what_is_frozen_is_not_written():
    """Every step reads the base three times from NVMe, writes what is trained, and reads that, its own master, too."""
    workload = of_transformer(layers=2, hidden=64, heads=2, batch=3, sequence=5, lora=4, frozen="nf4")
    found = {one.preset: one for one in estimate(workload, load("rtx-4090")).predictions}["infinity-nvme"]
    trained = 4 * 2 * 4 * 16 * 64
    assert found.disk_written == pytest.approx(trained + 2 * trained, abs=2)
    base = 12 * 2 * 64**2 * 0.5625
    assert found.disk_read == pytest.approx(3 * (base + trained) + 2 * trained + trained, abs=2)
