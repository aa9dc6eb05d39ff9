"""`load_state_dict(assign=True)` of tied weights on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks.launching import on_ranks
from torch import nn

import zinf_fx


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    return model


def state(how: str) -> dict[str, torch.Tensor]:
    """The first rank's values count, and whether its weights are tied."""
    found = tied(1 + dist.get_rank()).state_dict()
    if how == "clones on both" or (how == "clones on the second" and dist.get_rank() == 1):
        return {name: value.clone() for name, value in found.items()}
    return found


def assigned(rank: int) -> dict[str, bool]:
    found = {}
    for placement in ("nvme", "zero-2"):
        for how in ("one tensor", "clones on both", "clones on the second"):
            model = zinf_fx.offload(tied(0), placement=placement)
            model.load_state_dict(state(how), assign=True)
            is_one = model[0].weight is model[1].weight
            values = [parameter.full_tensor() for parameter in (model[0].weight, model[1].weight)]
            equal = all(torch.equal(value, tied(1)[0].weight) for value in values)
            optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.arange(4)).sin().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            same = torch.equal(model[0].weight.full_tensor(), model[1].weight.full_tensor())
            found[f"{placement}, {how}"] = equal and is_one == same == (how != "clones on both")
    return found


def test_two_ranks_tie_what_the_first_has_tied():
    for found in on_ranks(2, assigned):
        assert all(found.values()), found
