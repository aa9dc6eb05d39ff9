"""A plan's timeline as one self-contained page: lanes, memory curves, zoom, pan and hover. It works without network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from operator import itemgetter
from typing import Any

from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import Simulation
from zinf_fx.plan.simulation.timeline import LANES, TimelineSlice, in_rows, memory_curves, slices


def to_html(plan: Plan, simulation: Simulation, hardware: Hardware, title: str) -> str:
    """The page. Its data stand in it as JSON, and reach the document as text only."""
    data = {
        "title": title,
        "summary": summary(plan, simulation, hardware),
        "seconds": simulation.seconds,
        "lanes": LANES,
        "slices": _placed(slices(plan, simulation)),
        "memory": [asdict(curve) for curve in memory_curves(plan, simulation)],
    }
    # Nothing in the data may end the element that it stands in.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return files("zinf_fx.plan.show").joinpath("page.html").read_text(encoding="utf-8").replace("@DATA@", text)


def _placed(unplaced: Sequence[TimelineSlice]) -> list[dict[str, Any]]:
    """Slices in the order of their start, each with the numbers of its lane and of its row in it: those that are under
    way at once lie in rows of their own."""
    by_lane: dict[str, list[TimelineSlice]] = {lane: [] for lane in LANES}
    for bar in unplaced:
        by_lane[bar.lane].append(bar)
    placed: list[dict[str, Any]] = [
        asdict(bar) | {"lane": lane, "row": row}
        for lane, of_lane in enumerate(by_lane.values())
        for row, in_row in enumerate(in_rows(of_lane))
        for bar in in_row
    ]
    return sorted(placed, key=itemgetter("start"))


def summary(plan: Plan, simulation: Simulation, hardware: Hardware) -> str:
    """One line: how large the plan is, and how fast a step is on the hardware."""
    operators = " + ".join(f"{len(graph.operators):,} {graph.kind}" for graph in plan.graphs)
    seconds = simulation.seconds
    rate = f"{simulation.flops_per_second / 1e12:.3g} TFLOP/s per device" if seconds else "nothing to do"
    busy = ", ".join(f"{name} {share:.0%}" for name, share in simulation.utilisation.items() if share)
    return f"{operators} operators; a step on {hardware.name}, simulated: {seconds:.4g} s, {rate}; busy: {busy}"
