"""Plans as Chrome traces, Graphviz graphs and HTML pages: what is in them, and that a browser shows it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import zinf_fx
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.show.chrome import TraceProcess, planned_process, to_chrome
from zinf_fx.plan.show.dot import to_dot
from zinf_fx.plan.show.html import to_html
from zinf_fx.plan.simulation.simulate import Simulation, simulate_plan
from zinf_fx.plan.simulation.timeline import LANES, TimelineSlice, memory_curves, slices, waits

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt import small

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@cache
def made() -> tuple[Plan, Simulation, Hardware]:
    with torch.device("meta"):
        model, inputs = small()
    options = {"placement": "nvme", "device_memory": "19MiB", "host_memory": "8MiB", "chunk": "64KiB"}
    plan = zinf_fx.export_plan(model, inputs, **options)
    hardware = load("rtx-4090")
    return plan, simulate_plan(plan, hardware), hardware


def test_each_event_that_takes_time_is_in_its_lane():
    plan, simulation, _ = made()
    drawn = slices(plan, simulation)
    assert {span.lane for span in drawn} == set(LANES) - {"all-gather", "reduce"}  # one rank
    count = {lane: sum(span.lane == lane for span in drawn) for lane in LANES}
    assert count["compute"] == sum(len(graph.operators) for graph in plan.graphs)
    forward, backward = plan.graphs
    uploads = [e for graph in plan.graphs for e in graph.events if e.kind == "upload" and not e.resident]
    for_backward = {forward.tiles[e.tile].label for e in forward.events if e.kind == "upload" and e.for_backward}
    again = [
        e
        for e in backward.events
        if e.kind == "upload" and e.operator == -1 and backward.tiles[e.tile].label in for_backward
    ]
    assert count["upload"] == len(uploads) - len([e for e in again if not e.resident])
    assert max(span.end for span in drawn) == simulation.seconds
    assert [span.start for span in drawn] == sorted(span.start for span in drawn)
    embedding = next(span for span in drawn if span.name == "forward 0")
    assert embedding.detail == "embedding"


def test_memory_curves_are_the_plans():
    plan, simulation, _ = made()
    device, host = memory_curves(plan, simulation)
    assert (device.budget, host.budget) == (19 << 20, 8 << 20)
    expected = [plan.kept + flow.device for graph in plan.graphs for flow in flows(plan, graph)]
    assert list(device.nbytes) == expected
    assert list(device.times) == sorted(device.times) and device.times[-1] <= simulation.seconds
    assert 0 < max(host.nbytes) <= host.budget


def test_the_chrome_trace_has_every_lane_and_both_memories():
    plan, simulation, hardware = made()
    events = json.loads(to_chrome(planned_process(plan, simulation, hardware)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(dict.fromkeys(names.values())) == ["step", "compute", "wait", *LANES[1:]]
    twice = [name for name in names.values() if list(names.values()).count(name) > 1]
    assert set(twice) == {"offload", "optimizer"}  # to memory beside to disk, and arithmetic beside states
    durations = [e for e in events if e["ph"] == "X" and e["cat"] not in ("step", "wait")]
    assert len(durations) == len(simulation.jobs)
    assert max(e["ts"] + e["dur"] for e in durations) == pytest.approx(simulation.seconds * 1e6)
    assert_tracks_hold_one_slice_at_a_time(events)
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"device memory", "host memory"}
    assert {e["args"]["budget"] for e in counters} == {19 << 20, 8 << 20}


def assert_tracks_hold_one_slice_at_a_time(events: list[dict]) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for track in tracks.values():
        assert all(span[1] <= other[0] + 1e-6 for span, other in pairwise(sorted(track)))


def test_what_compute_waits_for_is_between_its_jobs():
    _, simulation, _ = made()
    waited = waits(simulation)
    assert sum(wait.end - wait.start for wait in waited) == pytest.approx(sum(s.seconds for s in simulation.stalls()))
    computing = [
        (t.start, t.end)
        for job, t in zip(simulation.jobs, simulation.timings, strict=True)
        if job.resource == "compute" and job.seconds
    ]
    assert waited
    for wait in waited:
        assert all(end <= wait.start + 1e-12 or start >= wait.end - 1e-12 for start, end in computing), wait
    names = {wait.name for wait in waited}
    assert "wait tokens.weight" in names and all(name.startswith("wait ") for name in names)
    assert "wait states" in names and not any(name.removeprefix("wait ").isdecimal() for name in names)


def test_processes_stand_side_by_side_and_overlapping_slices_in_tracks_of_their_own():
    a, b, c = (
        TimelineSlice("fetch", f"fetch {name}", start, end, 10, "")
        for name, start, end in (("a", 0.0, 2.0), ("b", 1.0, 3.0), ("c", 2.0, 3.0))
    )
    events = json.loads(to_chrome(TraceProcess("first", [a]), TraceProcess("second", [c, a, b], start=0.5)))
    events = events["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {1: "first", 2: "second"}
    times = {e["name"]: (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X" and e["pid"] == 2}
    assert [times[f"fetch {name}"][:2] for name in "abc"] == [(0.5e6, 2e6), (1.5e6, 2e6), (2.5e6, 1e6)]
    assert times["fetch a"][2] == times["fetch c"][2] != times["fetch b"][2]
    tracks = [e for e in events if e["name"] == "thread_name" and e["pid"] == 2 and e["args"]["name"] == "fetch"]
    assert {e["tid"] for e in tracks} == {times["fetch a"][2], times["fetch b"][2]}
    assert_tracks_hold_one_slice_at_a_time(events)


def test_dot_has_the_operators_of_a_range_and_their_tiles():
    plan, _, _ = made()
    text = to_dot(plan, range(1, 3))
    assert set(re.findall(r"forward_\w+", text)) == {"forward_1", "forward_2"}
    assert "forward_1 -> forward_2 [style=dashed" in text or "forward_1 -> forward_2 [weight" in text
    whole = to_dot(plan)
    for graph in plan.graphs:
        assert len(re.findall(rf"{graph.kind}_\d+ \[label", whole)) == len(graph.operators)
    assert whole.count("{") == whole.count("}") and "style=dotted" in whole
    if dot := shutil.which("dot"):
        subprocess.run([dot, "-Tsvg", "-o", "/dev/null"], input=whole, text=True, check=True)


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_is_self_contained_and_holds_the_timeline():
    plan, simulation, hardware = made()
    page = to_html(plan, simulation, hardware, "small")
    assert not re.search(
        r"""(src|href)\s*=|@import|url\(|fetch\(|XMLHttp|https?://""", page.replace("<!doctype html>", "")
    )
    data = data_of(page)
    assert len(data["slices"]) == len(simulation.jobs) and data["seconds"] == simulation.seconds
    assert [curve["budget"] for curve in data["memory"]] == [19 << 20, 8 << 20]
    assert "RTX 4090 desktop, simulated" in data["summary"]
    in_rows: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in data["slices"]:
        in_rows.setdefault((LANES[span["lane"]], span["row"]), []).append((span["start"], span["end"]))
    assert {lane for lane, row in in_rows if row} == {"offload", "optimizer"}  # as in the trace
    assert all(span[1] <= other[0] for row in in_rows.values() for span, other in pairwise(sorted(row)))


def test_names_cannot_leave_the_data():
    plan, simulation, hardware = made()
    evil = "</script><img src=x onerror=alert(1)>"
    forward = plan.graphs[0]
    operators = (dataclasses.replace(forward.operators[0], label=evil), *forward.operators[1:])
    named = dataclasses.replace(plan, graphs=(dataclasses.replace(forward, operators=operators), plan.graphs[1]))
    page = to_html(named, simulation, hardware, evil)
    assert "<img" not in page
    assert evil in [span["detail"] for span in data_of(page)["slices"]]


BROWSED = """
const report = { title: document.title, range: document.getElementById("range").textContent };
const first = plan.slices.findIndex((s) => plan.lanes[s.lane] === "compute");
const chosen = plan.slices[first];
const centre = () => x((chosen.start + chosen.end) / 2);
const rowOf = lanes[chosen.lane].top + lanes[chosen.lane].height / 2;
show(Math.max(chosen.start - (chosen.end - chosen.start), 0), (chosen.end - chosen.start) * 4);
report.tip = hit(centre(), rowOf).text;
const at = [centre(), TOP + 4].map((place) => Math.round(place * devicePixelRatio));
report.pixel = [...pen.getImageData(...at, 1, 1).data];
const second = plan.slices.find((s) => s.row === 1), inLane = lanes[second.lane];
show(second.start, second.end - second.start);
const inRow = inLane.top + inLane.height * 1.5 / inLane.rows;
report.below = [second.name, hit(x((second.start + second.end) / 2), inRow).text];
const above = hit(x((second.start + second.end) / 2), inLane.top + 2);
report.above = above && above.slice.row;
const inSecond = [x((second.start + second.end) / 2), inRow - 4].map((place) => Math.round(place * devicePixelRatio));
report.painted = [...pen.getImageData(...inSecond, 1, 1).data];
show(Math.max(chosen.start - (chosen.end - chosen.start), 0), (chosen.end - chosen.start) * 4);
const box = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + centre(), clientY: box.top + rowOf }));
report.shown = getComputedStyle(tip).display;
const before = view.end - view.start;
const wheel = { deltaY: 200, clientX: box.left + 300, clientY: box.top + 40, cancelable: true };
canvas.dispatchEvent(new WheelEvent("wheel", wheel));
report.zoomed = (view.end - view.start) / before;
const key = (given) => new KeyboardEvent("keydown", { cancelable: true, ...given });
const taken = (given) => !document.dispatchEvent(key(given));
report.left = [{ key: "-", ctrlKey: true }, { key: "ArrowLeft", altKey: true }, { key: "+", metaKey: true }].map(taken);
report.taken = taken({ key: "0" });
report.whole = [view.start, view.end];
report.memory = hit(x(plan.memory[0].times[3]) + 1, curveTop(0) + 20).text;
const started = performance.now();
for (let n = 0; n < 20; n++) show(plan.seconds * n / 40, plan.seconds / 2);
report.milliseconds = (performance.now() - started) / 20;
document.body.textContent = "REPORT" + JSON.stringify(report) + "END";
"""


def browsed(page: str, folder: Path) -> dict:
    """Return what the page's own script answers in a browser."""
    (folder / "page.html").write_text(page.replace("draw();\n</script>", f"draw();\n{BROWSED}</script>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    command += ["--window-size=1200,800", "--virtual-time-budget=10000", "--dump-dom", f"file://{folder}/page.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(re.search(r"REPORT(.*)END", result.stdout)[1])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_a_browser_shows_the_page(tmp_path: Path):
    plan, simulation, hardware = made()
    report = browsed(to_html(plan, simulation, hardware, "small"), tmp_path)
    assert report["title"] == "small"
    assert report["range"].startswith("0 s to ")
    assert report["tip"].startswith("forward 0\nembedding\n")
    assert report["pixel"] == [0x3B, 0x7D, 0xD8, 255]  # the slice is painted where it is found
    name, tip = report["below"]
    assert tip.startswith(f"{name}\n")  # in the second row of its lane
    assert report["above"] in (0, None)
    assert report["painted"] in ([0xA6, 0x7C, 0x52, 255], [0x6B, 0x7F, 0x3A, 255])  # of an offload, or the optimizer's
    assert report["shown"] == "block"
    assert report["zoomed"] == pytest.approx(1.4918, rel=1e-3)  # exp(0.4): out
    assert report["left"] == [False] * 3 and report["taken"]  # the browser keeps its own zoom and history
    assert report["whole"] == [0, simulation.seconds]
    assert report["memory"].startswith("device memory at ") and report["memory"].endswith("budget 19.0 MiB")
