"""Where the disk would be idle in backward, the next step's states are read then, and nobody sees a difference."""

from __future__ import annotations

import errno
import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import slow
from injecting import Fault, inject

import zinf_fx
from zinf_fx.config import LEAST_CHUNK
from zinf_fx.errors import StoreError
from zinf_fx.optim.chunk_queue import ChunkQueue
from zinf_fx.plan.memory.accounting import traffic
from zinf_fx.plan.memory.layout import chunks_wanted
from zinf_fx.plan.memory.use import arena_by_operator, host_arena, peak_host_bytes
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import NOMINAL, NOMINAL_MACHINE
from zinf_fx.plan.schedule import CHUNKS
from zinf_fx.runtime.tensor.tiers import Tiers

ROWS = 200  # so many that backward computes for longer than it moves, and forward moves for longer than it computes


class Training:
    """A model that is updated in many chunks, beside the same one in plain PyTorch."""

    def __init__(self, store: Path, **fields: object) -> None:
        self.plain, self.model = layers(), layers()
        zinf_fx.offload(self.model, store=store, placement="nvme", chunk=LEAST_CHUNK, **fields)
        self.optimizer = zinf_fx.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.reference = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, fused=True)
        self.compiled = torch.compile(self.model, backend="zinf")
        self.planned: list[Plan] = []
        self.batch = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(1))

    @property
    def tiers(self) -> Tiers:
        return next(self.model.parameters()).stored.tiers

    def step(self, before: Callable[[torch.nn.Module, torch.optim.Optimizer], None] = lambda *_: None) -> int:
        """On both sides, with something done `before` the optimizer's. Returns the bytes that backward read of states,
        of a stored step that was over when it began."""
        self.plain(self.batch).square().mean().backward()
        before(self.plain, self.reference)
        self.reference.step()
        self.reference.zero_grad()
        with followed_plans(self.model) as plans:
            loss = self.compiled(self.batch).square().mean()
            self.optimizer.finish()
            read = self.tiers.store.counters().bytes_read
            loss.backward()
            self.wait_for_reads()
            read = self.tiers.store.counters().bytes_read - read
        before(self.model, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.planned = plans or self.planned
        (plan,) = self.planned
        return read - traffic(plan, plan.graphs[1]).nvme_to_host

    def wait_for_reads(self) -> None:
        """Until what is read ahead has arrived, or failed."""
        ahead = self.tiers.ahead
        while ahead is not None and not all(chunk.ready for chunk in ahead._opened):
            time.sleep(0.001)

    def check(self) -> None:
        for stored, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(stored.full_tensor(), plain)


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(16)))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    """Return what trains, two steps on: the first one makes the states."""
    torch._dynamo.reset()
    training = Training(tmp_path)
    for _ in range(2):
        training.step()
    return training


def test_backward_reads_states_and_training_is_the_same(training: Training) -> None:
    for _ in range(3):
        assert training.step() >= 2 * LEAST_CHUNK  # of two moments
    training.check()
    stats = zinf_fx.stats(training.model)
    assert stats.displaced_buffers == 0 and stats.peak_host_bytes <= stats.planned_host_bytes, str(stats)


def scale(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def forget(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].zero_()


def shrink(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg_sq"] = torch.ones(entry["exp_avg_sq"].shape)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("change", [slow(scale), slow(forget), slow(shrink), load])
def test_what_is_changed_after_backward_counts(training: Training, change: Callable) -> None:
    for _ in range(2):
        training.step(change)
        training.check()


def test_memory_that_others_need_is_given_up(tmp_path: Path) -> None:
    training = Training(tmp_path, host_memory="8MiB")
    given_up = []

    def take_all(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if model is training.model and training.tiers.ahead is not None:
            buffers = []
            while training.tiers.ahead is not None:
                buffers.append(training.tiers.allocate(LEAST_CHUNK))
            for buffer in buffers:
                buffer.release()
            given_up.append(len(buffers))

    for _ in range(4):
        training.step(take_all)
        training.check()
    assert len(given_up) == 2  # in the first two steps there was nothing to read yet


def test_nothing_more_is_read_ahead_where_memory_ran_out(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = training.compiled(training.batch).square().mean()
    training.optimizer.finish()
    ahead = training.tiers.ahead

    def refuse(*arguments: object) -> None:
        raise StoreError("allocate", "host memory", "there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(ahead.memory, "open", refuse)
        ahead.advance()
    assert training.tiers.ahead is None
    ahead.advance()  # as a thread may that looked before
    assert not ahead._opened
    loss.backward()
    training.optimizer.zero_grad()
    training.step()
    training.check()


def test_it_goes_with_the_optimizer(training: Training) -> None:
    loss = training.compiled(training.batch).square().mean()
    training.optimizer.finish()
    loss.backward()
    training.optimizer.zero_grad()
    tiers, before = training.tiers, training.tiers.host.in_use
    assert tiers.ahead is not None
    del training.optimizer
    gc.collect()
    assert tiers.ahead is None and tiers.host.in_use <= before - 2 * LEAST_CHUNK


@pytest.mark.parametrize("arrives", [True, slow(False)])
def test_what_fails_ahead_is_found_by_the_step(
    training: Training, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """Where the reads have not arrived when the step would go on in the background, it is found by what forward reads
    first, which waits for the update."""
    loss = training.compiled(training.batch).square().mean()
    training.optimizer.finish()
    loss.backward()
    tiers = training.tiers
    inject(tiers.store, Fault("completion", operation="read", errno=errno.EIO, count=1000))
    training.wait_for_reads()
    tiers.ahead.advance()
    training.wait_for_reads()
    if not arrives:
        monkeypatch.setattr(ChunkQueue, "ready", False)
    with pytest.raises(StoreError):
        training.optimizer.step()
    assert training.optimizer.torn is None


@pytest.mark.parametrize(("budget", "count"), [slow(None, 10), ("4MiB", 7), slow("16MiB", 10)])
def test_room_for_chunks_is_within_the_budget(budget: str | None, count: int) -> None:
    """Of a machine that is described, too: its disk is as fast wherever activations go."""
    with torch.device("meta"):
        model = layers()
    config = zinf_fx.Config(placement="nvme", chunk=LEAST_CHUNK, host_memory=budget)
    plan = zinf_fx.export_plan(model, (torch.empty(ROWS, 128),), config, hardware=NOMINAL_MACHINE)
    assert plan.regions.chunk_count == count
    assert config.host_memory is None or peak_host_bytes(plan) <= config.host_memory
    (backward,) = (use for use in host_arena(plan) if use.phase == "backward")
    states_and_weights = LEAST_CHUNK + 2 * LEAST_CHUNK  # of a chunk, but for its gradients
    assert backward.chunks == (count - 1) * states_and_weights
    assert backward.total == max(arena_by_operator(plan, plan.graphs[1])) <= peak_host_bytes(plan)


def test_chunks_that_are_mostly_in_memory_have_no_use_for_more_room() -> None:
    """All of them together have no more in buffers than three that are like the fullest."""
    with torch.device("meta"):
        model = layers().bfloat16()
    optimizer = [("0.*", "nvme"), ("*", "host")]
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": optimizer}
    config = zinf_fx.Config(placement=placement, chunk=2 * LEAST_CHUNK, host_memory="16MiB")
    plan = zinf_fx.export_plan(model, (torch.empty(20, 128, dtype=torch.bfloat16),), config)
    assert plan.regions.chunk_count == CHUNKS < chunks_wanted(plan, NOMINAL)


@pytest.mark.parametrize("rows", [4, slow(2000)])
def test_a_step_that_has_no_use_for_more_chunks_has_three(rows: int) -> None:
    """Of few rows, the disk is busy in backward, too; with many, computing takes longer than the disk."""
    with torch.device("meta"):
        model = layers()
    config = zinf_fx.Config(placement="nvme", chunk=LEAST_CHUNK)
    plan = zinf_fx.export_plan(model, (torch.empty(rows, 128),), config)
    assert plan.regions.chunk_count == CHUNKS
