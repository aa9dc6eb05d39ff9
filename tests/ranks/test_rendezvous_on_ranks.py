"""A collective that one rank alone asks for is an error on all ranks, by name and soon, and no process ends of it."""

from __future__ import annotations

import atexit
import io
import logging
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import training
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.errors import RanksError

SOON = 15.0
Found = tuple[str, float, list[str]]


def first_error(call: Callable[[], object]) -> Found:
    """Return what the error says, the seconds until it was raised, and what was logged before."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zinf_fx").addHandler(handler)
    started = time.monotonic()
    try:
        call()
    except RanksError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started, records
    finally:
        logging.getLogger("zinf_fx").removeHandler(handler)
    return "", time.monotonic() - started, records


def alone(rank: int) -> dict[str, Found]:
    """Return what each rank is told, where they do different things. What follows a failure has other ranks' groups."""
    errors: dict[str, Found] = {}
    models = {
        timeout: zinf_fx.offload(training.model(), placement="zero-3", collective_timeout=timeout)
        for timeout in (60.0, 5.0, 62.0)
    }
    apart, absent, model = models.values()
    names = [name for name, _ in apart.named_parameters()]
    errors["different tensors"] = first_error(lambda: apart.get_parameter(names[rank]).full_tensor())
    dist.barrier()
    if rank:
        time.sleep(7)
    else:
        errors["a pause"] = first_error(lambda: torch.save(absent.state_dict(), io.BytesIO()))
    dist.barrier()
    run = torch.compile(model, backend="zinf")
    ((batch,),) = training.batches(1, rank, 1)
    run(*batch).backward()
    if rank:
        errors["a step"] = first_error(lambda: run(*batch).backward())
    else:
        errors["a step"] = first_error(lambda: torch.save(model.state_dict(), io.BytesIO()))
    return errors


def elsewhere(rank: int) -> dict[str, Found]:
    """Return what the first rank is told, which gathers at once, while the others call something else before, or
    instead."""
    model = zinf_fx.offload(training.model(), placement="zero-3")
    theirs, late = dist.new_group([1, 2]), 6 if rank == 2 else 0
    before = {
        "late": lambda: time.sleep(4),
        "a group of the others": lambda: (time.sleep(late), dist.barrier(theirs)),
        "a collective that the first has started": lambda: (time.sleep(late), dist.all_reduce(torch.ones(1))),
    }
    instead = {"barrier": dist.barrier, "all_gather_object": lambda: dist.all_gather_object([None] * 3, rank)}
    errors: dict[str, Found] = {}
    for name, call in before.items():
        begun = dist.all_reduce(torch.ones(1), async_op=True) if not rank and "started" in name else None
        if rank:
            call()
        errors[name] = first_error(lambda: gathered(model))
        if begun is not None:
            begun.wait()
    for name, call in instead.items():
        if not rank:
            errors[name] = first_error(lambda: gathered(model))
        call()
    return errors


def gathered(model: torch.nn.Module) -> None:
    model.get_parameter("tokens.weight").full_tensor()


def random_states(rank: int) -> Found | None:
    """Return what the first rank is told while the second one waits for what it is to broadcast."""
    model = zinf_fx.offload(training.model(), placement="zero-3")
    error = None if rank else first_error(lambda: gathered(model))
    dist.broadcast(torch.ones(1), 0)
    return error


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zinf_fx watchdog"]


def left_alone(rank: int) -> Found | None:
    """Return what the first rank is told after the other one has ended."""
    model = zinf_fx.offload(training.model(), placement="zero-3")
    if rank:
        assert watchdogs()
        atexit._run_exitfuncs()
        assert not watchdogs()
        return None
    return first_error(lambda: torch.save(model.state_dict(), io.BytesIO()))


@pytest.mark.slow
def test_a_rank_is_told_which_other_collective_keeps_one_from_coming():
    errors, *others = on_ranks(3, elsewhere)
    for name in others[0]:
        text, seconds, _ = errors[name]
        assert not text and 3 < seconds < SOON and not any(told[name][0] for told in others), (name, text)
    for name in ("barrier", "all_gather_object"):
        text, seconds, _ = errors[name]
        assert "rank 0 of 3 for the others to come to the gather of parameter 'tokens.weight', and rank" in text, text
        assert f"in torch.distributed.{name}(), called at {__file__}:" in text and seconds < SOON, text
        assert "call full_tensor() of each value of its state_dict on every rank first" in text, text


def test_a_rank_is_told_that_one_waits_for_its_broadcast():
    (text, seconds, _), _ = on_ranks(2, random_states)
    assert "and rank 1 in torch.distributed.broadcast(), called at" in text and seconds < SOON, text


def test_a_rank_is_told_that_the_other_one_ended():
    (text, seconds, _), _ = on_ranks(2, left_alone)
    assert "for the others to come to the gather of parameter 'tokens.weight', and rank 1 ended" in text, text
    assert seconds < SOON and "call full_tensor() of each value of its state_dict on every rank first" in text


@pytest.mark.slow
def test_one_rank_alone_is_told_what_the_others_do():
    first, second = on_ranks(2, alone)
    for text, seconds, _ in (first["different tensors"], second["different tensors"]):
        assert text.startswith("RanksError: ranks disagree") and seconds < SOON, text
        assert "'tokens.weight' on rank 0" in text and "'frozen.weight' on rank 1" in text, text
    text, seconds, warnings = first["a pause"]
    assert "did not come to it within collective_timeout (5 s)" in text and "'tokens.weight'" in text, text
    assert 5 <= seconds < SOON and any("'tokens.weight', a collective of all ranks" in warning for warning in warnings)
    for text, seconds, _ in (first["a step"], second["a step"]):
        assert text.startswith("RanksError: ranks wait for each other: rank 0 of 2") and seconds < SOON, text
        assert "the gather of parameter 'tokens.weight'" in text, text
        assert "rank 1 for comparison of the collectives of the forward graph with tokens.weight" in text, text
