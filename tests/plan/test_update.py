"""The optimizer's step as events of a plan: what chunks consist of, in which order they come, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import torch

from zinf_fx import Config
from zinf_fx.plan.packs import pack_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import CHUNKS, Event, GraphSchedule, MemoryRegions, Operator, Slice, Tile, UpdateSchedule
from zinf_fx.plan.update import cost_of, costs_of, names_in, prefetched_bytes, update_of
from zinf_fx.sizes import WINDOW_ALIGNMENT

ELEMENTS = 2 * WINDOW_ALIGNMENT


def tile(name: str, height: int, state_tier: str = "nvme", **fields: object) -> Tile:
    """Return a parameter of so many rows of WINDOW_ALIGNMENT elements."""
    where = {"tier": "nvme", "gradient_tier": "host", "state_tier": state_tier}
    return Tile(name, (height, WINDOW_ALIGNMENT), torch.float32, **where | fields)


def plan_of(*tiles: Tile, count: int = CHUNKS) -> Plan:
    """Backward offloads the gradients in the order of `tiles`; forward uses them in the other."""
    operators = tuple(Operator(number, "mm", 1) for number in range(len(tiles)))
    stages = ("fetch", "upload", "allgather", "wait", "release")
    forward = [Event(kind, index, n) for n, index in enumerate(reversed(range(len(tiles)))) for kind in stages]
    backward = [Event(kind, index, index) for index in range(len(tiles)) for kind in ("reduce_scatter", "offload")]
    graphs = (
        GraphSchedule("forward", tiles, operators, tuple(forward)),
        GraphSchedule("backward", tiles, operators, tuple(backward)),
    )
    plan = Plan(graphs, Config(placement="nvme"), regions=MemoryRegions(chunk_elements=ELEMENTS, chunk_count=count))
    return replace(plan, update=update_of(plan))


def test_a_plan_that_trains_nothing_has_no_update():
    plan = plan_of(tile("a", 1, gradient_tier=None, state_tier=None))
    assert plan.update == UpdateSchedule() and costs_of(plan, plan.update) == []


def test_chunks_come_as_forward_uses_their_parameters_or_as_gradients_are_whole():
    plan = plan_of(tile("a", 2), tile("b", 2))
    assert [names_in(plan, chunk) for chunk in plan.update.chunks] == [("b",), ("a",)]
    assert [names_in(plan, chunk) for chunk in update_of(plan, in_backward=True).chunks] == [("a",), ("b",)]


def test_a_parameter_in_several_tiles_is_updated_as_one():
    """Chunks are no tiles."""
    plan = plan_of(tile("a", 3, rows=(0, 3)), tile("a", 2, rows=(3, 5)))
    slices = [chunk.slices for chunk in plan.update.chunks]
    assert slices == [
        (Slice(0, 0, ELEMENTS),),
        (Slice(0, ELEMENTS, ELEMENTS),),
        (Slice(0, 2 * ELEMENTS, WINDOW_ALIGNMENT),),
    ]


def test_the_parameters_of_a_pack_are_updated_one_by_one():
    plan = plan_of(pack_of([tile("a", 1), tile("b", 2)]))
    assert [chunk.slices for chunk in plan.update.chunks] == [
        (Slice(0, 0, WINDOW_ALIGNMENT), Slice(0, 0, WINDOW_ALIGNMENT, member=1)),
        (Slice(0, WINDOW_ALIGNMENT, WINDOW_ALIGNMENT, member=1),),
    ]


def test_what_the_device_updates_is_in_chunks_of_its_own():
    plan = plan_of(tile("a", 1), tile("b", 1, "device"), tile("c", 1))
    chunks = [(names_in(plan, chunk), chunk.on_device) for chunk in plan.update.chunks]
    assert chunks == [(("c", "a"), False), (("b",), True)]
    device = cost_of(plan, plan.update.chunks[1])
    assert (device.states, device.read, device.written) == tuple(n * 4 * WINDOW_ALIGNMENT for n in (2, 1, 1))


def test_a_chunk_whose_states_are_in_memory_is_neither_read_nor_written():
    plan = plan_of(tile("a", 1, "host", tier="host"))
    assert [event.kind for event in plan.update.events] == ["update"]
    assert plan.update.events[0].offset is None


def test_backward_reads_no_more_than_there_is_room_for():
    """But for the part of one chunk, which others may need; three chunks have no room then."""
    tiles = [tile(name, 2) for name in "abcdefgh"]
    for count in range(CHUNKS, 6):
        plan = plan_of(*tiles, count=count)
        prefetched = [event.chunk for event in plan.update.events if event.prefetched]
        assert prefetched == list(range(count - 1 if count > CHUNKS else 0))
        assert prefetched_bytes(plan) == len(prefetched) * ELEMENTS * (4 + 4 + 4)  # weights and two moments


def test_gradients_on_nvme_are_read_when_they_are_there():
    """Gradients of a chunk that backward reads come later."""
    plan = plan_of(*(tile(name, 2, gradient_tier="nvme") for name in "abc"), count=4)
    reads = [(event.chunk, event.prefetched) for event in plan.update.events if event.kind == "read_states"]
    assert reads == [(0, True), (1, True), (2, True), (0, False), (1, False), (2, False)]
    assert {cost.gradients for cost in costs_of(plan, plan.update)} == {4 * ELEMENTS}
    assert {cost_of(plan, chunk, in_place=True).gradients for chunk in plan.update.chunks} == {0}
