"""What each rank has of the model's states (ZeRO, table 1), in memory and on its own disk."""

from __future__ import annotations

import pytest
import torch
from gate import slow
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

STAGES = {"dp": 0, "zero-1": 1, "zero-2": 2, "zero-3": 3, "infinity-cpu": 3, "infinity-nvme": 3}
HIDDEN = 250


def states(rank: int) -> dict[str, tuple[int, int, int]]:
    """Return, by preset: bytes of model states on this rank, of them in the host arena, and the number of
    parameters."""
    by_preset = {}
    for preset in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))).bfloat16()
        zinf_fx.offload(model, placement=preset)
        optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
        model(torch.ones(2, HIDDEN, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
        by_preset[preset] = (
            sum(t.stored.bytes.nbytes if isinstance(t, StoredTensor) else t.nbytes for t in tensors),
            zinf_fx.stats(model).host_bytes,
            sum(p.numel() for p in model.parameters()),
        )
    return by_preset


@pytest.mark.parametrize("size", [slow(1), 2, slow(4)])
def test_model_states_of_a_rank_follow_table_1(size: int):
    """Adam in mixed precision has 2 Psi of parameters, 2 Psi of gradients, 12 Psi of optimizer states."""
    for by_preset in on_ranks(size, states):
        for preset, (nbytes, in_arena, psi) in by_preset.items():
            stage = STAGES[preset]
            per_element = sum(part / (size if stage >= least else 1) for part, least in ((2, 3), (2, 2), (12, 1)))
            assert nbytes == pytest.approx(per_element * psi, rel=0.05), preset
            if preset == "infinity-cpu":  # where the arena itself says how much is in use
                assert in_arena == pytest.approx(16 * psi / size, rel=0.05)
