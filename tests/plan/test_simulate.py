"""Simulated time equals timelines worked out by hand; and the invariants of any simulation hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gate import slow
from hypothesis import example, given
from hypothesis import strategies as st
from planned_shapes import gpt, wide

from zinf_fx import Config
from zinf_fx.errors import PlanError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.hardware import Disks, Hardware, Link, Memory, load
from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import CHUNKS, PROLOGUE, Event, GraphSchedule, MemoryRegions, Operator, Tile
from zinf_fx.plan.simulation.communication import communication
from zinf_fx.plan.simulation.event_graph import RESOURCES, Job, event_graph
from zinf_fx.plan.simulation.simulate import Simulation, one_after_another, simulate, simulate_plan
from zinf_fx.plan.update import costs_of, names_in, update_of

# Jobs


def timeline(simulation: Simulation) -> dict[str, tuple[float, float]]:
    return {job.name: (t.start, t.end) for job, t in zip(simulation.jobs, simulation.timings, strict=True)}


def names(simulation: Simulation, indices: list[int]) -> list[str]:
    return [simulation.jobs[index].name for index in indices]


def test_a_resource_serves_in_the_order_in_which_jobs_become_ready():
    """c comes first in the program, but b is ready first; a and d are ready at once, and a comes first."""
    jobs = (
        Job("a", "disk", 3.0),
        Job("slow", "compute", 5.0),
        Job("c", "disk", 1.0, after=(1,)),
        Job("quick", "link", 4.0),
        Job("b", "disk", 2.0, after=(3,)),
        Job("d", "disk", 0.5),
    )
    simulation = simulate(jobs)
    assert timeline(simulation) == {
        "a": (0, 3),
        "d": (3, 3.5),
        "b": (4, 6),
        "c": (6, 7),
        "slow": (0, 5),
        "quick": (0, 4),
    }
    assert names(simulation, simulation.critical_path) == ["quick", "b", "c"]
    assert simulation.critical_seconds == dict.fromkeys(RESOURCES, 0) | {"link": 4, "disk": 3}
    assert (
        simulation.busy["disk"] == 6.5
        and simulation.utilisation["compute"] == 5 / 7
        and simulation.utilisation["upload"] == 0
    )


def test_nothing_overlaps_where_jobs_run_one_after_another():
    jobs = (Job("forward 0", "compute", 2.0), Job("fetch a", "disk", 3.0), Job("forward 1", "compute", 1.0, (0,)))
    simulation = one_after_another(jobs)
    assert timeline(simulation) == {"forward 0": (0, 2), "fetch a": (2, 5), "forward 1": (5, 6)}
    assert [(stall.before, stall.seconds) for stall in simulation.stalls()] == [("forward 1", 3.0)]
    assert simulation.critical_path == [0, 1, 2] and simulate(jobs).seconds == 3.0


def test_jobs_that_end_together_release_before_anything_starts():
    jobs = (
        Job("x", "link", 1.0),
        Job("y", "upload", 1.0),
        Job("second", "disk", 1.0, (0,)),
        Job("first", "disk", 1.0, (1,)),
    )
    assert timeline(simulate(jobs))["second"] == (1, 2)  # it stands first in the program


def test_nothing_and_nothing_to_do():
    assert simulate(()).seconds == 0 and simulate(()).critical_path == [] and simulate(()).stalls() == []
    simulation = simulate((Job("a", "compute", 0.0), Job("b", "compute", 0.0, (0,))))
    assert simulation.seconds == 0 and simulation.utilisation["compute"] == 0


def test_a_circle_is_named():
    with pytest.raises(PlanError, match="'a' can't be simulated: what it waits for waits for it"):
        simulate((Job("a", "compute", 1.0, (1,)), Job("b", "disk", 1.0, (0,))))


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    count = draw(st.integers(1, 12))
    return [
        Job(
            str(index),
            draw(st.sampled_from(RESOURCES)),
            draw(st.integers(0, 5)) / 2,
            tuple(draw(st.sets(st.integers(0, index - 1), max_size=3))) if index else (),
            blocks=draw(st.integers(1, 3)),
        )
        for index in range(count)
    ]


@given(job_lists(), st.sampled_from((1, 4)), st.sampled_from((0.5, 1.0)))
@example(
    [Job("0", "link", 0.0), Job("1", "compute", 0.5, (0,)), Job("2", "compute", 0.0), Job("3", "compute", 0.0)], 1, 1.0
)
def test_what_holds_for_any_jobs(jobs: list[Job], depth: int, beside: float):
    simulation = simulate(jobs, depth, 0.25, beside)
    runs = list(zip(simulation.jobs, simulation.timings, strict=True))
    for job, timing in runs:
        took = timing.end - timing.start
        if job.resource == "disk" and (depth > 1 or beside < 1):
            assert took >= job.seconds * (1 - 1e-9)
        else:
            assert took == pytest.approx(job.seconds)
        ready = max((simulation.timings[before].end for before in job.after), default=0.0)
        assert timing.start >= ready
        if timing.cause is None:
            assert timing.start == 0.0
        else:
            cause = simulation.timings[timing.cause]
            shares = depth > 1 and job.resource == simulation.jobs[timing.cause].resource == "disk"
            assert timing.start == cause.end or (shares and cause.start <= timing.start <= cause.end)
    work = sum(job.seconds for job in jobs if job.resource == "disk")
    assert work <= simulation.busy["disk"] * (1 + 1e-9) and simulation.busy["disk"] <= 8 * work * (1 + 1e-9)
    for resource in RESOURCES if depth == 1 else set(RESOURCES) - {"disk"}:
        served = sorted((t.start, t.end) for job, t in runs if job.resource == resource)
        assert all(span[1] <= other[0] for span, other in pairwise(served))
    for moment in {timing.start for _, timing in runs}:
        begun = [(job, t) for job, t in runs if job.resource == "disk" and t.start <= moment < t.end]
        waiting = [
            job
            for job, t in runs
            if job.resource == "disk"
            and t.start > moment >= max((simulation.timings[i].end for i in job.after), default=0.0)
        ]
        assert not waiting or sum(job.blocks for job, _ in begun) >= depth, "nothing waits while there is room"
    assert sum(simulation.critical_seconds.values()) == pytest.approx(simulation.seconds)
    idle = sum(stall.seconds for stall in simulation.stalls())
    computing = [t.end for job, t in runs if job.resource == "compute"]
    assert idle + simulation.busy["compute"] == pytest.approx(max(computing, default=0.0))
    for stall in simulation.stalls():
        assert sum(seconds for _, seconds in stall.waited_for) == pytest.approx(stall.seconds)


# Plans. One rank; a tile is 4096 bytes: 1 s from the disk, half a second up to the device.

BLOCK = 4096
ONE = Hardware(
    name="one",
    nodes=1,
    ranks_per_node=1,
    achievable=1.0,
    peak={"float32": 1.0},
    device=Memory(1 << 30, 1e12, 1e12),
    host=Memory(1 << 30, 6 * BLOCK, 12 * BLOCK),
    nvme=Disks(1 << 30, BLOCK, BLOCK / 2, None),
    upload=Link(4 * BLOCK, 0.25),
    download=Link(BLOCK, 0.0),
    in_node=Link(BLOCK, 0.0),
    between_nodes=Link(BLOCK, 0.0),
)
TRANSFERS = ("fetch", "upload", "allgather")


def inference(
    prologue: tuple[int, ...], starts: dict[int, tuple[int, ...]], tier: str = "nvme", world_size: int = 1
) -> Plan:
    """Three operators that need a tile each; `prologue` and `starts` say which tiles' live ranges begin where."""
    tiles = tuple(Tile(f"w{i}", (BLOCK // 4,), torch.float32, tier, None) for i in range(3))
    events = [Event(kind, tile, PROLOGUE) for tile in prologue for kind in TRANSFERS]
    for operator in range(3):
        events += [Event(kind, tile, operator) for tile in starts.get(operator, ()) for kind in TRANSFERS]
        events += [Event("wait", operator, operator), Event("release", operator, operator)]
    operators = tuple(Operator(i, "mm", 1) for i in range(3))
    graph = GraphSchedule("inference", tiles, operators, tuple(events))
    return Plan((graph,), Config(placement={"parameters": tier}), world_size=world_size)


TWO_SECONDS = {("inference", operator): 2.0 for operator in range(3)}
ON_DEMAND = inference((), {0: (0,), 1: (1,), 2: (2,)})
ONE_AHEAD = inference((0,), {0: (1,), 1: (2,)})


def test_without_prefetch_every_transfer_is_waited_for():
    simulation = simulate_plan(ON_DEMAND, ONE, TWO_SECONDS)
    assert simulation.seconds == 3 * (1 + 0.5 + 2)
    assert timeline(simulation)["inference 1"] == (5, 7)
    assert [(stall.before, stall.seconds) for stall in simulation.stalls()] == [
        (f"inference {i}", 1.5) for i in range(3)
    ]
    assert len(simulation.critical_path) == len(simulation.jobs) == 9


def test_one_operator_ahead_hides_what_is_shorter_than_it():
    simulation = simulate_plan(ONE_AHEAD, ONE, TWO_SECONDS)
    assert timeline(simulation) == {
        "fetch w0": (0, 1),
        "upload w0": (1, 1.5),
        "fetch w1": (1, 2),
        "upload w1": (2, 2.5),
        "inference 0": (1.5, 3.5),
        "inference 1": (3.5, 5.5),
        "fetch w2": (3.5, 4.5),
        "upload w2": (4.5, 5),
        "inference 2": (5.5, 7.5),
    }
    assert simulation.utilisation["compute"] == 6 / 7.5


def test_a_slow_disk_is_the_critical_path():
    """3 s per tile: fetches follow each other, and compute waits for half a second of each, and for the upload."""
    slow = replace(ONE, nvme=replace(ONE.nvme, read=BLOCK / 3))
    simulation = simulate_plan(ONE_AHEAD, slow, TWO_SECONDS)
    assert simulation.seconds == 11.5
    assert names(simulation, simulation.critical_path) == [
        "fetch w0",
        "fetch w1",
        "fetch w2",
        "upload w2",
        "inference 2",
    ]
    assert simulation.critical_seconds == dict.fromkeys(RESOURCES, 0) | {"compute": 2, "upload": 0.5, "disk": 9}
    first, second, third = simulation.stalls()
    assert [(job.name, seconds) for job, seconds in first.waited_for] == [("fetch w0", 3), ("upload w0", 0.5)]
    assert [(job.name, seconds) for job, seconds in second.waited_for] == [("fetch w1", 0.5), ("upload w1", 0.5)]
    assert (third.before, third.seconds) == ("inference 2", 1)


def test_tiles_in_host_memory_are_not_fetched_and_on_the_device_not_moved():
    assert simulate_plan(inference((), {0: (0,), 1: (1,), 2: (2,)}, "host"), ONE, TWO_SECONDS).seconds == 7.5
    assert simulate_plan(inference((), {0: (0,), 1: (1,), 2: (2,)}, "device"), ONE, TWO_SECONDS).seconds == 6


def test_what_stays_in_memory_is_not_moved():
    graph = ON_DEMAND.graphs[0]
    events = tuple(replace(e, resident=e.tile == 1 and e.kind != "wait") for e in graph.events)
    simulation = simulate_plan(replace(ON_DEMAND, graphs=(replace(graph, events=events),)), ONE, TWO_SECONDS)
    assert simulation.seconds == 2 * 3.5 + 2


# Training. Two ranks; a tile is 8192 bytes, half of it on each. Per rank and half tile: 1 s from the disk, 2 s to it,
# 1 s up, 2 s down, and 1 s for what the other rank sends.

TWO = replace(
    ONE,
    ranks_per_node=2,
    host=Memory(1 << 30, 12 * BLOCK, 12 * BLOCK),
    nvme=Disks(1 << 30, 2 * BLOCK, BLOCK, None),
    upload=Link(BLOCK, 0.0),
    download=Link(BLOCK / 2, 0.0),
)
SECONDS = {("forward", 0): 1.0, ("backward", 0): 2.0}


def training(gradient_tier: str = "nvme", for_backward: bool = False) -> Plan:
    """Build one operator each way."""
    shards = {"ranks": 2, "shard": BLOCK // 2, "partitioned": True}
    tile = Tile("w", (BLOCK,), torch.bfloat16, "nvme", gradient_tier, state_tier="nvme", **shards)
    operators = (Operator(0, "mm", 1),)
    there = [Event(kind, 0, PROLOGUE) for kind in TRANSFERS]
    ahead = [Event(kind, 0, 0, for_backward=True) for kind in TRANSFERS] if for_backward else []
    forward = (*there, *ahead, Event("wait", 0, 0), Event("release", 0, 0))
    backward = (
        *there,
        Event("wait", 0, 0),
        Event("release", 0, 0),
        Event("reduce_scatter", 0, 0),
        Event("offload", 0, 0),
    )
    graphs = (
        GraphSchedule("forward", (tile,), operators, forward),
        GraphSchedule("backward", (tile,), operators, backward),
    )
    config = Config(placement={"parameters": "nvme", "gradients": gradient_tier, "optimizer": "nvme"})
    return updating(Plan(graphs, config, world_size=2))


def updating(plan: Plan, **changes: object) -> Plan:
    """Return a plan with changes, and with the optimizer's step that follows of it then."""
    changed = replace(plan, **changes)
    return replace(changed, update=update_of(changed))


def test_a_training_step():
    """Per rank, states are 6 half tiles, and gradients and parameters one: 7 s to read and 14 s to write."""
    simulation = simulate_plan(training(), TWO, SECONDS, overlap=False)
    assert timeline(simulation) == {
        "fetch w": (4, 5),  # the second time, for backward
        "upload w": (5, 6),
        "allgather w": (6, 7),
        "forward 0": (3, 4),
        "backward 0": (7, 9),
        "reduce_scatter w": (9, 10),
        "offload w": (10, 12),
        "write w": (12, 14),
        "read_states 0": (14, 21),
        "update 0": (21, 23),  # 6 half tiles read and written at 6 per second each
        "write_states 0": (23, 37),
    }
    behind = ["reduce_scatter w", "offload w", "write w", "read_states 0", "update 0", "write_states 0"]
    assert names(simulation, simulation.critical_path)[-6:] == behind
    nbytes = {job.kind: job.nbytes for job in simulation.jobs}
    assert (nbytes["fetch"], nbytes["upload"], nbytes["allgather"]) == (BLOCK, BLOCK, 2 * BLOCK)


def test_a_step_that_overlaps_begins_with_the_optimizer_of_the_one_before():
    """Forward reads the parameter when it is updated and written."""
    times = timeline(simulate_plan(training(), TWO, SECONDS, overlap=True))
    assert [times[f"{name} 0"] for name in ("read_states", "update", "write_states")] == [(0, 7), (7, 9), (9, 23)]
    assert (times["fetch w"], times["upload w"], times["forward 0"]) == ((27, 28), (28, 29), (26, 27))
    assert max(end for _, end in times.values()) == 37  # as long as one after the other: there is but one parameter


def test_a_loop_adds_to_the_gradients_of_the_micro_batches_before():
    """Which come to the device: from the disk in 1 s, and up in another; the sum goes back as it came the first time.
    The second forward pass doesn't wait for the first gradient to be written."""
    simulation = simulate_plan(training(), TWO, SECONDS, overlap=False, accumulate=2)
    first = [job.name for job in simulation.jobs].index("write w")
    again = timeline(replace(simulation, jobs=simulation.jobs[first:], timings=simulation.timings[first:]))
    again = {name: (round(start, 6), round(end, 6)) for name, (start, end) in again.items()}  # adding takes 12 ns
    assert again["write w"] == (24, 26) and again["fetch w"] == (14, 15)  # behind the first write, from 12 to 14
    assert (again["forward 0"], again["backward 0"]) == ((12, 13), (17, 19))
    assert [again[name] for name in ("reduce_scatter w", "read w", "upload w")] == [(19, 20), (20, 21), (21, 22)]
    assert again["add w"][0] == 22 and again["read_states 0"] == (26, 33)
    kept = simulate_plan(training("device"), TWO, SECONDS, overlap=False, accumulate=2)
    moved = {job.name for job in kept.jobs if job.name.endswith(" w")}
    assert moved == {"fetch w", "upload w", "allgather w", "reduce_scatter w", "add w"}


def test_what_gradients_are_added_to_is_read_early_where_there_is_room():
    """Behind the offload of one, for the next that fits the buffer with it; of one that is offloaded twice, again
    behind its write."""
    tiles = tuple(Tile(name, (BLOCK,), torch.bfloat16, "host", "nvme", state_tier="nvme") for name in "ab")
    operators = tuple(Operator(n, "mm", 1) for n in range(3))
    events = [Event(kind, tile, n) for n, tile in enumerate((0, 1, 0)) for kind in ("reduce_scatter", "offload")]
    graph = GraphSchedule("backward", tiles, operators, tuple(events))
    config = Config(placement={"parameters": "host", "gradients": "nvme", "optimizer": "nvme"})
    seconds = {("backward", n): 10.0 for n in range(3)}
    awaited = {}
    for rooms in (1, 2):
        plan = Plan((graph,), config, gradient_buffer=rooms * 2 * BLOCK)
        jobs = event_graph(plan, ONE, seconds, overlap=False, accumulate=2)
        awaited[rooms] = [{jobs[n].name for n in job.after} for job in jobs if job.kind == "read"]
    assert awaited[1] == [{"backward 0"}, {"backward 1"}, {"backward 2"}]
    assert awaited[2] == [{"backward 0"}, {"add a"}, {"add b", "write a"}]


def of_parameters(count: int, nbytes: int = 2 * BLOCK, state_tier: str = "nvme") -> Plan:
    """Build so many operators each way, each with a parameter of its own in host memory; a chunk of states for each."""
    shape, where = (nbytes // 2,), {"tier": "host", "gradient_tier": "host", "state_tier": state_tier}
    tiles = tuple(Tile(f"w{i}", shape, torch.bfloat16, **where) for i in range(count))
    operators = tuple(Operator(i, "mm", 1) for i in range(count))
    graphs = []
    for kind in ("forward", "backward"):
        stages = (*TRANSFERS, "wait", "release", *(("reduce_scatter", "offload") if kind == "backward" else ()))
        events = tuple(Event(stage, i, i) for i in range(count) for stage in stages)
        graphs.append(GraphSchedule(kind, tiles, operators, events))
    config = Config(placement={"parameters": "host", "gradients": "host", "optimizer": state_tier})
    return updating(Plan(tuple(graphs), config, regions=MemoryRegions(chunk_elements=nbytes // 2)))


@pytest.mark.parametrize(("chunks_together", "read_early"), [(CHUNKS, 0), (4, 3), (5, 4), (12, 5)])
@pytest.mark.parametrize("overlap", [True, False])
def test_all_states_are_read_once_in_a_step(chunks_together: int, read_early: int, overlap: bool):
    """Some of them in backward, for the next step, where that goes on by itself: one at each of its 5 operators."""
    regions = MemoryRegions(chunk_elements=BLOCK, chunk_count=chunks_together)
    plan = updating(of_parameters(5, 4 * BLOCK), regions=regions)
    seconds = {(kind, n): 1.0 for kind in ("forward", "backward") for n in range(5)}
    jobs = event_graph(plan, ONE, seconds, overlap=overlap)
    reads = [(number, job.nbytes) for number, job in enumerate(jobs) if job.kind == "read_states"]
    assert len(reads) == len(plan.update.chunks) == 10
    assert sum(nbytes for _, nbytes in reads) == sum(cost.read for cost in costs_of(plan, plan.update))
    begin = [job.name for job in jobs].index("backward 0")
    assert sum(number > begin for number, _ in reads) == (read_early if overlap else 10)


def test_no_gradient_is_read_before_it_is_there():
    """States are in host memory, and their gradients alone are read."""
    shape, where = (BLOCK,), {"tier": "host", "gradient_tier": "nvme", "state_tier": "host"}
    tiles = tuple(Tile(f"w{i}", shape, torch.bfloat16, **where) for i in range(2))
    plan = of_parameters(2)
    graphs = tuple(replace(graph, tiles=tiles) for graph in plan.graphs)
    plan = updating(plan, graphs=graphs, regions=MemoryRegions(chunk_elements=BLOCK, chunk_count=CHUNKS + 1))
    assert all(cost.read == cost.gradients > 0 for cost in costs_of(plan, plan.update))
    assert not any(event.prefetched for event in plan.update.events)
    seconds = {(kind, n): 1.0 for kind in ("forward", "backward") for n in range(2)}
    names = [job.name for job in event_graph(plan, ONE, seconds, overlap=True)]
    assert names.index("read_states 1") < names.index("forward 0")


def test_forward_waits_for_the_parameters_that_it_uses_and_no_others():
    """Chunks of 6 blocks, a second to read and two to write; reads wait for the writes of three chunks before."""
    host = Memory(1 << 40, 1e30, 1e30)
    quick = Link(1e30, 0.0)
    machine = replace(ONE, host=host, upload=quick, download=quick, nvme=Disks(1 << 40, 12 * BLOCK, 6 * BLOCK, None))
    seconds = {(kind, i): 1.0 for kind in ("forward", "backward") for i in range(4)}
    simulation = simulate_plan(of_parameters(4), machine, seconds, overlap=True)
    times = {name: (round(start, 6), round(end, 6)) for name, (start, end) in timeline(simulation).items()}
    assert [times[f"read_states {i}"] for i in range(4)] == [(0, 1), (1, 2), (4, 5), (7, 8)]
    assert [times[f"write_states {i}"] for i in range(4)] == [(2, 4), (5, 7), (8, 10), (10, 12)]
    assert [times[f"forward {i}"] for i in range(4)] == [(1, 2), (2, 3), (5, 6), (8, 9)]
    assert times["backward 3"] == (12, 13)
    apart = simulate_plan(of_parameters(4), machine, seconds, overlap=False)
    assert round(apart.seconds, 6) == 8 + 12


def test_chunks_come_in_the_order_in_which_forward_uses_the_parameters():
    """Packs, which are the last of a plan's tiles, among them."""
    plan = of_parameters(3)
    forward, backward = plan.graphs
    events = [event for index in (2, 0, 1) for event in forward.events if event.tile == index]
    events = [replace(event, operator=number // 5) for number, event in enumerate(events)]
    plan = updating(plan, graphs=(replace(forward, events=tuple(events)), backward))
    assert [names_in(plan, chunk) for chunk in plan.update.chunks] == [("w2",), ("w0",), ("w1",)]


def test_chunks_have_together_what_the_parameters_have():
    plan = updating(of_parameters(3, 10 * BLOCK), regions=MemoryRegions(chunk_elements=3 * BLOCK))
    parts = [[(part.tile, part.start, part.count) for part in chunk.slices] for chunk in plan.update.chunks]
    assert [[(tile, start // BLOCK, count // BLOCK) for tile, start, count in chunk] for chunk in parts] == [
        [(0, 0, 3)],
        [(0, 3, 2), (1, 0, 1)],
        [(1, 1, 3)],
        [(1, 4, 1), (2, 0, 2)],
        [(2, 2, 3)],
    ]
    costs = costs_of(plan, plan.update)
    assert [cost.elements for cost in costs] == 5 * [3 * BLOCK]
    states = 15 * BLOCK * (4 + 4 + 4)  # fp32 states on NVMe, of parameters in memory
    assert {sum(getattr(cost, name) for cost in costs) for name in ("states", "read", "written")} == {states}


def test_the_steps_events_take_turns_in_the_room_for_chunks():
    """Chunks are read as far ahead of the update as they have places, which are free when what was there is written."""
    plan = updating(of_parameters(3, 10 * BLOCK), regions=MemoryRegions(chunk_elements=3 * BLOCK, chunk_count=4))
    reads, writes = "read_states", "write_states"
    assert [(event.kind, event.chunk, event.prefetched) for event in plan.update.events] == [
        *((reads, chunk, True) for chunk in range(3)),
        *(("update", 0, False), (writes, 0, False), (reads, 3, False)),
        *(("update", 1, False), (writes, 1, False), (reads, 4, False)),
        *((kind, chunk, False) for chunk in (2, 3, 4) for kind in ("update", writes)),
    ]
    offsets = [event.offset for event in plan.update.events if event.kind == reads]
    scratch = 3 * BLOCK * 4  # for masters' gradients in fp32
    assert offsets == [scratch + place * 3 * BLOCK * 12 for place in (0, 1, 2, 3, 0)]


def test_a_device_in_host_memory_copies_what_leaves_it_and_uploads_nothing():
    machine = replace(ONE, host=Memory(1 << 30, 4 * BLOCK, 4 * BLOCK), unified=True)
    plan = of_parameters(2)
    simulation = simulate_plan(plan, machine, {(kind, i): 1.0 for kind in ("forward", "backward") for i in range(2)})
    assert not simulation.busy["upload"] and not simulation.busy["download"]
    copies = [job for job in simulation.jobs if job.kind == "offload"]
    assert [(job.resource, job.seconds) for job in copies] == [("compute", 1.0)] * 2


LOADED = replace(ONE, nvme=replace(ONE.nvme, read_load=0.25, write_load=0.5), unified=True)


def seconds_of_computing(simulation: Simulation) -> list[float]:
    return [
        t.end - t.start for job, t in zip(simulation.jobs, simulation.timings, strict=True) if job.resource == "compute"
    ]


def test_computing_loses_what_a_disk_job_takes_while_it_runs():
    """Of 2 seconds of computing, the first is beside a read of 1 s, in which a quarter is lost."""
    simulation = simulate_plan(ONE_AHEAD, LOADED, TWO_SECONDS)
    times = timeline(simulation)
    assert (times["fetch w1"], times["inference 0"], times["fetch w2"]) == ((1, 2), (1, 3.25), (3.25, 4.25))
    assert seconds_of_computing(simulation) == [2.25, 2.25, 2.0]
    assert simulation.busy["compute"] == 6.5 and simulation.seconds == 7.5
    assert sum(simulation.critical_seconds.values()) == simulation.seconds


def test_what_starts_a_transfer_computes_later():
    """The reads of w0 and w1 before the first operator, that of w2 before the second; the third starts none."""
    disks = replace(ONE.nvme, start=0.25)
    simulation = simulate_plan(ONE_AHEAD, replace(ONE, nvme=disks, unified=True), TWO_SECONDS)
    assert seconds_of_computing(simulation) == [2.5, 2.25, 2.0]
    assert seconds_of_computing(simulate_plan(ONE_AHEAD, replace(ONE, nvme=disks), TWO_SECONDS)) == [2.0] * 3


def test_the_disk_is_slower_beside_computing_where_both_need_processors():
    """It has half of its speed from when the first operator begins on: 1 s for w0, and 2 s for w1."""
    machine = replace(ONE, nvme=replace(ONE.nvme, beside=0.5))
    times = timeline(simulate_plan(ONE_AHEAD, replace(machine, unified=True), TWO_SECONDS))
    assert (times["fetch w0"], times["fetch w1"], times["inference 0"]) == ((0, 1), (1, 3), (1, 3))
    times = timeline(simulate_plan(ONE_AHEAD, machine, TWO_SECONDS))
    assert times["fetch w1"][1] - times["fetch w1"][0] == 1


def test_jobs_share_the_disk_by_their_blocks():
    """Of three blocks together, one is b's: it has a third of the speed. a is as fast as the disk when it is alone."""
    jobs = [Job("a", "disk", 4.0, blocks=2), Job("b", "disk", 1.0), Job("forward 0", "compute", 4.0, (1,))]
    simulation = simulate(jobs, depth=4)
    assert timeline(simulation) == {"a": (0, 5), "b": (0, 3), "forward 0": (3, 7)}
    assert simulation.busy["disk"] == 5
    assert simulation.critical_seconds == dict.fromkeys(RESOURCES, 0) | {"disk": 3, "compute": 4}
    assert timeline(simulate(jobs))["b"] == (4, 5), "one job at a time"


def test_a_job_begins_when_a_block_has_room_for_one_of_its_own():
    """Of four blocks under way, three are a's and one is the first of b's two. At 4/3 s a's first is done, and b's
    second begins; at 8/3 s b's first is done, and c begins; and at 10/3 s a has one left, as b and c have."""
    jobs = [Job("a", "disk", 3.0, blocks=3), Job("b", "disk", 2.0, blocks=2), Job("c", "disk", 1.0)]
    simulation = simulate(jobs, depth=4)
    starts, ends = zip(*((timing.start, timing.end) for timing in simulation.timings), strict=True)
    assert starts == pytest.approx((0, 0, 8 / 3)) and ends == pytest.approx((6, 35 / 6, 35 / 6))
    assert [timing.cause for timing in simulation.timings] == [None, None, 1]
    assert sum(simulation.critical_seconds.values()) == simulation.seconds


def test_what_waits_behind_a_long_job_begins_with_its_last_blocks():
    """One block at a time of b's hundred is left over when its last three are under way."""
    jobs = [Job("b", "disk", 100.0, blocks=100), Job("c", "disk", 1.0), Job("forward 0", "compute", 7.0)]
    times = timeline(simulate(jobs, depth=4))
    assert times["c"][0] == pytest.approx(97) and times["b"][1] == pytest.approx(101)


@pytest.mark.parametrize(("blocks", "seconds"), [(1, 4), (2, 3), (4, 25 / 12), (8, 37 / 24)])
def test_a_disk_is_as_fast_as_many_blocks_are_under_way(blocks: int, seconds: float):
    """It has a quarter of its rate for the last of them, half of it for the last but one, and so on; all of it for
    four."""
    job = Job("a", "disk", 1.0, blocks=blocks)
    assert simulate([job], 4, alone=0.25).seconds == pytest.approx(seconds)
    others = Job("forward 0", "compute", 0.3), Job("forward 1", "compute", 0.1)
    simulation = simulate([job, *others], 4, 0.25, beside=0.999999)
    assert simulation.timings[0].end == pytest.approx(seconds, rel=1e-5), "whatever else happens meanwhile"


def test_a_shared_disk_loads_computing_by_what_it_moves():
    """At half of its rate the disk takes half as much from it; but not where it is computing that halves the rate, as
    when the load was measured."""
    jobs = [Job("write a", "disk", 2.0, load=0.5), Job("forward 0", "compute", 3.0)]
    assert timeline(simulate(jobs, depth=2, alone=0.5)) == {"write a": (0, 4), "forward 0": (0, 4)}
    jobs = [Job("write a", "disk", 2.0, load=0.5), Job("forward 0", "compute", 2.0)]
    assert timeline(simulate(jobs, beside=0.5)) == {"write a": (0, 4), "forward 0": (0, 4)}


def test_jobs_of_the_disk_have_the_blocks_of_their_bytes():
    two = replace(TWO, nvme=replace(TWO.nvme, block=BLOCK // 2))
    jobs = event_graph(training(), two, SECONDS, accumulate=2)
    assert {job.blocks for job in jobs if job.resource != "disk"} == {1}
    blocks = {job.kind: job.blocks for job in jobs if job.resource == "disk"}
    assert blocks == {"fetch": 2, "read": 2, "write": 2, "read_states": 14, "write_states": 14}


def test_what_nothing_computes_beside_costs_nothing():
    """Each read is waited for; a step that overlaps nothing; a device with memory of its own."""
    assert seconds_of_computing(simulate_plan(ON_DEMAND, LOADED, TWO_SECONDS)) == [2.0] * 3
    assert seconds_of_computing(simulate_plan(ONE_AHEAD, LOADED, TWO_SECONDS, in_turn=True)) == [2.0] * 3
    assert seconds_of_computing(simulate_plan(ONE_AHEAD, replace(LOADED, unified=False), TWO_SECONDS)) == [2.0] * 3


def test_computing_that_is_short_beside_the_disk_loses_no_more_than_it_computes():
    """It has half of its speed for as long as it runs."""
    jobs = [Job("write a", "disk", 10.0, load=0.5), Job("forward 0", "compute", 1.0), Job("forward 1", "compute", 8.0)]
    simulation = simulate(jobs)
    assert timeline(simulation) == {"write a": (0, 10), "forward 0": (0, 2), "forward 1": (2, 14)}
    assert seconds_of_computing(simulation) == [2.0, 12.0]


def test_reads_and_writes_of_a_step_have_their_loads():
    loaded = replace(TWO, nvme=LOADED.nvme, unified=True)
    loads = {job.kind: job.load for job in event_graph(training(), loaded, SECONDS, accumulate=2)}
    assert {kind for kind, load in loads.items() if load == 0.5} == {"write", "write_states"}
    assert {kind for kind, load in loads.items() if load == 0.25} == {"fetch", "read", "read_states"}
    assert {job.load for job in event_graph(training(), TWO, SECONDS, accumulate=2)} == {0.0}


def test_an_optimizer_takes_the_rate_measured_for_it():
    plan = of_parameters(2)
    machine = replace(ONE, updates={"float32": BLOCK / 3})
    simulation = simulate_plan(plan, machine, {(kind, i): 1.0 for kind in ("forward", "backward") for i in range(2)})
    assert [job.seconds for job in simulation.jobs if job.kind == "update"] == [3.0, 3.0]


def test_each_form_of_states_has_a_rate_of_its_own():
    """Where there is none, the bytes of the states are read and written at the rate of host memory."""
    kinds = [(kind, i) for kind in ("forward", "backward") for i in range(2)]
    machine = replace(ONE, updates={"float32": BLOCK / 3, "8bit": BLOCK / 5, "split, 8bit": BLOCK / 10})
    coded = {"state_dtype": "8bit"}
    of_bf16 = 8 * BLOCK  # bytes
    in_memory = ONE.host.seconds(of_bf16, of_bf16)
    forms = (({}, 3), (coded, 5), (coded | {"master_dtype": "split"}, 10), ({"state_dtype": "bfloat16"}, in_memory))
    for form, seconds in forms:
        plan = of_parameters(2, state_tier="host")
        graphs = tuple(
            replace(graph, tiles=tuple(replace(tile, **form) for tile in graph.tiles)) for graph in plan.graphs
        )
        simulation = simulate_plan(replace(plan, graphs=graphs), machine, dict.fromkeys(kinds, 1.0))
        assert [job.seconds for job in simulation.jobs if job.kind == "update"] == [seconds] * 2


QUICK = replace(
    ONE, upload=Link(1e30, 0.0), download=Link(1e30, 0.0), updates={"float32": BLOCK / 3}
)  # 3 s for each parameter
OF_TWO = {(kind, i): 1.0 for kind in ("forward", "backward") for i in range(2)}


def rounded(simulation: Simulation, *names: str) -> list[tuple[float, float]]:
    times = timeline(simulation)
    return [(round(times[name][0], 6), round(times[name][1], 6)) for name in names]


def test_the_host_updates_while_a_device_with_memory_of_its_own_computes():
    simulation = simulate_plan(of_parameters(2, state_tier="host"), QUICK, OF_TWO, overlap=True)
    assert rounded(simulation, "update 0", "update 1", "forward 0", "forward 1") == [(0, 3), (3, 6), (3, 4), (6, 7)]
    assert simulation.stalled["host"] == pytest.approx(3 + 2)


def test_an_optimizer_that_steps_in_backward_updates_what_is_whole():
    """It updates beside backward on a device with memory of its own; else between its operators."""
    plan, names = of_parameters(2, state_tier="host"), ("backward 0", "update 0", "backward 1", "update 1")
    simulation = simulate_plan(plan, QUICK, OF_TWO, in_backward=True)
    assert rounded(simulation, *names) == [(2, 3), (3, 6), (3, 4), (6, 9)]
    simulation = simulate_plan(plan, replace(QUICK, unified=True), OF_TWO, in_backward=True)
    assert rounded(simulation, *names) == [(2, 3), (3, 6), (6, 7), (7, 10)]
    assert "offload" not in {job.kind for job in simulation.jobs}  # the CPU has the gradients where it computed them
    simulation = simulate_plan(plan, replace(QUICK, download=ONE.download), OF_TWO, in_backward=True)
    assert rounded(simulation, "offload w0", "update 0", "offload w1", "update 1") == [(3, 5), (5, 8), (5, 7), (8, 11)]


def test_gradients_that_are_consumed_go_to_no_disk():
    """But from a device with memory of its own, whatever the plan was made on, or of tiles of rows."""
    plan = of_parameters(2)
    tiles = tuple(replace(tile, gradient_tier="nvme") for tile in plan.tiles)
    graphs = tuple(replace(graph, tiles=tiles) for graph in plan.graphs)
    plan = replace(plan, graphs=graphs)

    def moved(unified: bool, plan: Plan = plan) -> dict[str, int]:
        jobs = event_graph(plan, replace(QUICK, unified=unified), OF_TWO, in_backward=True)
        return {kind: sum(job.nbytes for job in jobs if job.kind == kind) for kind in ("write", "read_states")}

    states, gradients = sum(cost.written for cost in costs_of(plan, plan.update)), 2 * 2 * BLOCK
    assert moved(unified=True) == {"write": 0, "read_states": states}
    assert moved(unified=False) == {"write": gradients, "read_states": states + gradients}
    rows = tuple(replace(tile, rows=(0, 1)) for tile in tiles)
    divided = replace(plan, graphs=tuple(replace(graph, tiles=rows) for graph in graphs))
    assert moved(unified=True, plan=divided) == moved(unified=False)


def test_chunks_of_a_step_in_backward_come_in_the_order_in_which_gradients_are_whole():
    """That of a parameter of which backward has several parts, with the last of them."""
    plan = of_parameters(3)
    forward, backward = plan.graphs
    events = [event for index in (2, 0, 1) for event in backward.events if event.tile == index]
    again = [event for event in backward.events if event.tile == 2]
    events = [replace(event, operator=number // 5) for number, event in enumerate([*events, *again])]
    plan = replace(plan, graphs=(forward, replace(backward, events=tuple(events))))
    assert [names_in(plan, chunk) for chunk in update_of(plan, in_backward=True).chunks] == [("w0",), ("w1",), ("w2",)]


def test_a_step_in_backward_accumulates_nothing():
    with pytest.raises(PlanError, match="has one backward pass, and 2 are to be accumulated"):
        simulate_plan(training(), TWO, SECONDS, in_backward=True, accumulate=2)


def test_an_optimizer_on_the_device_takes_that_memorys_rate_whatever_the_cpus_update():
    plan = of_parameters(1, state_tier="device")
    machine = replace(ONE, device=Memory(1 << 30, 12 * BLOCK, 6 * BLOCK), updates={"float32": BLOCK / 5})
    seconds = {("forward", 0): 1.0, ("backward", 0): 1.0}
    of_updates = lambda simulation: [job.seconds for job in simulation.jobs if job.kind == "update"]  # noqa: E731
    assert of_updates(simulate_plan(plan, machine, seconds)) == [1 + 2]  # 12 blocks of states, read and written
    assert of_updates(simulate_plan(plan, replace(machine, unified=True), seconds)) == [5.0]


def test_groups_reduce_among_themselves_and_then_with_each_other():
    """Shards go over the link of a node; and an all-reduce, of two halves of a shard, over that between nodes, of which
    the two ranks of a node, with a shard each, have half: 8 s."""
    nodes = replace(TWO, nodes=2, between_nodes=Link(BLOCK / 4, 0.0))
    plan = training()
    graphs = tuple(
        replace(graph, tiles=tuple(replace(tile, replicas=2) for tile in graph.tiles)) for graph in plan.graphs
    )
    times = timeline(simulate_plan(replace(plan, graphs=graphs, world_size=4), nodes, SECONDS, overlap=False))
    assert times["allgather w"] == (6, 7)
    assert times["reduce_scatter w"] == (9, 9 + 1 + 8)


def test_gradients_in_host_memory_are_not_written():
    simulation = simulate_plan(training("host"), TWO, SECONDS, overlap=False)
    times = timeline(simulation)
    assert "write w" not in times and times["read_states 0"] == (12, 12 + 6)


def test_the_turn_starts_what_backward_begins_with():
    """Forward still has the tile, so it is neither read nor gathered again; its shard is uploaded meanwhile."""
    simulation = simulate_plan(training(for_backward=True), TWO, SECONDS, overlap=False)
    names_of_jobs = [job.name for job in simulation.jobs]
    assert names_of_jobs.count("fetch w") == names_of_jobs.count("allgather w") == 1
    times = timeline(simulation)
    assert (times["fetch w"], times["forward 0"]) == ((0, 1), (3, 4))
    assert (times["allgather w"], times["upload w"], times["backward 0"]) == ((2, 3), (3, 4), (4, 6))


# A captured plan

# One byte per second everywhere, so that seconds of work are bytes moved.
UNIT = replace(
    ONE,
    nvme=Disks(1 << 30, 1.0, 1.0, None),
    upload=Link(1.0, 0.0),
    download=Link(1.0, 0.0),
)


def captured(placement: str, **options: object) -> tuple[Plan, int]:
    """Return the plan of a small GPT, and how many parameters the model has."""
    with torch.device("meta"):
        model, inputs = gpt(2, 64)(), wide()
    (plan,) = plan_model(model, inputs, placement=placement, **options).plans
    return plan, len(list(model.parameters()))


# Every placement and every option, some of them slowly: how bytes are counted depends on a tile's tier, whatever the
# other options are.
CAPTURED = [
    slow("nvme", {}),
    slow("nvme", {"activations": "offload"}),
    slow("infinity-nvme", {"residency": False}),
    ("infinity-nvme", {"tile": "16KiB"}),
    slow("infinity-cpu", {"prefetch": None, "residency": False}),
    slow("zero-offload", {}),
    slow("zero-offload", {"activations": "offload"}),
]


@pytest.mark.parametrize(("placement", "options"), CAPTURED, ids=str)
def test_a_captured_plan_moves_the_bytes_that_its_accounting_says(placement: str, options: dict[str, object]):
    plan, _ = captured(placement, **options)
    assert any(tile.activation for tile in plan.graph("forward").tiles) == ("activations" in options)
    assert any(tile.rows for tile in plan.graph("forward").tiles) == ("tile" in options)
    compute = {(graph.kind, operator.index): 1.0 for graph in plan.graphs for operator in graph.operators}
    busy = simulate_plan(plan, UNIT, compute).busy
    moved = sum((traffic for _, traffic in phases(plan)), Traffic())
    assert (busy["disk"], busy["upload"], busy["download"], busy["link"]) == (
        moved.nvme,
        moved.host_to_device,
        moved.device_to_host,
        0,
    )


def test_plans_and_machines_must_belong_together():
    with pytest.raises(PlanError, match="the plan is for 2 ranks and one has 1: plan for as many"):
        event_graph(training(), ONE, SECONDS)
    with pytest.raises(PlanError, match="operator 0 of the backward graph has no seconds to simulate it with"):
        event_graph(training(), TWO, {("forward", 0): 1.0})


@pytest.mark.parametrize("placement", [slow("dp"), slow("zero-1"), slow("zero-2"), "zero-3"])
def test_the_link_is_busy_with_what_ranks_send(placement: str):
    plan, parameters = captured(placement, world_size=16, pack=None)
    hardware = replace(load("dgx-2"), in_node=Link(1e9, 0.0))
    simulation = simulate_plan(plan, hardware)
    sent = sum(collective.total for collective in communication(plan))
    assert simulation.busy["link"] == pytest.approx(sent / 1e9)
    refreshed = {job.subject: job for job in simulation.jobs if job.kind == "refresh"}
    assert len(refreshed) == (0 if placement in ("dp", "zero-3") else parameters)
    if refreshed:  # an operator waits for the shards that other ranks have updated
        first = next(job for job in simulation.jobs if job.kind == "forward")
        assert simulation.jobs.index(refreshed["tokens.weight"]) in first.after
