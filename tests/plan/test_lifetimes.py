"""From which event to which a buffer is needed: until a release, over the turn, over the end of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zinf_fx import Config
from zinf_fx.plan.lifetimes import Clock, device_buffers, host_buffers, profile
from zinf_fx.plan.schedule import Event, GraphSchedule, Plan, Tile

KIB = 1024


def tile(index: int, rows: int = 4, tier: str = "nvme", gradient_tier: str | None = "nvme") -> Tile:
    return Tile(index, "abcdef"[index], (rows, 256), torch.float32, tier, gradient_tier)


def events(text: str) -> tuple[Event, ...]:
    """`fetch a*, upload a, wait a, release a!`: `*` for the turn, `!` where the tile is resident."""
    found = []
    for one in text.split(", "):
        kind, name = one.split()
        found.append(Event(kind, "abcdef".index(name[0]), 0, turn="*" in name, resident="!" in name))
    return tuple(found)


def plan(forward: str, backward: str, separate: bool = False, **options: object) -> Plan:
    graphs = tuple(
        GraphSchedule(kind, tuple(tile(n) for n in range(3)), (), events(text), separate)
        for kind, text in (("forward", forward), ("backward", backward))
    )
    return Plan(graphs, Config(placement="nvme", **options), gradient_buffer=8 * KIB)


def tiles(found: Plan, device: bool = False) -> dict[str, list[list[tuple[int, int]]]]:
    """The spans of each tile's buffers, in order."""
    spans: dict[str, list[list[tuple[int, int]]]] = {}
    for each in device_buffers(found) if device else host_buffers(found):
        if each.what == "tile":
            spans.setdefault(each.label, []).append([(s.start, s.stop) for s in each.spans])
    return {label: sorted(of) for label, of in sorted(spans.items())}


def test_from_fetch_to_release() -> None:
    found = plan("fetch a, wait a, release a, fetch b, wait b, release b", "fetch b, wait b, release b")
    assert tiles(found) == {"a": [[(0, 2)]], "b": [[(3, 5)], [(6, 8)]]}
    assert Clock(found).starts == [0, 6, 9] and Clock(found).end == 11


def test_the_turn_holds_what_backward_fetches() -> None:
    found = plan("fetch a, wait a, fetch a*, release a, fetch b*", "fetch a, fetch b, wait a, release a, release b")
    assert tiles(found) == {"a": [[(0, 8)]], "b": [[(4, 9)]]}
    (a, b) = host_buffers(found)
    assert [tuple(at) for at in a.takers] == [(0, 0), (0, 2), (1, 0)]
    assert [tuple(at) for at in b.takers] == [(0, 4), (1, 1)]


def test_what_stays() -> None:
    """`a` over the turn, `b` over the end of the step, `c` always."""
    found = plan(
        "fetch a, release a!, fetch b!, release b, fetch c!, release c!",
        "fetch a!, release a, fetch b, release b!, fetch c!, release c!",
    )
    assert tiles(found) == {"a": [[(0, 7)]], "b": [[(0, 3), (8, 14)]], "c": [[(0, 14)]]}
    of = {each.label: {tuple(at) for at in each.takers} for each in host_buffers(found)}
    assert of == {"a": {(0, 0), (1, 0)}, "b": {(0, 2), (1, 2)}, "c": {(0, 4), (1, 4)}}


def test_a_device_with_memory_of_its_own() -> None:
    """Host memory is needed until the tile is waited for, device memory from the upload on; what the turn fetches isn't
    given up."""
    forward = "fetch a, upload a, wait a, fetch a*, release a, fetch b, upload b, wait b, release b!"
    found = plan(forward, "fetch a, upload a, wait a, release a, fetch b!, upload b!, wait b, release b", separate=True)
    assert tiles(found) == {"a": [[(0, 2)], [(3, 11)]], "b": [[(5, 7)], [(13, 15)]]}
    assert tiles(found, device=True) == {"a": [[(1, 12)]], "b": [[(6, 16)]]}
    assert not device_buffers(plan(forward, "release a"))


@pytest.mark.parametrize(("gradient_buffer", "stops"), [(8, [5, 7, 7]), (12, [7, 7, 7]), (4, [4, 5, 7])])
def test_gradients_on_their_way_leave_when_their_room_is_needed(gradient_buffer: int, stops: list[int]) -> None:
    found = replace(plan("fetch a, wait a, release a", "offload a, offload b, offload c"), gradient_buffer=4096)
    found = replace(found, gradient_buffer=gradient_buffer * KIB)
    assert [b.spans[0].stop for b in host_buffers(found) if b.what == "write"] == stops


def test_profile() -> None:
    found = plan("fetch a, fetch b, release a, release b!", "fetch b!, release b, fetch a, release a!")
    assert profile(host_buffers(found), Clock(found).end) == [n * 4 * KIB for n in (1, 2, 1, 1, 1, 0, 1, 1, 1, 1)]


def test_what_lives_in_host_memory_has_no_buffer() -> None:
    found = plan("fetch a, release a", "fetch a, release a, offload a")
    graphs = tuple(
        replace(g, tiles=tuple(tile(n, tier="host", gradient_tier="host") for n in range(3))) for g in found.graphs
    )
    assert host_buffers(replace(found, graphs=graphs)) == []
