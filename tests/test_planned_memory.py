"""What the plan says that the host arena holds at most is what it holds; what can't fit is refused, and says why."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from followed import followed_plans
from gate import named
from planned_shapes import GPT, SHAPES, GPTConfig, Wide, rows, tokens

import zinf_fx
from zinf_fx.errors import BudgetError
from zinf_fx.plan.memory.use import host_arena, peak_host_bytes
from zinf_fx.runtime.execute.executor import EXECUTOR

TOLERANCE = 0.05


@pytest.fixture(autouse=True)
def nothing_left(fresh_dynamo: None) -> Iterator[None]:
    yield
    torch.compiler.reset()
    EXECUTOR.reset()
    gc.collect()


# Of the shapes, one of each arrangement of the host arena: buffers of tiles, of gradients, of chunks, of activations,
# and of states that live there; the peaks are of one more.
ARRANGEMENTS = ("deep", "in host memory", "activations on disk, within a host budget")
# "deep" is trained with steps in backward, and test_device_arena has activations on disk.
OF_THE_GATE = ("in host memory", "spread over the tiers, within a host budget")
STEPS_IN_BACKWARD = ("deep",)


@pytest.mark.parametrize("name", named(SHAPES, OF_THE_GATE))
def test_predicted_peaks_are_the_measured_ones(tmp_path: Path, name: str) -> None:
    """Those of each phase; and what the arena takes of the machine: every byte of it that was ever allocated, also in
    steps that go on in the next forward pass."""
    shape = SHAPES[name]
    torch.manual_seed(0)
    model = zinf_fx.offload(shape.model(), store=tmp_path, **shape.options)
    compiled = torch.compile(model, backend="zinf")
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False, **shape.states)
    config = next(iter(model.parameters())).stored.config
    host = next(iter(model.parameters())).stored.tiers.host
    peaks: list[dict[str, int]] = []
    with followed_plans(model) as plans:
        compiled(*shape.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    (plan,) = plans
    for _ in range(2):  # what stays in memory is there from now on
        peak = {}
        host.restart_peak()
        loss = compiled(*shape.batch())
        peak["forward"] = host.peak
        host.restart_peak()
        loss.backward()
        peak["backward"] = host.peak
        host.restart_peak()
        optimizer.step()
        peak["optimizer"] = host.peak
        optimizer.zero_grad()
        peaks.append(peak)
    planned = {use.phase: use.total - use.chunks for use in host_arena(plan)}  # these steps are followed by no reads
    of_step = next(use.total for use in host_arena(plan) if use.phase == "optimizer")
    del planned["optimizer"]
    for peak in peaks:
        # Of the last gradients' writes, which are planned beside the first chunks, some may have ended before these.
        assert 0.9 * of_step <= peak.pop("optimizer") <= (1 + TOLERANCE) * of_step
        # The rooms of gradients are there early, which is of use where these are added to others.
        assert 0.9 * planned["backward"] <= peak.pop("backward") <= (1 + TOLERANCE) * planned["backward"]
        assert peak == pytest.approx({"forward": planned["forward"]}, rel=TOLERANCE)
    assert zinf_fx.stats(model).planned_host_bytes == peak_host_bytes(plan) >= max(of_step, *planned.values()) > 0
    assert "as planned" in str(zinf_fx.stats(model))
    for use in host_arena(plan):
        if use.phase != "optimizer" and config.device_memory is not None:
            assert use.tiles + use.writes <= config.device_memory * 1.01, use
        if config.host_memory is not None:
            assert use.total <= config.host_memory, use
    if name not in ARRANGEMENTS:
        return
    optimizer.overlap = True
    for _ in range(2):
        compiled(*shape.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zinf_fx.stats(model)
    assert stats.peak_host_bytes == pytest.approx(stats.planned_host_bytes, rel=TOLERANCE), str(stats)
    assert stats.displaced_buffers == 0 and (stats.placed_buffers > 100 or "in host memory" in name), str(stats)


def test_packs_of_parameters_that_live_apart_take_what_is_planned(tmp_path: Path) -> None:
    """Their gradients leave one by one, each to its place in the buffer of all."""
    with zinf_fx.offloading(store=tmp_path, placement="nvme", chunk="1MiB"):
        model = GPT(GPTConfig(layers=2, hidden=256, heads=4, context=32, vocabulary=1000))
    compiled, optimizer = torch.compile(model, backend="zinf"), zinf_fx.optim.AdamW(model.parameters())
    with followed_plans(model) as plans:
        for _ in range(3):
            compiled(*tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
    (plan,) = plans
    stats = zinf_fx.stats(model)
    assert any(tile.members for tile in plan.tiles)
    assert stats.peak_host_bytes == pytest.approx(stats.planned_host_bytes, rel=TOLERANCE), str(stats)
    assert stats.displaced_buffers == 0, str(stats)


@pytest.mark.parametrize("name", named(SHAPES, STEPS_IN_BACKWARD))
def test_a_step_in_backward_takes_its_chunks_besides_at_most(tmp_path: Path, name: str) -> None:
    """The plan has room for chunks after backward, and gradients have places that they may not need."""
    shape = SHAPES[name]
    model = zinf_fx.offload(shape.model(), store=tmp_path, **shape.options)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), step_in_backward=True)
    compiled = torch.compile(model, backend="zinf")
    with followed_plans(model) as plans:
        for _ in range(3):
            compiled(*shape.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    stats = zinf_fx.stats(model)
    (plan,) = plans
    most_of_both = stats.planned_host_bytes + plan.regions.chunks
    assert 0.4 * stats.planned_host_bytes < stats.peak_host_bytes <= most_of_both, str(stats)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"placement": "nvme", "device_memory": "1MiB", "tile": None}, ["up.weight", "device_memory=", 'tile="auto"']),
        ({"placement": "infinity-cpu", "host_memory": "10MiB"}, ["optimizer states that live in host", "on nvme"]),
        ({"placement": "infinity-nvme", "host_memory": "5MiB"}, ["gradients that live in host", "placement of grad"]),
    ],
)
def test_what_can_not_fit_is_refused_with_a_table(options: dict[str, object], says: list[str]) -> None:
    with pytest.raises(BudgetError) as refused:
        zinf_fx.explain(Wide(), *rows(), **options)
    for part in ("together", "To fit:", *says):
        assert part in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"placement": {"parameters": "host", "gradients": "nvme", "optimizer": "nvme"}, "host_memory": "34MiB"},
            r"the budget is 34MiB of host_memory, of which what lives there leaves \d",
        ),
        (
            {"placement": {"gradients": "host", "optimizer": "host"}, "device_memory": "34MiB"},
            r"the budget is 34MiB of device_memory, of which what lives there leaves \d",
        ),
        (
            {"placement": "nvme", "device_memory": "1MiB", "host_memory": "1GiB"},
            r"the budget is 1MiB of device_memory, of which",
        ),
    ],
)
def test_the_budget_that_is_named_is_the_one_that_was_given(options: dict[str, object], says: str) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="meta") for _ in range(8)))
    with pytest.raises(BudgetError, match=says):
        zinf_fx.explain(layers, torch.ones(4, 1024), tile=None, **options)
