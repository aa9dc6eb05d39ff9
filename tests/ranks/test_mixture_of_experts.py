"""Ranks whose tokens go to different experts: each still takes part in every collective."""

from __future__ import annotations

import pytest
import torch
from ranks.launching import on_ranks

import zinf_fx


def losses(rank: int, compiled: bool) -> list[tuple[float, float]]:
    """Of DistributedDataParallel, and of zinf, in each step."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
    )
    model, twin = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    twin.load_state_dict(model.state_dict())
    plain = torch.nn.parallel.DistributedDataParallel(twin)
    zinf_fx.offload(model, placement="zero-3")
    run = torch.compile(model, backend="zinf") if compiled else model
    steps = [
        (plain, torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)),
        (run, zinf_fx.optim.AdamW(model.parameters(), lr=1e-3)),
    ]
    found = []
    for step in range(3):
        tokens = torch.full((2, 16), 3 + 7 * rank + step)  # one token, so that a rank needs one expert
        both = []
        for callable_model, optimizer in steps:
            loss = callable_model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            both.append(loss.item())
        found.append((both[0], both[1]))
    return found


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["compiled", "eager"])
def test_ranks_that_route_to_different_experts_train_as_distributed_data_parallel(compiled: bool):
    for found in on_ranks(2, losses, compiled):
        assert all(mine == plain for plain, mine in found)
