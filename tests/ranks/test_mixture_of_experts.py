"""Ranks whose tokens go to different experts: each still takes part in every collective."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gate import slow
from ranks.launching import on_ranks
from torch import nn
from torch.nn import functional as F

import zinf_fx


class Routed(nn.Module):
    """A language model with an expert for each token, whose weights are rows of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.router = nn.Embedding(64, 32), nn.Linear(32, 4)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 8) for shape in ((4, 32, 48), (4, 48, 32)))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        x = self.tokens(input_ids)
        weight, expert = self.router(x).softmax(-1).max(-1, keepdim=True)
        up, down = self.up[expert[..., 0]], self.down[expert[..., 0]]
        x = x + weight * (F.gelu(x[..., None, :] @ up) @ down)[..., 0, :]
        return SimpleNamespace(loss=F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
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
    return transformers.MixtralForCausalLM(config)


MODELS = {"routed": Routed, "mixtral": mixtral}


def losses(rank: int, name: str, compiled: bool) -> list[tuple[float, float]]:
    """Train on this rank, and return the losses of DistributedDataParallel and of zinf in each step."""
    torch.manual_seed(0)
    model, twin = MODELS[name](), MODELS[name]()
    twin.load_state_dict(model.state_dict())
    plain = torch.nn.parallel.DistributedDataParallel(twin)
    zinf_fx.offload(model, placement="zero-3")
    run = torch.compile(model, backend="zinf") if compiled else model
    steps = [
        (plain, torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True)),
        (run, zinf_fx.optim.AdamW(model.parameters(), lr=1e-3)),
    ]
    pairs = []
    for step in range(3):
        tokens = torch.full((2, 16), 3 + 7 * rank + step)  # one token, so that a rank needs one expert
        both = []
        for callable_model, optimizer in steps:
            loss = callable_model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            both.append(loss.item())
        pairs.append((both[0], both[1]))
    return pairs


@pytest.mark.parametrize(
    ("name", "compiled"), [("routed", True), slow("routed", False), slow("mixtral", True), slow("mixtral", False)]
)
def test_ranks_that_route_to_different_experts_train_as_distributed_data_parallel(name: str, compiled: bool):
    for pairs in on_ranks(2, losses, name, compiled):
        assert all(mine == plain for plain, mine in pairs)
