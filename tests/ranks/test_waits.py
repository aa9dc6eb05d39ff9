"""No wait for other ranks lasts longer than its time-out or Ctrl-C, and none that will last for ever lasts for long."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gate import slow
from ranks.launching import on_ranks

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.errors import RanksError
from zinf_fx.runtime import rendezvous
from zinf_fx.runtime.ranks import Ranks

TIMEOUT, SOON, AT_ONCE = 0.3, 15.0, 1.0


def few() -> torch.Tensor:
    return torch.ones(4)


# For each kind of wait: what ranks do, all of them or those of one replica each.
TOGETHER: dict[str, Callable[[Ranks], object]] = {
    "all-gather": lambda ranks: ranks.all_gather(torch.empty(8), few(), "x").wait(),
    "broadcast of an owner": lambda ranks: ranks.all_gather(few(), few(), "x", owner=1).wait(),
    "reduce-scatter": lambda ranks: ranks.reduce_scatter(few(), torch.ones(8), "x").wait(),
    "reduction to an owner": lambda ranks: ranks.reduce(few(), "x", owner=0).wait(),
    "all-reduce over shards": lambda ranks: ranks.reduce_over_shards(few(), "x"),
    "all-reduce over all": lambda ranks: ranks.reduce_over_all(few(), "x", dist.ReduceOp.MAX),
    "rendezvous": lambda ranks: ranks.meet("x"),
    "agreement": lambda ranks: ranks.agree("equal", "x"),
    "exchange of objects": lambda ranks: ranks.of_all({"rank": ranks.rank}, "x"),
    "choice of the first": lambda ranks: ranks.of_first(few(), "x"),
    "block of a checkpoint": lambda ranks: in_a_block(ranks),
}
OVER_REPLICAS: dict[str, Callable[[Ranks], object]] = {
    "all-reduce over replicas": lambda ranks: ranks.all_reduce(few(), "x").wait(),
}
KINDS = TOGETHER | OVER_REPLICAS


def in_a_block(ranks: Ranks) -> None:
    from zinf_fx.checkpoint.models import together

    with together("x", ranks):
        pass


def ended_by(call: Callable[[], object]) -> tuple[str, str, float]:
    """Return the kind of error that ends a call, what it says, and the seconds until then."""
    begun = time.monotonic()
    try:
        call()
    except (RanksError, zinf_fx.errors.CheckpointError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", time.monotonic() - begun


def one_is_late(rank: int, folder: str, kinds: list[str]) -> dict[str, tuple[str, str, float]]:
    """How the first rank's wait for the other one ends, which comes when that has ended."""
    waits = {}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind in kinds:
        for how, timeout in (("late", TIMEOUT), ("interrupted", 60.0)):
            group = dist.new_group()
            ranks = Ranks(group, timeout, *((None, group) if kind in OVER_REPLICAS else (group, None)))
            gone, mark = f"{kind}, {how}", Path(folder, f"{kind} {how}".replace(" ", "-"))
            if rank:
                while not mark.exists():
                    time.sleep(0.01)
                assert ended_by(lambda kind=kind, ranks=ranks: KINDS[kind](ranks))[2] < SOON
                continue
            if how == "interrupted":
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            waits[gone] = ended_by(lambda kind=kind, ranks=ranks: KINDS[kind](ranks))
            mark.touch()
    return waits


def check_late(kinds: list[str], folder: Path) -> None:
    waits, _ = on_ranks(2, one_is_late, str(folder), kinds)
    for kind in kinds:
        name, text, seconds = waits[f"{kind}, late"]
        assert name == "RanksError" and "collective_timeout (0.3 s)" in text, (kind, name, text)
        assert TIMEOUT <= seconds < TIMEOUT + AT_ONCE, (kind, seconds)
        name, text, seconds = waits[f"{kind}, interrupted"]
        assert name == "KeyboardInterrupt" and seconds < 0.2 + AT_ONCE, (kind, name, text, seconds)


def test_no_collective_outlasts_its_time_out_or_an_interrupt(tmp_path: Path):
    check_late(["all-gather", "reduce-scatter", "rendezvous", "exchange of objects"], tmp_path)


@pytest.mark.slow
def test_nor_does_any_other_kind(tmp_path: Path):
    check_late(list(KINDS), tmp_path)


# What one rank calls while the others run a step.
CALLS: dict[str, Callable[..., object]] = {
    "save_checkpoint": lambda model, run, batch, there, manager: zinf_fx.save_checkpoint(there / "new", model),
    "load_checkpoint": lambda model, run, batch, there, manager: zinf_fx.load_checkpoint(there / "old", model),
    "save": lambda model, run, batch, there, manager: manager.save(1),
    "after_step": lambda model, run, batch, there, manager: manager.after_step(1),
    "resume": lambda model, run, batch, there, manager: manager.resume(),
    "export": lambda model, run, batch, there, manager: zinf_fx.export_safetensors(model, there / "weights"),
    "full_tensor": lambda model, run, batch, there, manager: next(model.parameters()).full_tensor(),
    "step": lambda model, run, batch, there, manager: run(*batch).backward(),
}


class Layer(torch.nn.Linear):
    """Gives its loss."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def one_calls(rank: int, folder: str, call: str, timeout: float) -> tuple[str, str, float]:
    """How each rank's call ends, where the last one calls something else than a step."""
    model = zinf_fx.offload(Layer(), process_group=dist.new_group(), collective_timeout=timeout)
    run = torch.compile(model, backend="zinf")
    manager = zinf_fx.CheckpointManager(Path(folder, "run"), model, every_steps=1)
    zinf_fx.save_checkpoint(Path(folder, "old"), model)
    batch = (torch.full((2, 8), 1.0 + rank),)
    run(*batch).backward()
    mine = call if rank == dist.get_world_size() - 1 else "step"
    return ended_by(lambda: CALLS[mine](model, run, batch, Path(folder), manager))


def check_told(size: int, call: str, folder: Path) -> None:
    for rank, (name, text, seconds) in enumerate(on_ranks(size, one_calls, str(folder), call, 60.0)):
        assert name == "RanksError" and seconds < SOON, (call, rank, name, text, seconds)
        assert "ranks wait for each other" in text and f"rank {size - 1} of {size} for the others" in text, text
        assert "for comparison of the collectives of" in text and "to begin there" in text, text


@pytest.mark.parametrize("call", ["save_checkpoint"])
def test_a_rank_that_saves_while_another_computes_is_told_so_like_that_one(call: str, tmp_path: Path):
    check_told(2, call, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("call", ["load_checkpoint", "save", "after_step", "resume", "export", "full_tensor"])
def test_so_is_one_that_calls_another_thing(size: int, call: str, tmp_path: Path):
    check_told(size, call, tmp_path)


def two_models(rank: int, call: str) -> tuple[str, str, float]:
    """How it ends when one rank runs a step of a model, and the other one of another, or reads a parameter of that."""
    models = [zinf_fx.offload(Layer(), process_group=dist.new_group()) for _ in range(2)]
    runs = [torch.compile(model, backend="zinf") for model in models]
    batch = (torch.full((2, 8), 1.0 + rank),)
    for run in runs:
        run(*batch).backward()
    mine = CALLS[call if rank else "step"]
    return ended_by(lambda: mine(models[rank], runs[rank], batch, None, None))


@pytest.mark.parametrize("call", ["step", pytest.param("full_tensor", marks=pytest.mark.slow)])
def test_ranks_that_run_different_models_are_told_so(call: str):
    for name, text, seconds in on_ranks(2, two_models, call):
        assert name == "RanksError" and "ranks wait for each other" in text and seconds < SOON, (name, text)


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(SOON)


def after_threads(rank: int) -> tuple[str, str, float]:
    """How it ends when one rank meets, and the other one gathers, after each has waited in two threads in turn, as
    where autograd has a thread for a device."""
    rendezvous.PATIENCE = 0.2
    ranks = Ranks.of(Config(collective_timeout=SOON, process_group=dist.new_group()))

    def meet_in_turn() -> None:
        for late in range(2):
            time.sleep(0.5 * (rank == late))
            ranks.meet(f"{late} is late")

    meet_in_turn()
    in_a_thread(meet_in_turn)
    return ended_by(lambda: KINDS["all-gather" if rank else "rendezvous"](ranks))


def test_ranks_are_told_whichever_threads_have_waited_before():
    for name, text, seconds in on_ranks(2, after_threads):
        assert name == "RanksError" and "ranks wait for each other" in text and seconds < SOON, (name, text, seconds)


def one_is_killed(rank: int, folder: str, call: str) -> tuple[str, str, float]:
    """How the other ranks' call ends when the last one is killed before it."""
    model = zinf_fx.offload(Layer(), placement="zero-3", collective_timeout=60.0)
    run = torch.compile(model, backend="zinf")
    manager = zinf_fx.CheckpointManager(Path(folder, "run"), model, every_steps=1)
    zinf_fx.save_checkpoint(Path(folder, "old"), model)
    batch = (torch.full((2, 8), 1.0 + rank),)
    run(*batch).backward()
    if rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ended_by(lambda: CALLS[call](model, run, batch, Path(folder), manager))


def check_named(size: int, call: str, folder: Path) -> None:
    waits = on_ranks(size, one_is_killed, str(folder), call, killed=[size - 1])
    for rank, (name, text, seconds) in enumerate(waits[:-1]):
        assert name == "RanksError" and seconds < SOON, (call, rank, name, text, seconds)
        # One that has been told ends, too, and the next may see that first.
        assert f"rank {size - 1} ended" in text or (size > 2 and f", {size - 1} ended" in text), (call, rank, text)


@pytest.mark.parametrize("call", [slow("step"), "save"])
def test_a_rank_that_was_killed_is_named(call: str, tmp_path: Path):
    check_named(2, call, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", list(CALLS))
def test_a_rank_of_three_that_was_killed_is_named(call: str, tmp_path: Path):
    check_named(3, call, tmp_path)


def saves_alone(rank: int, folder: str) -> tuple[str, str, float] | None:
    """How a save ends where the other rank doesn't come to it, nor waits for anything that is known."""
    model = zinf_fx.offload(torch.nn.Linear(4, 4), placement="zero-3", collective_timeout=0.5)
    manager = zinf_fx.CheckpointManager(Path(folder, "run"), model, every_steps=1)
    if rank:
        time.sleep(1.5)
        return None
    return ended_by(lambda: manager.after_step(1))


def test_a_save_waits_for_as_long_as_its_model_does(tmp_path: Path):
    (name, text, seconds), _ = on_ranks(2, saves_alone, str(tmp_path))
    assert name == "RanksError" and "did not come to it within collective_timeout (0.5 s)" in text, text
    assert 0.5 <= seconds < 0.5 + AT_ONCE


def interrupted_without_a_store() -> tuple[str, str, float]:
    """How a wait ends that is interrupted after the store has ended, where this rank has said that it waits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    at_group = rendezvous.Rendezvous.of(dist.group.WORLD, SOON)
    at_group._store = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    looks = iter([False])

    def over(seconds: float) -> bool:
        nonlocal store
        for look in looks:
            return look
        store = None
        raise KeyboardInterrupt

    def wait() -> None:
        with at_group.naming("x", SOON):
            at_group._wait(over, at_group._met, 1, "x", SOON)

    return ended_by(wait)


def test_an_interrupt_is_one_where_the_store_has_ended():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        name, text, seconds = interrupted_without_a_store()
    finally:
        dist.destroy_process_group()
    assert name == "KeyboardInterrupt" and seconds < SOON, (name, text)


def absent(rank: int) -> tuple[str, str, float] | None:
    """How offloading ends where the other rank does something else."""
    if rank:
        time.sleep(1.5)
        return None
    return ended_by(lambda: Ranks.of(Config(collective_timeout=0.5)))


def test_a_rank_that_begins_alone_is_told_who_did_not_come():
    (name, text, seconds), _ = on_ranks(2, absent)
    assert name == "RanksError" and "rank(s) 1 did not come within collective_timeout (0.5 s)" in text, text
    assert 0.5 <= seconds < 0.5 + AT_ONCE
