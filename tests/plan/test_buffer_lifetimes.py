"""From which event to which a buffer is needed: until a release, from forward to backward, over the end of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zinf_fx import Config
from zinf_fx.plan.memory.buffers import Clock, device_buffers, host_buffers, profile
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Event, GraphSchedule, Tile

KIB = 1024
# What a word stands for in the texts below, where it is not one event alone.
MEANS = {
    "fetch": ("fetch", "upload", "allgather"),
    "fetch-only": ("fetch",),
    "upload": ("upload", "allgather"),
    "wait-release": ("wait", "release"),
    "offload": ("reduce_scatter", "offload"),
}


def tile(index: int, rows: int = 4, tier: str = "nvme", gradient_tier: str | None = "nvme") -> Tile:
    states = None if gradient_tier is None else "nvme"
    return Tile("abcdef"[index], (rows, 256), torch.float32, tier, gradient_tier, state_tier=states)


def events(text: str) -> tuple[Event, ...]:
    """`fetch a*, wait-release a!`: `*` for what forward starts for backward, `!` where the tile is resident."""
    found = []
    for word in text.split(", "):
        kind, name = word.split()
        for one in MEANS.get(kind, (kind,)):
            resident = "!" in name and one != "wait"
            found.append(Event(one, "abcdef".index(name[0]), 0, for_backward="*" in name, resident=resident))
    return tuple(found)


def plan(forward: str, backward: str, separate: bool = False, **options: object) -> Plan:
    graphs = tuple(
        GraphSchedule(kind, tuple(tile(n) for n in range(3)), (), events(text), separate)
        for kind, text in (("forward", forward), ("backward", backward))
    )
    return Plan(graphs, Config(placement="nvme", **options), gradient_buffer=8 * KIB)


def named(found: Plan, time: int) -> str:
    """What happens at a time of the clock: `F` is forward, `B` backward, `*` forward for backward."""
    for letter, graph, start in zip("FB", found.graphs, Clock(found).starts, strict=False):
        if 0 <= time - start < len(graph.events):
            event = graph.events[time - start]
            return f"{letter} {event.kind} {'abcdef'[event.tile]}{'*' if event.for_backward else ''}"
    return {0: "step", 1: "late in step", 2: "end"}[time - Clock(found).step]


def tiles(found: Plan, device: bool = False) -> dict[str, list[str]]:
    """The spans of each tile's buffers, in order."""
    spans: dict[str, list[str]] = {}
    for each in device_buffers(found) if device else host_buffers(found):
        if each.what == "tile":
            always = each.spans == (Clock(found).always,)
            text = [f"{named(found, span.start)} to {named(found, span.stop)}" for span in each.spans]
            spans.setdefault(each.label, []).append("always" if always else ", ".join(text))
    return {label: sorted(of) for label, of in sorted(spans.items())}


def takers(found: Plan) -> dict[str, list[str]]:
    starts = Clock(found).starts
    return {b.label: [named(found, starts[at.graph] + at.number) for at in b.takers] for b in host_buffers(found)}


def test_from_fetch_to_release() -> None:
    found = plan("fetch a, wait-release a, fetch b, wait-release b", "fetch b, wait-release b")
    assert tiles(found) == {
        "a": ["F fetch a to F release a"],
        "b": ["B fetch b to B release b", "F fetch b to F release b"],
    }
    assert Clock(found).starts == [0, 10, 15] and Clock(found).end == 17


def test_forward_holds_what_it_fetches_for_backward() -> None:
    found = plan("fetch a, fetch a*, wait-release a, fetch b*", "fetch a, fetch b, wait-release a, wait-release b")
    assert tiles(found) == {"a": ["F fetch a to B release a"], "b": ["F fetch b* to B release b"]}
    assert takers(found) == {"a": ["F fetch a", "F fetch a*", "B fetch a"], "b": ["F fetch b*", "B fetch b"]}


def test_what_was_fetched_for_backward_is_there_when_forward_fetches_it_for_itself() -> None:
    found = plan("fetch a*, fetch a, wait-release a", "fetch a, wait-release a")
    assert tiles(found) == {"a": ["F fetch a* to B release a"]}


def test_what_stays() -> None:
    """`a` from forward to backward, `b` over the end of the step, `c` always."""
    found = plan(
        "fetch a, wait-release a!, fetch b!, wait-release b, fetch c!, wait-release c!",
        "fetch a!, wait-release a, fetch b, wait-release b!, fetch c!, wait-release c!",
    )
    across = "F fetch a to F release b, B fetch b to end"
    assert tiles(found) == {"a": ["F fetch a to B release a"], "b": [across], "c": ["always"]}
    both = {label: ["B fetch " + label, "F fetch " + label] for label in "abc"}
    assert {label: sorted(events) for label, events in takers(found).items()} == both


def test_a_device_with_memory_of_its_own() -> None:
    """Host memory is needed until the tile is waited for, device memory from the upload on; what is fetched for
    backward isn't given up."""
    forward = "fetch-only a, upload a, wait a, fetch-only a*, release a, fetch b, wait-release b!"
    found = plan(forward, "fetch a, wait-release a, fetch b!, wait-release b", separate=True)
    assert tiles(found) == {
        "a": ["F fetch a to F wait a", "F fetch a* to B wait a"],
        "b": ["B fetch b to B wait b", "F fetch b to F wait b"],
    }
    assert tiles(found, device=True) == {"a": ["F upload a to B release a"], "b": ["F upload b to B release b"]}
    assert not device_buffers(plan("fetch a, wait-release a", "fetch a, wait-release a"))


@pytest.mark.parametrize(
    ("gradient_buffer", "spans"),
    [
        (8, [("offload a", "reduce_scatter c"), ("reduce_scatter b", "late"), ("reduce_scatter c", "late")]),
        (12, [("offload a", "late"), ("reduce_scatter b", "late"), ("reduce_scatter c", "late")]),
        (16, [("offload a", "late"), ("reduce_scatter b", "late"), ("reduce_scatter b", "late")]),
        (4, [("offload a", "offload b"), ("offload b", "offload c"), ("offload c", "late")]),
    ],
)
def test_gradients_have_their_room_from_when_one_left_until_it_is_needed(
    gradient_buffer: int, spans: list[tuple[str, str]]
) -> None:
    """Behind `offload a` comes `reduce_scatter b`; in a buffer for one, each waits for the one before, and half of one
    for four has room for two that are early."""
    found = plan("fetch a, wait-release a", "offload a, offload b, offload c")
    found = replace(found, gradient_buffer=gradient_buffer * KIB)
    expected = [tuple(f"B {one}" if one != "late" else "late in step" for one in span) for span in spans]
    writes = [b.spans[0] for b in host_buffers(found) if b.what == "write"]
    assert [(named(found, span.start), named(found, span.stop)) for span in writes] == expected


def test_profile() -> None:
    found = plan(
        "fetch a, fetch b, wait-release a, wait-release b!", "fetch b!, wait-release b, fetch a, wait-release a!"
    )
    blocks = [nbytes // (4 * KIB) for nbytes in profile(host_buffers(found), Clock(found).end)]
    assert blocks == [1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]


def test_what_lives_in_host_memory_has_no_buffer() -> None:
    found = plan("fetch a, wait-release a", "fetch a, wait-release a, offload a")
    graphs = tuple(
        replace(g, tiles=tuple(tile(n, tier="host", gradient_tier="host") for n in range(3))) for g in found.graphs
    )
    assert host_buffers(replace(found, graphs=graphs)) == []
