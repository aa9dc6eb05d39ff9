"""What really happened in some steps, beside what was planned: `zinf_fx.record`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path

import torch

from zinf_fx.arguments import check_model
from zinf_fx.errors import ConfigError, PlanError
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import THIS_MACHINE, Hardware
from zinf_fx.plan.intervals import covered
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.show.chrome import TraceProcess, planned_process, to_chrome
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.plan.simulation.timeline import LANE_OF, LANES_AND_WAITS, Lane, MemoryCurve, TimelineSlice
from zinf_fx.runtime.ranks import ALONE
from zinf_fx.runtime.recorder import RECORDER, Log, Note
from zinf_fx.runtime.tensor.local_parameter import stored_in
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import in_words
from zinf_fx.tables import table

# What the thread does that computes, where the CPU does: in the time of operators, and not computing.
_INSTEAD = ("wait", "upload", "offload", "update")


@dataclass(frozen=True)
class Step:
    """One step of the training loop, or one call for inference.

    Attributes:
        start, end: seconds since the recording began: from the beginning of its first graph to that of the next step's,
            or to the end of what was done last.
        slices: what was done for it, in the order of their start. An optimizer's may be done in the next step's time,
            and what is fetched in advance for that is among this one's.
    """

    start: float
    end: float
    slices: tuple[TimelineSlice, ...]

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.end - self.start

    def busy(self, lane: Lane) -> float:
        """Return the seconds in which a lane did anything."""
        return _covered(piece for piece in self.slices if piece.lane == lane)

    def nbytes(self, lane: Lane) -> int:
        """Return the bytes that a lane moved."""
        return sum(piece.nbytes for piece in self.slices if piece.lane == lane)


class Recording:
    """What `record` noted in its block; empty until it ends. `print` shows a table of lanes, planned and measured.

    Attributes:
        steps: the recorded steps, in order.
        plans: the plans that were followed, in the order in which their graphs ran first.
        memory: the bytes that the host arena and CUDA devices held when operators began and ended.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.steps: tuple[Step, ...] = ()
        self.plans: tuple[Plan, ...] = ()
        self.memory: tuple[MemoryCurve, ...] = ()
        self._hardware = hardware
        self._began: list[float] = []  # of each plan, when its first graph ran first
        self._on_host = True
        self._ranks = ALONE

    def save(self, path: Path | str) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing open: a planned step of each plan, beginning where
        its first one was measured, and everything measured.

        Of several ranks, each writes a file of its own: `trace.rank1.json` for `trace.json`. Returns its path.

        Raises: ConfigError when the file can't be written.
        """
        path = Path(path)
        name = "measured"
        if self._ranks.size > 1:
            path = path.with_suffix(f".rank{self._ranks.rank}{path.suffix}")
            name = f"measured, rank {self._ranks.rank} of {self._ranks.size}"
        steps = [TimelineSlice("step", f"step {n}", step.start, step.end, 0, "") for n, step in enumerate(self.steps)]
        measured = TraceProcess(name, [*steps, *_all(self.steps)], self.memory)
        try:
            path.write_text(to_chrome(*self._planned, measured) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the recording can't be written to {path}: {error}") from error
        return path

    @cached_property
    def _planned(self) -> list[TraceProcess]:
        """A simulated step of each plan; without slices where it can't be simulated."""
        processes = []
        for plan, start in zip(self.plans, self._began, strict=True):
            hardware = self._hardware.with_ranks(plan.world_size)
            try:
                simulation = simulate_plan(plan, hardware)
                processes.append(planned_process(plan, simulation, hardware, start))
            except (PlanError, ConfigError) as error:
                processes.append(TraceProcess(f"planned, but not simulated: {error}", ()))
        return processes

    def __str__(self) -> str:
        if not self.steps:
            return "nothing was recorded: no graph of a model compiled with backend='zinf' ran in the block\n"
        count = len(self.steps)
        # Every plan's step begins at 0 for itself, so what lanes do in one isn't at the same time as in another.
        planned = [
            Step(
                0.0, max((piece.end for piece in plan.slices if piece.lane == "step"), default=0.0), tuple(plan.slices)
            )
            for plan in self._planned
        ]
        done = Step(self.steps[0].start, self.steps[-1].end, tuple(_all(self.steps)))
        rows = []
        for lane in LANES_AND_WAITS:
            busy = self._computing if lane == "compute" else sum(step.busy(lane) for step in self.steps)
            busy_as_planned = sum(step.busy(lane) for step in planned)
            if busy or busy_as_planned:
                nbytes = sum(step.nbytes(lane) for step in planned), done.nbytes(lane) // count
                sizes = [in_words(size) if size else "" for size in nbytes]
                rows.append([lane, f"{busy_as_planned:.6f}", f"{busy / count:.6f}", *sizes])
        idle = done.seconds - _covered(done.slices, done.start)
        rows.append(["none of these", "", f"{idle / count:.6f}", "", ""])
        headers = ["lane", "planned s", "measured s", "planned bytes", "measured bytes"]
        title = f"{count} step(s) of {done.seconds / count:.6f} s; planned for {self._hardware.name}"
        seconds = sum(step.seconds for step in planned)
        return "\n".join([f"{title}: {seconds:.6f} s", table(rows, headers), *self._waited_for(), ""])

    @property
    def _computing(self) -> float:
        """Seconds of all operators, less those in which the computing thread did something else."""
        operators = [piece for piece in _all(self.steps) if piece.lane == "compute"]
        other_work = [piece for piece in _all(self.steps) if self._on_host and piece.name.partition(" ")[0] in _INSTEAD]
        return _covered([*operators, *other_work]) - _covered(other_work)

    def _waited_for(self) -> Iterator[str]:
        waited: defaultdict[str, float] = defaultdict(float)
        for piece in _all(self.steps):
            if piece.lane == "wait":
                waited[piece.name.removeprefix("wait ")] += (piece.end - piece.start) / len(self.steps)
        longest = sorted(waited.items(), key=lambda item: -item[1])[:3]
        if longest:
            yield f"waited longest for {', '.join(f'{name} ({seconds:.6f} s)' for name, seconds in longest)}"

    def _take(self, log: Log, model: torch.nn.Module) -> None:
        """Fill in what was noted. What is not over yet is cut off now."""
        if (stored := _stored_in(model)) is not None:
            self._ranks = stored.stored.shard.ranks
        now, began = time.perf_counter(), log.began
        self._on_host = log.on_host
        slices: dict[int, list[TimelineSlice]] = {run.step: [] for run in log.runs}
        for note in log.notes:
            slices.setdefault(note.step, []).append(_slice(note, began, now))
        starts = {run.step: run.began - began for run in reversed(log.runs)}
        for step in slices:
            slices[step] = _joined(slices[step])
            starts.setdefault(step, slices[step][0].start if slices[step] else 0.0)
        steps = []
        for step, following in zip_longest(sorted(slices), sorted(slices)[1:]):
            end = max((piece.end for piece in slices[step]), default=starts[step])
            steps.append(Step(starts[step], end if following is None else starts[following], tuple(slices[step])))
        self.steps = tuple(steps)
        first = {id(run.plan): run for run in reversed(log.runs)}
        runs = sorted(first.values(), key=lambda run: run.began)
        self.plans, self._began = tuple(run.plan for run in runs), [run.began - began for run in runs]
        curves = []
        for name, held in log.memory.items():
            times, nbytes = zip(*((at - began, size) for at, size in held), strict=True)
            budgets = {getattr(plan.config, f"{name}_memory") for plan in self.plans}
            budget = budgets.pop() if len(budgets) == 1 else None  # None, too, where plans have different ones
            curves.append(MemoryCurve(name, times, nbytes, times[-1], budget))
        self.memory = tuple(curves)


def _all(steps: Iterable[Step]) -> Iterator[TimelineSlice]:
    return chain.from_iterable(step.slices for step in steps)


def _slice(note: Note, began: float, now: float) -> TimelineSlice:
    start, end = note.seconds()
    detail = note.detail if end is not None else f"{note.detail} (not over when the recording ended)".lstrip()
    name = f"{note.kind} {note.subject}".rstrip()
    until = (now if end is None else end) - began
    return TimelineSlice(LANE_OF[note.kind], name, start - began, until, note.nbytes, detail)


def _described(hardware: Hardware | str, model: torch.nn.Module) -> Hardware:
    if isinstance(hardware, Hardware):
        return hardware
    if hardware != THIS_MACHINE:
        return descriptions.load(hardware)
    stored = _stored_in(model)
    if stored is None:
        raise ConfigError(
            f"hardware={THIS_MACHINE!r} measures the disk of the model's store, and no parameter is stored yet: "
            "zinf_fx.offload() the model, or run a step of it, before"
        )
    return measure_machine(*stored.stored.config.stores)


def _stored_in(model: torch.nn.Module) -> StoredTensor | None:
    parameters = getattr(model, "_orig_mod", model).parameters()
    return next((stored for parameter in parameters for stored in stored_in(parameter)), None)


def _joined(slices: Iterable[TimelineSlice]) -> list[TimelineSlice]:
    """Sort slices by their start, and join those of one name while they overlap: a tile's segments, or an optimizer's
    states, are transferred piece by piece."""
    joined: list[TimelineSlice] = []
    last: dict[tuple[str, str], int] = {}
    for piece in sorted(slices, key=lambda piece: piece.start):
        key = (piece.name, piece.detail)
        before = joined[last[key]] if key in last else None
        if before is not None and piece.start < before.end:
            nbytes, end = before.nbytes + piece.nbytes, max(before.end, piece.end)
            joined[last[key]] = replace(before, end=end, nbytes=nbytes)
        else:
            last[key] = len(joined)
            joined.append(piece)
    return joined


@contextmanager
def record(model: torch.nn.Module, hardware: Hardware | str = "rtx-4090") -> Iterator[Recording]:
    """Record what the runtime does in the block: `with zinf_fx.record(model) as recording: ...`, some training steps.

    Everything in this process is recorded, the optimizer's steps among it. Outside of such a block nothing is noted.

    Args:
        model: the model whose rank is named.
        hardware: what the plan is simulated on, to compare with: a description, its name, a TOML file, or
            "this-machine", measured now, in some seconds.

    Raises: ConfigError for hardware that is not known, and when another recording is under way.
    """
    check_model(model, "record")
    recording = Recording(_described(hardware, model))
    log = RECORDER.start()
    try:
        yield recording
    finally:
        RECORDER.stop()
        recording._take(log, model)


def _covered(slices: Iterable[TimelineSlice], begin: float = -math.inf) -> float:
    """Return the seconds from `begin` on in which any of these goes on."""
    return covered((max(piece.start, begin), piece.end) for piece in slices)
