"""buffers: every transfer has its place in a region, and what has none within the budget is planned otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gate import slow
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager
from passes.models import CASES
from torch import nn

import zinf_fx
from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import BudgetError, PlanError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.passes.ir.framework import event_of, nodes_calling
from zinf_fx.passes.lowering.lower_gathers import LowerGathers
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers
from zinf_fx.passes.pipeline import plan_of
from zinf_fx.passes.scheduling.buffers import over_budget_by, place_buffers
from zinf_fx.passes.scheduling.prefetch import Prefetch
from zinf_fx.passes.scheduling.residency import choose_residency
from zinf_fx.plan import packs
from zinf_fx.plan.memory.spec import check_buffers
from zinf_fx.plan.memory.use import peak_device_bytes, peak_host_bytes
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import NOMINAL

KIB = 1024


def test_golden() -> None:
    """`tied` stays between its uses; `b` goes where `a` was."""
    built = Builder("inference", {"a": (64, 64), "b": (64, 64), "tied": (64, 64)}, device_memory="32KiB", prefetch=None)
    x = built.input(2, 64)
    for name in ("tied", "a", "b", "tied"):
        x = built.call(aten.mm.default, x, built.gather(name))
    built.returns(x)
    built.run(SinkGathers(), Regions(), LowerGathers(), Prefetch(None))
    built.run(*choose_residency([(built.graph, built.context)], spare=0))
    (buffers,) = place_buffers(plan_of([(built.graph, built.context)]), NOMINAL)
    built.check(
        buffers,
        after="""
        inference graph
        inputs
          a : f32[64, 64] on nvme, gradient on host
          b : f32[64, 64] on nvme, gradient on host
          tied : f32[64, 64] on nvme, gradient on host
          %0 : f32[2, 64]
        operator 0
          fetch tied resident at 0  # lower_gathers
          upload tied resident  # lower_gathers
          allgather tied resident  # lower_gathers
          %1 = wait tied : f32[64, 64]  # lower_gathers
          %2 = aten.mm(%0, %1) : f32[2, 64]
          release tied resident  # lower_gathers
        operator 1
          fetch a at 16384  # lower_gathers
          upload a  # lower_gathers
          allgather a  # lower_gathers
          %3 = wait a : f32[64, 64]  # lower_gathers
          %4 = aten.mm(%2, %3) : f32[2, 64]
          release a  # lower_gathers
        operator 2
          fetch b at 16384  # lower_gathers
          upload b  # lower_gathers
          allgather b  # lower_gathers
          %5 = wait b : f32[64, 64]  # lower_gathers
          %6 = aten.mm(%4, %5) : f32[2, 64]
          release b  # lower_gathers
        operator 3
          fetch tied resident at 0  # lower_gathers
          upload tied resident  # lower_gathers
          allgather tied resident  # lower_gathers
          %7 = wait tied : f32[64, 64]  # lower_gathers
          %8 = aten.mm(%6, %7) : f32[2, 64]
          release tied resident  # lower_gathers
        return %8
        """,
    )
    assert built.context.regions.host == 32 * KIB


@pytest.mark.parametrize(
    ("name", "options"),
    [
        slow("tied_far_apart", {}),
        ("tied_far_apart", {"device_memory": "4KiB"}),
        slow("mlp", {"activations": "recompute"}),
    ],
)
def test_numerics(name: str, options: dict[str, str]) -> None:
    model, inputs = CASES[name]()
    record = assert_trains_like_eager(model, *inputs, config=Config(placement="nvme", **options))
    for module, _ in record.planned.values():
        fetches = [n for n in nodes_calling(module.graph, ops.fetch)]
        assert fetches and all(event_of(node).offset is not None for node in fetches)


class Stack(nn.Module):
    """Has layers of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(128, 256 * (n + 1)) for n in range(4))
        self.down = nn.ModuleList(nn.Linear(256 * (n + 1), 128) for n in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x.square().mean()


def planned(**options: object) -> Plan:
    (plan,) = plan_model(Stack(), (torch.randn(4, 128),), **{"placement": "nvme", "chunk": "64KiB", **options}).plans
    return plan


def test_a_plan_in_which_buffers_collide_is_refused() -> None:
    plan = planned(pack=None)
    check_buffers(plan)
    forward, backward = plan.graphs
    two = [n for n, event in enumerate(forward.events) if event.kind == "fetch"][:2]
    events = list(forward.events)
    events[two[1]] = replace(events[two[1]], offset=events[two[0]].offset)
    with pytest.raises(PlanError, match=r"no two buffers .* share bytes, but these do: .*up\.0\.weight"):
        check_buffers(replace(plan, graphs=(replace(forward, events=tuple(events)), backward)))
    with pytest.raises(PlanError, match=r"each buffer lies in its region, but that in host memory has"):
        check_buffers(replace(plan, regions=replace(plan.regions, host=plan.regions.host - 4096)))
    events[two[1]] = replace(events[two[1]], offset=None)
    with pytest.raises(PlanError, match="each buffer has one offset"):
        check_buffers(replace(plan, graphs=(replace(forward, events=tuple(events)), backward)))


@pytest.mark.parametrize(
    ("kib", "placement"),
    [
        (1200, "nvme"),
        (1700, "infinity-nvme"),
        (4000, "infinity-cpu"),
        *(slow(kib, "nvme") for kib in (1700, 4000)),
        slow(2500, "infinity-nvme"),
        slow(16000, "infinity-cpu"),
    ],
)
def test_regions_and_states_stay_within_a_host_budget_or_the_plan_is_refused(kib: int, placement: str) -> None:
    try:
        plan = planned(host_memory=kib * KIB, placement=placement)
    except BudgetError as error:
        assert kib < 16000 and "host_memory" in str(error)
        return
    assert peak_host_bytes(plan) <= kib * KIB and over_budget_by(plan) <= 0
    check_buffers(plan)


def test_less_stays_where_places_need_the_room() -> None:
    """Whole blocks take more than the tiles' bytes, by which the schedule goes."""
    plan = planned(host_memory=1900 * KIB)
    assert peak_host_bytes(plan) <= 1900 * KIB < peak_host_bytes(planned())


def test_a_refusal_names_the_largest_and_what_would_fit() -> None:
    """The least chunk of an optimizer's step is larger than the layer, and than the budget."""
    layer, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    with pytest.raises(BudgetError, match="of host_memory at once, and the budget is 64KiB:") as refused:
        zinf_fx.explain(layer, x, placement="nvme", host_memory="64KiB")
    for part in ("together", "To fit:", "optimizer's chunks"):
        assert part in str(refused.value)
    needed = str(refused.value).partition('host_memory="')[2].partition('"')[0]
    assert "host arena" in zinf_fx.explain(layer, x, placement="nvme", host_memory=needed)


def test_a_refusal_where_nothing_moves() -> None:
    layer, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(2, 64)
    with pytest.raises(BudgetError) as refused:
        zinf_fx.explain(layer, x, placement="device", device_memory="64KiB")
    first, *_ = str(refused.value).splitlines()
    assert first == "what lives in a memory with a budget exceeds that by 96.5KiB: raise device_memory or host_memory"
    assert "placement of optimizer on host or nvme: 80.0 KiB less" in str(refused.value)


def test_explain_says_what_the_arena_is_for() -> None:
    text = zinf_fx.explain(Stack(), torch.randn(4, 128), placement="infinity-nvme", chunk="64KiB")
    (line,) = (line for line in text.splitlines() if line.startswith("host arena") and "in one piece" in line)
    assert "for optimizer chunks" in line and "for states" in line


def test_a_device_with_memory_of_its_own_has_a_region_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The region is beside what lives there, what is saved for backward, and gradients on their way out."""
    monkeypatch.setattr(packs, "IN_HOST_MEMORY", frozenset())
    plan = planned(device_memory=1000 * KIB)
    assert 0 < plan.regions.device < peak_device_bytes(plan) <= 1000 * KIB and over_budget_by(plan) <= 0
    layer, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
    with pytest.raises(BudgetError, match="of device_memory at once, and the budget is 8KiB:") as refused:
        zinf_fx.explain(layer, x, placement="nvme", device_memory="8KiB")
    for part in ("together", "To fit:", "gradients on their way, and gaps"):
        assert part in str(refused.value)
    needed = str(refused.value).partition('device_memory="')[2].partition('"')[0]
    assert "device arena" in zinf_fx.explain(layer, x, placement="nvme", device_memory=needed)
