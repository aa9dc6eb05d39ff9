"""Recordings: what is in them is what the plan says and what the counters count, and recording changes nothing."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gate import slow
from injecting import Fault, clear_faults, inject
from ranks.launching import on_ranks
from torch import nn

import zinf_fx
from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.observe.recording import Recording, Step
from zinf_fx.plan.hardware import load
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.plan.simulation.timeline import LANES, TimelineSlice, slices
from zinf_fx.runtime import recorder
from zinf_fx.runtime.execute.executor import EXECUTOR
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.recorder import RECORDER, Log, Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=1, hidden=64, heads=2, context=16, vocabulary=64)
PLACEMENTS = {
    "gradients in host memory": {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"},
    "activations leave": {"parameters": "nvme", "gradients": "nvme", "optimizer": "host", "activations": "nvme"},
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(CONFIG.vocabulary, (2, CONFIG.context), generator=torch.Generator().manual_seed(0))
    return tokens, tokens.roll(-1, 1)


class Training:
    """Holds a small GPT, and steps of it."""

    def __init__(self, store: Path, placement: object = "nvme", layers: int = 1, **options: object) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.stored = zinf_fx.offload(GPT(replace(CONFIG, layers=layers)), store=store, placement=placement, **options)
        self.model = torch.compile(self.stored, backend="zinf")
        self.optimizer = zinf_fx.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, micro_batches: int = 1) -> float:
        for _ in range(micro_batches):
            loss = self.model(*batch())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def recorded(self, steps: int, step: Callable[[], object] | None = None) -> Recording:
        with zinf_fx.record(self.model) as recording:
            for _ in range(steps):
                (step or self.step)()
        return recording

    def recorded_in_turn(self, steps: int) -> Recording:
        """Record steps that end before the next begins: from one in the background, the next forward takes what is on
        its way to the store, and reads less."""

        def step() -> None:
            self.step()
            for parameter in self.stored.parameters():
                parameter.stored.settled()  # what was begun for the next step is over

        self.optimizer.finish()
        self.optimizer.overlap = False
        recording = self.recorded(steps, step)
        self.optimizer.overlap = True
        return recording

    def unrecorded(self, steps: int, step: Callable[[], object]) -> None:
        for _ in range(steps):
            step()

    @property
    def ranks(self) -> Ranks:
        return next(self.stored.parameters()).stored.shard.ranks

    def moved(self) -> tuple[int, int, int]:
        """Return bytes read, written, and sent to other ranks so far, once nothing is under way."""
        self.optimizer.finish()
        store = next(self.stored.parameters()).stored.tiers.store
        before = None
        while before != (before := store.counters()):  # a step starts reads for the next
            time.sleep(0.03)
        return before.bytes_read, before.bytes_written, self.ranks.sent_bytes


def planned_slices(plan: Plan, ranks: int) -> list[TimelineSlice]:
    hardware = load("rtx-4090").with_ranks(ranks)
    return slices(plan, simulate_plan(plan, hardware))


def names(spans: list[TimelineSlice] | tuple[TimelineSlice, ...], *lanes: str) -> Counter[str]:
    return Counter(span.name for span in spans if span.lane in lanes)


def kinds(spans: list[TimelineSlice] | tuple[TimelineSlice, ...], lane: str) -> set[str]:
    return {name.partition(" ")[0] for name in names(spans, lane)}


def nbytes(step: Step, *kinds: str, detail: str | None = None) -> int:
    wanted = [span for span in step.slices if span.name.partition(" ")[0] in kinds]
    return sum(span.nbytes for span in wanted if detail in (None, span.detail))


def assert_operators_are_in_order(step: Step, plan: Plan) -> None:
    computed = [span for span in step.slices if span.lane == "compute"]
    expected = [
        (f"{graph.kind} {operator.index}", operator.label) for graph in plan.graphs for operator in graph.operators
    ]
    assert [(span.name, span.detail) for span in computed] == expected
    assert all(span.start <= span.end <= other.start for span, other in pairwise(computed))


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Train with everything on NVMe, in several packs, for some steps. Tests that share it come first in this file."""
    training = Training(tmp_path_factory.mktemp("store"), pack="64KiB")
    for _ in range(3):
        training.step()
    return training


def test_a_steady_step_is_the_planned_one(steady: Training):
    assert_as_planned(steady)


def test_the_trace_has_both_side_by_side(steady: Training, tmp_path: Path):
    recording = steady.recorded(2)
    path = recording.save(tmp_path / "trace.json")
    assert path == tmp_path / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert processes == {"planned, on RTX 4090 desktop": 1, "measured": 2}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in (e for e in events if e["ph"] == "X"):
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for track in tracks.values():
        assert all(interval[1] <= other[0] + 1e-6 for interval, other in pairwise(sorted(track)))
    for pid in (1, 2):
        lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]
        assert list(dict.fromkeys(lanes)) == ["step", "compute", "wait", *LANES[1:]]
        held = [e["args"] for e in events if e["ph"] == "C" and e["pid"] == pid and e["name"] == "host memory"]
        assert max(counter["bytes"] for counter in held) > 0
    steps = [[e for e in events if e.get("cat") == "step" and e["pid"] == pid] for pid in (1, 2)]
    assert [e["name"] for e in steps[1]] == ["step 0", "step 1"]
    assert steps[0][0]["ts"] == steps[1][0]["ts"]
    with pytest.raises(ConfigError, match="can't be written"):
        recording.save(tmp_path / "missing" / "trace.json")


def test_the_table_compares_lanes(steady: Training):
    recording = steady.recorded_in_turn(2)
    lines = str(recording).splitlines()
    assert lines[0].startswith("2 step(s) of 0.") and "planned for RTX 4090 desktop: 0." in lines[0]
    rows = {line.split("  ")[0]: line.split()[1:] for line in lines[3:-1]}
    assert set(rows) == {"compute", "wait", "upload", "fetch", "offload", "optimizer", "none of these"}
    assert rows["fetch"][2:4] == rows["fetch"][4:6]
    seconds, longest = float(lines[0].split()[3]), max(step.busy("compute") for step in recording.steps)
    assert float(rows["fetch"][1]) <= seconds and 0 < float(rows["compute"][1]) <= longest + 1e-6
    assert lines[-1].startswith("waited longest for ")
    assert "nothing was recorded" in str(steady.recorded(0))
    twice = copy(recording)  # as if two graphs had such a plan
    twice.plans, twice._began = 2 * recording.plans, 2 * recording._began
    del twice._planned
    rows_of_two = {line.split("  ")[0]: line.split()[1:] for line in str(twice).splitlines()[3:-1]}
    assert float(rows_of_two["fetch"][0]) == pytest.approx(2 * float(rows["fetch"][0]), abs=2e-6)


def test_without_a_recording_nothing_is_noted(steady: Training):
    tracemalloc.start()
    try:
        steady.step()  # what Python keeps to use again, such as the memory of floats, is there from now on
        before = tracemalloc.take_snapshot()
        steady.step()
        steady.optimizer.finish()
        entries = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    assert [entry for entry in entries if entry.traceback[0].filename == recorder.__file__ and entry.size_diff] == []


def test_what_a_block_raises_ends_the_recording(steady: Training):
    with pytest.raises(KeyError), zinf_fx.record(steady.model) as recording:
        steady.step()
        raise KeyError
    assert len(recording.steps) == 1 and RECORDER.log is None


def test_micro_batches_are_one_step_that_reads_gradients_again(steady: Training):
    steady.step(2)
    (step, _) = steady.recorded(2, lambda: steady.step(2)).steps
    graphs = [span.name.split()[0] for span in step.slices if span.lane == "compute"]
    assert list(dict.fromkeys(pairwise(graphs))) == [
        ("forward", "forward"),
        ("forward", "backward"),
        ("backward", "backward"),
        ("backward", "forward"),
    ]
    read = [span for span in step.slices if span.name.startswith("read ")]
    gradients = {span.name.removeprefix("offload ") for span in step.slices if span.name.startswith("offload ")}
    assert read and {span.name.removeprefix("read ") for span in read} == gradients
    assert {span.lane for span in read} == {"offload"}


def test_calls_for_inference_are_steps(steady: Training):
    def infer() -> None:
        with torch.no_grad():
            steady.model(*batch())

    infer()
    recording = steady.recorded(3, infer)
    assert len(recording.steps) == 3
    for step in recording.steps:
        assert_operators_are_in_order(step, recording.plans[0])


def test_what_eager_code_reads_is_noted_without_a_plan(steady: Training):
    with zinf_fx.record(steady.stored) as recording:
        next(steady.stored.parameters()).full_tensor()
    (step,) = recording.steps
    assert recording.plans == () and names(step.slices, "compute") == Counter()
    assert [span.name for span in step.slices] == ["fetch"] and step.nbytes("fetch") > 0


def record_steady_steps(rank: int, folder: Path, placements: Sequence[object]) -> None:
    for placement in placements:
        training = Training(folder, placement)
        for _ in range(3):
            training.step()
        assert_as_planned(training)


@pytest.mark.parametrize(
    ("ranks", "placements"),
    [*((1, [placement]) for placement in PLACEMENTS.values()), (2, ["infinity-nvme"]), slow(2, ["zero-2"])],
    ids=[*PLACEMENTS, "two ranks", "two ranks that divide states alone"],
)
def test_a_steady_step_is_the_planned_one_wherever_states_live(
    tmp_path: Path, ranks: int, placements: Sequence[object]
):
    on_ranks(ranks, record_steady_steps, tmp_path, placements)


def assert_as_planned(training: Training) -> None:
    before = training.moved()
    recording = training.recorded_in_turn(3)
    read, written, sent = (after - earlier for after, earlier in zip(training.moved(), before, strict=True))
    (plan,) = recording.plans
    ranks = training.ranks
    expected = planned_slices(plan, ranks.size)
    leaves = any(tile.activation for graph in plan.graphs for tile in graph.tiles)
    assert leaves == (plan.config.placement.activations != "device")
    for step in recording.steps:
        assert_operators_are_in_order(step, plan)
        for lane in ("fetch", "offload", "all-gather", "reduce"):
            assert names(step.slices, lane) == names(expected, lane)
        for lane in ("fetch", "offload"):
            assert step.nbytes(lane) == sum(span.nbytes for span in expected if span.lane == lane)
        assert kinds(step.slices, "optimizer") == kinds(expected, "optimizer")
        for kind in ("read_states", "update", "write_states"):
            planned = sum(span.nbytes for span in expected if span.name.partition(" ")[0] == kind)
            pads = ranks.size > 1 and kind == "update"  # a plan counts the padding of a rank's part, too
            assert nbytes(step, kind) == planned or (pads and 0 < nbytes(step, kind) < planned)
        waits = names(step.slices, "wait")
        tiles = Counter(g.tiles[e.tile].label for g in plan.graphs for e in g.events if e.kind == "wait")
        waited = Counter({name: waits[f"wait {name}"] for name in tiles})
        # On several ranks, reductions are waited for by these names, too.
        assert waited == tiles or (ranks.size > 1 and waited > tiles)
    assert len(recording.steps) == 3
    assert read == sum(nbytes(s, "fetch", "read") + nbytes(s, "read_states") for s in recording.steps)
    assert written == sum(nbytes(s, "write") + nbytes(s, "write_states") for s in recording.steps)
    collectives = [span for s in recording.steps for span in s.slices if span.lane in ("all-gather", "reduce")]
    assert {span.lane for span in collectives} == (set() if ranks.size == 1 else {"all-gather", "reduce"})
    assert not any("not over" in span.detail or span.end <= span.start for span in collectives)
    assert sent == sum(span.nbytes for span in collectives) / 2  # of two ranks, each sends the other one's half
    if ranks.size > 1:
        assert_saved_as_a_ranks(recording, ranks)


def assert_saved_as_a_ranks(recording: Recording, ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = recording.save(Path(folder) / "trace.json")
        events = json.loads(path.read_text())["traceEvents"]
    assert path.name == f"trace.rank{ranks.rank}.json"
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [
        f"planned, on {ranks.size} x RTX 4090 desktop", f"measured, rank {ranks.rank} of {ranks.size}",
    ]  # fmt: skip


def test_recording_changes_no_bit(tmp_path: Path):
    losses: list[list[float]] = []
    values: list[list[torch.Tensor]] = []
    for steps_of in (Training.unrecorded, Training.recorded):
        training, step_losses = Training(tmp_path), []
        steps_of(training, 4, lambda training=training, step_losses=step_losses: step_losses.append(training.step()))
        losses.append(step_losses)
        with zinf_fx.gathered(training.stored) as gathered:
            values.append([value.clone() for value in gathered])
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *values))


def test_the_optimizer_goes_on_in_the_next_steps_time_and_belongs_to_its_own(tmp_path: Path):
    training = Training(tmp_path, layers=3, chunk="64KiB", pack="64KiB")
    for _ in range(3):
        training.step()
    store = next(training.stored.parameters()).stored.tiers.store

    def step() -> None:
        clear_faults(store)
        loss = training.model(*batch())
        loss.backward()
        training.optimizer.finish()
        inject(store, Fault("completion", operation="read", count=1 << 20, delay=0.01))  # what comes next takes time
        training.optimizer.step()
        training.optimizer.zero_grad()

    _, first, second, _ = training.recorded(4, step).steps  # the first has some of the step before in it
    updates = [span for span in first.slices if span.name == "update"]
    assert len(updates) > 2
    assert any(span.start > second.start for span in updates)
    assert first.nbytes("optimizer") == second.nbytes("optimizer") > 0
    computed = [span for span in second.slices if span.name == "forward 0"]
    assert first.end == second.start <= computed[0].start


def test_an_error_in_a_step_ends_what_had_begun(tmp_path: Path):
    training = Training(tmp_path, prefetch=None, pack=None)
    training.step()
    training.optimizer.finish()
    store = next(training.stored.parameters()).stored.tiers.store
    with zinf_fx.record(training.model) as recording:
        EXECUTOR.reset()
        inject(store, Fault("completion", operation="read", nth=6, errno=61))
        with pytest.raises(StoreError):
            training.model(*batch())
        clear_faults(store)
        training.optimizer.zero_grad()
        training.step()
    broken, whole = recording.steps
    (plan,) = recording.plans
    count = len(plan.graph("forward").operators)
    assert 0 < len(names(broken.slices, "compute")) < count
    assert not any("not over" in span.detail for span in broken.slices)
    assert_operators_are_in_order(whole, plan)
    assert RECORDER.log is None and recorder._about.get() is None


def test_there_is_one_recording_at_a_time(tmp_path: Path):
    model = nn.Linear(2, 2)
    with zinf_fx.record(model) as recording:
        with pytest.raises(ConfigError, match="under way"), zinf_fx.record(model):
            pass
        assert RECORDER.log is not None
    assert recording.steps == ()
    with pytest.raises(ConfigError, match="unknown"), zinf_fx.record(model, hardware="abacus"):
        pass
    with pytest.raises(ConfigError, match="no parameter is stored"), zinf_fx.record(model, hardware="this-machine"):
        pass
    with pytest.raises(ConfigError, match="takes a model"), zinf_fx.record(recording):  # type: ignore[arg-type]
        pass
    assert RECORDER.log is None


def test_this_machine_is_measured_with_all_directories_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    stores = tmp_path / "a", tmp_path / "b"
    for store in stores:
        store.mkdir()
    measured: list[Path] = []
    monkeypatch.setattr(
        "zinf_fx.observe.recording.measure_machine", lambda *arguments: measured.extend(arguments) or load("rtx-4090")
    )
    with zinf_fx.record(zinf_fx.offload(nn.Linear(2, 2), store=stores, placement="nvme"), hardware="this-machine"):
        pass
    assert measured == [*stores]


class EndingRecorder(Recorder):
    """Another thread ends the recording as soon as somebody has looked whether there is one."""

    @property
    def log(self) -> Log | None:
        current, self._log = self._log, None
        return current

    @log.setter
    def log(self, log: Log | None) -> None:
        self._log = log


@pytest.mark.parametrize(
    "notes",
    [
        lambda recorder: recorder.step_ends(),
        lambda recorder: recorder.end(recorder.begin("operator", 0, torch.device("cpu"))),
        lambda recorder: recorder.waited(0.0),
        lambda recorder: recorder.stored("fetch", 0, ()),
        lambda recorder: recorder.holds("host", 0),
    ],
    ids=["step_ends", "begin", "waited", "stored", "holds"],
)
def test_a_recording_may_end_while_something_is_noted(notes: Callable[[Recorder], object]):
    recorder = EndingRecorder()
    recorder.log = Log(0.0, 1)
    notes(recorder)
    assert recorder.log is None


def test_a_recording_keeps_neither_model_nor_buffers(tmp_path: Path):
    training = Training(tmp_path)
    recording = training.recorded(2)
    model = weakref.ref(training.stored)
    tiers = weakref.ref(next(training.stored.parameters()).stored.tiers)
    EXECUTOR.reset()
    torch._dynamo.reset()
    del training
    gc.collect()
    assert model() is None and tiers() is None
    assert len(recording.steps) == 2
