"""A model wrapped in DistributedDataParallel, which needs all parameters in memory: refused, or left alone and said."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from launching import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zinf_fx

OPTIONS = {"placement": "host"}


def wrapped(rank: int) -> tuple[list[str], list[str], bool]:
    """Return the refusals of both ways to wrap a model; the warnings without options, and whether it then trained as
    DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    refusals, x = [], torch.full((2, 8), 1.0 + rank)
    for wrap in (
        lambda: torch.compile(DistributedDataParallel(model), backend="zinf", options=OPTIONS),
        lambda: DistributedDataParallel(torch.compile(model, backend="zinf", options=OPTIONS)),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception) as raised:
            wrap()(x)
        refusals.append(str(raised.value))
    torch._dynamo.reset()
    expected = DistributedDataParallel(copy.deepcopy(model))
    compiled = torch.compile(DistributedDataParallel(model), backend="zinf")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for call in (compiled, expected, compiled, expected):
            call(x).square().sum().backward()
    texts = [str(warning.message) for warning in caught if "DistributedDataParallel" in str(warning.message)]
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return refusals, texts, all(type(p) is nn.Parameter and torch.equal(p.grad, q.grad) for p, q in pairs)


def test_models_in_distributed_data_parallel():
    for refusals, texts, alike in on_ranks(2, wrapped):
        for refusal in refusals:
            assert "reduces the gradients of 4 parameters, 576 B, and needs them in memory" in refusal
            assert "Nothing was moved; asked for was placement=" in refusal
        assert len(texts) == 1 and texts[0].endswith("Nothing is moved")
        assert alike


def stored(rank: int) -> list[str]:
    """Return what is said when a stored model is wrapped, and when one is whose stored parameters are frozen."""
    texts = []
    for trained in (True, False):
        model = nn.Sequential(zinf_fx.offload(nn.Linear(8, 8), placement="zero-3").requires_grad_(trained))
        parent = DistributedDataParallel(nn.Linear(1, 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            parent.module = model
        texts += [str(warning.message) for warning in caught if "stored parameters" in str(warning.message)]
    return texts


def test_a_stored_model_in_distributed_data_parallel_is_warned_of():
    for texts in on_ranks(2, stored):
        (text,) = texts
        assert "wraps 2 stored parameters, and holds 288 B of memory" in text and "evaluation_mode=True" in text


def accumulated(rank: int) -> list[bool]:
    """Return whether losses, gradients and parameters of a stored model in DistributedDataParallel equal those of a
    plain one, after steps that accumulate two micro-batches: the first without synchronisation, by the wrapper's own
    means."""
    runs = []
    for stored in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if stored:
            zinf_fx.offload(model, placement="zero-3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = DistributedDataParallel(model)
        run = torch.compile(wrapped, backend="zinf") if stored else wrapped
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
        generator = torch.Generator().manual_seed(rank)
        values = []
        for _ in range(2):
            with wrapped.no_sync():
                run(torch.randn(3, 8, generator=generator)).square().sum().backward()
            loss = run(torch.randn(3, 8, generator=generator)).square().sum()
            loss.backward()
            values += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        runs.append(values + [p.detach().clone() for p in model.parameters()])
    return [torch.equal(mine, plain) for plain, mine in zip(*runs, strict=True)]


def test_no_sync_of_a_wrapper_accumulates_stored_gradients_as_plain_ones():
    for same in on_ranks(2, accumulated):
        assert len(same) == 14 and all(same), same
