"""Options that are set after construction, and that the class can't compute with, are refused."""

from __future__ import annotations

import copy

import pytest
import torch

import zinf_fx
from zinf_fx import optim
from zinf_fx.errors import OptimizerError

INVALID = {
    "betas of one": ("betas", (0.9,)),
    "no betas": ("betas", None),
    "betas of text": ("betas", "ab"),
    "no lr": ("lr", None),
    "lr of text": ("lr", "0.1"),
    "no eps": ("eps", None),
    "decay of text": ("weight_decay", "1"),
    "decay of a list": ("weight_decay", [0.1]),
}

KINDS = {
    "streamed": (optim.AdamW, {}),
    "streamed, not fused": (optim.AdamW, {"fused": False}),
    "plain": (torch.optim.AdamW, {"fused": True}),
    "plain, not fused": (torch.optim.AdamW, {"foreach": False}),
}


@pytest.mark.parametrize("placement", ["nvme", "host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_invalid_options_change_nothing(twins, kind: str, placement: str):
    make, options = KINDS[kind]
    pair = twins(placement, shapes=((40, 50), (7,)))
    reference_options = {"fused": options.get("fused", "foreach" not in options)} | options
    mine, theirs = make(pair.stored, **options), torch.optim.AdamW(pair.masters, **reference_options)
    pair.train(mine, theirs, steps=1)
    for option, value in INVALID.values():
        pair.give_gradients()
        valid, mine.param_groups[0][option] = mine.param_groups[0][option], value
        with pytest.raises(OptimizerError):
            mine.step()
        pair.check()
        mine.param_groups[0][option] = valid
        mine.step()
        theirs.step()
        pair.check()


def test_the_error_names_the_options(twins):
    pair = twins("nvme", shapes=((40, 50),))
    optimizer = optim.AdamW(pair.stored)
    pair.give_gradients()
    optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9,)
    with pytest.raises(OptimizerError, match=r"AdamW can't step.*no parameter was changed.*'betas': \(0\.9,\)"):
        optimizer.step()


def test_in_backward(tmp_path):
    plain = torch.nn.Linear(30, 40)
    model = zinf_fx.offload(copy.deepcopy(plain), store=tmp_path, placement="nvme")
    mine, theirs = (
        optim.AdamW(model.parameters(), step_in_backward=True),
        torch.optim.AdamW(plain.parameters(), fused=True),
    )
    x = torch.ones(2, 30)
    for number in range(3):
        if number == 1:
            mine.param_groups[0]["eps"] = None
            with pytest.raises(OptimizerError, match="can't step with the options"):
                model(x).sum().backward()
            mine.param_groups[0]["eps"] = 1e-8
            mine.zero_grad()
        for net, optimizer in ((model, mine), (plain, theirs)):
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.weight.full_tensor(), plain.weight)


@pytest.mark.parametrize("kind", [optim.AdamW, torch.optim.AdamW])
def test_what_is_unusual_and_computes_is_as_in_torch(twins, kind: type):
    """Learning rates are zero and below, a tensor, or one that grows huge."""
    pair = twins("nvme", shapes=((40, 50), (7,)))
    mine, theirs = kind(pair.stored, fused=True), torch.optim.AdamW(pair.masters, fused=True)
    for lr in (0.0, -0.1, 1e30, torch.tensor(0.01), 0.1):
        for optimizer in (mine, theirs):
            optimizer.param_groups[0]["lr"] = lr
        pair.train(mine, theirs, steps=1)


def test_random_numbers_are_left_as_they_are(twins):
    class Dropping(torch.optim.SGD):
        """Draws a number that has no effect."""

        def step(self, closure=None):
            torch.rand(())
            super().step()

    pair = twins("nvme", shapes=((40, 50),))
    optimizer = type("Streaming", (optim.Streamed, Dropping), {})(pair.stored)
    pair.give_gradients()
    optimizer.step()
    pair.give_gradients()
    before = torch.random.get_rng_state()
    optimizer.rehearsal.run(optimizer)
    assert torch.equal(torch.random.get_rng_state(), before)
