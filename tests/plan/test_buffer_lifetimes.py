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
    """Parse `fetch a*, wait-release a!`: `*` for what forward starts for backward, `!` where the tile is resident."""
    parsed = []
    for word in text.split(", "):
        kind, name = word.split()
        for meaning in MEANS.get(kind, (kind,)):
            resident = "!" in name and meaning != "wait"
            parsed.append(Event(meaning, "abcdef".index(name[0]), 0, for_backward="*" in name, resident=resident))
    return tuple(parsed)


def plan(forward: str, backward: str, separate: bool = False, **options: object) -> Plan:
    graphs = tuple(
        GraphSchedule(kind, tuple(tile(n) for n in range(3)), (), events(text), separate)
        for kind, text in (("forward", forward), ("backward", backward))
    )
    return Plan(graphs, Config(placement="nvme", **options), gradient_buffer=8 * KIB)


def named(planned: Plan, time: int) -> str:
    """Say what happens at a time of the clock: `F` is forward, `B` backward, `*` forward for backward."""
    for letter, graph, start in zip("FB", planned.graphs, Clock(planned).starts, strict=False):
        if 0 <= time - start < len(graph.events):
            event = graph.events[time - start]
            return f"{letter} {event.kind} {'abcdef'[event.tile]}{'*' if event.for_backward else ''}"
    return {0: "step", 1: "late in step", 2: "end"}[time - Clock(planned).step]


def tiles(planned: Plan, device: bool = False) -> dict[str, list[str]]:
    """Return the spans of each tile's buffers, in order."""
    spans: dict[str, list[str]] = {}
    for buffer in device_buffers(planned) if device else host_buffers(planned):
        if buffer.what == "tile":
            always = buffer.spans == (Clock(planned).always,)
            text = [f"{named(planned, span.start)} to {named(planned, span.stop)}" for span in buffer.spans]
            spans.setdefault(buffer.label, []).append("always" if always else ", ".join(text))
    return {label: sorted(of) for label, of in sorted(spans.items())}


def takers(planned: Plan) -> dict[str, list[str]]:
    starts = Clock(planned).starts
    return {b.label: [named(planned, starts[at.graph] + at.number) for at in b.takers] for b in host_buffers(planned)}


def test_from_fetch_to_release() -> None:
    planned = plan("fetch a, wait-release a, fetch b, wait-release b", "fetch b, wait-release b")
    assert tiles(planned) == {
        "a": ["F fetch a to F release a"],
        "b": ["B fetch b to B release b", "F fetch b to F release b"],
    }
    assert Clock(planned).starts == [0, 10, 15] and Clock(planned).end == 17


def test_forward_holds_what_it_fetches_for_backward() -> None:
    planned = plan("fetch a, fetch a*, wait-release a, fetch b*", "fetch a, fetch b, wait-release a, wait-release b")
    assert tiles(planned) == {"a": ["F fetch a to B release a"], "b": ["F fetch b* to B release b"]}
    assert takers(planned) == {"a": ["F fetch a", "F fetch a*", "B fetch a"], "b": ["F fetch b*", "B fetch b"]}


def test_what_was_fetched_for_backward_is_there_when_forward_fetches_it_for_itself() -> None:
    planned = plan("fetch a*, fetch a, wait-release a", "fetch a, wait-release a")
    assert tiles(planned) == {"a": ["F fetch a* to B release a"]}


def test_what_stays() -> None:
    """`a` from forward to backward, `b` over the end of the step, `c` always."""
    planned = plan(
        "fetch a, wait-release a!, fetch b!, wait-release b, fetch c!, wait-release c!",
        "fetch a!, wait-release a, fetch b, wait-release b!, fetch c!, wait-release c!",
    )
    across = "F fetch a to F release b, B fetch b to end"
    assert tiles(planned) == {"a": ["F fetch a to B release a"], "b": [across], "c": ["always"]}
    both = {label: ["B fetch " + label, "F fetch " + label] for label in "abc"}
    assert {label: sorted(events) for label, events in takers(planned).items()} == both


def test_a_device_with_memory_of_its_own() -> None:
    """Host memory is needed until the tile is waited for, device memory from the upload on; what is fetched for
    backward isn't given up."""
    forward = "fetch-only a, upload a, wait a, fetch-only a*, release a, fetch b, wait-release b!"
    planned = plan(forward, "fetch a, wait-release a, fetch b!, wait-release b", separate=True)
    assert tiles(planned) == {
        "a": ["F fetch a to F wait a", "F fetch a* to B wait a"],
        "b": ["B fetch b to B wait b", "F fetch b to F wait b"],
    }
    assert tiles(planned, device=True) == {"a": ["F upload a to B release a"], "b": ["F upload b to B release b"]}
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
    planned = plan("fetch a, wait-release a", "offload a, offload b, offload c")
    planned = replace(planned, gradient_buffer=gradient_buffer * KIB)
    expected = [tuple(f"B {event}" if event != "late" else "late in step" for event in span) for span in spans]
    writes = [b.spans[0] for b in host_buffers(planned) if b.what == "write"]
    assert [(named(planned, span.start), named(planned, span.stop)) for span in writes] == expected


def test_profile() -> None:
    planned = plan(
        "fetch a, fetch b, wait-release a, wait-release b!", "fetch b!, wait-release b, fetch a, wait-release a!"
    )
    blocks = [nbytes // (4 * KIB) for nbytes in profile(host_buffers(planned), Clock(planned).end)]
    assert blocks == [1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]


def test_what_lives_in_host_memory_has_no_buffer() -> None:
    planned = plan("fetch a, wait-release a", "fetch a, wait-release a, offload a")
    graphs = tuple(
        replace(g, tiles=tuple(tile(n, tier="host", gradient_tier="host") for n in range(3))) for g in planned.graphs
    )
    assert host_buffers(replace(planned, graphs=graphs)) == []
