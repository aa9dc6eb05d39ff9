"""What really happens in a step, noted where it happens while somebody records it (`zinf_fx.record`).

Kinds and subjects are those of a plan's jobs (`plan.simulation.event_graph.Job`). What moves bytes knows their
number and its times; for which tile it does, is known where the tile is asked for, and said there by `RECORDER.about`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile

import torch
import torch.distributed as dist

from zinf_fx import cuda
from zinf_fx.errors import ConfigError
from zinf_fx.native.engine import FileTicket, Span
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import GraphKind

# What else a kind of transfer is called: of a gradient that is added to; of what other ranks updated; of the optimizer.
GRADIENT = {"fetch": "read"}
REFRESH = {"allgather": "refresh"}
STATES = {"fetch": "read_states", "upload": "read_states", "write": "write_states", "offload": "write_states"}
# As those of the optimizer, in a thread of its own: the training doesn't wait when that does.
STATES_BESIDE = dict(STATES)

_HOST = torch.device("cpu")


class DeviceMoment:
    """When a CUDA device has computed what was queued so far on the current stream, in the clock of the host."""

    def __init__(self, clock: DeviceClock, stream: cuda.Stream) -> None:
        self._clock = clock
        self._event = cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds(self) -> float:
        """Waits for it."""
        self._event.synchronize()
        return self._clock.host + self._clock.event.elapsed_time(self._event) / 1e3


class DeviceClock:
    """A moment on a CUDA device that is known in the clock of the host too."""

    def __init__(self, device: torch.device) -> None:
        self.event = cuda.Event(enable_timing=True)
        self.event.record(cuda.current_stream(device))
        self.event.synchronize()
        self.host = time.perf_counter()


Moment = float | DeviceMoment


@dataclass
class Note:
    """Something that happens: from `begin` to `end`, or when `spans` say that it did, asked for at `begin`."""

    kind: str
    subject: str
    detail: str
    nbytes: int
    step: int
    begin: Moment
    device: torch.device = _HOST
    end: Moment | None = None
    spans: tuple[Span, ...] = ()

    def seconds(self) -> tuple[float, float | None]:
        """Its begin and end; None: it goes on still."""
        known = [moments for span in self.spans if (moments := span.seconds()) is not None]
        if known and len(known) == len(self.spans):
            return min(first for first, _ in known), max(last for _, last in known)
        return _seconds(self.begin), None if self.end is None else _seconds(self.end)


def _seconds(moment: Moment) -> float:
    return moment.seconds() if isinstance(moment, DeviceMoment) else moment


@dataclass(frozen=True)
class GraphRun:
    """A graph of a plan that began at a moment of the host's clock, in a step."""

    plan: Plan
    kind: GraphKind
    step: int
    began: float


@dataclass
class Log:
    """All that was noted in one recording, from `began` on. Keeps no tensor, and no buffer.

    `memory`: by its name, what a memory held at moments of the host's clock, in bytes. `on_host`: whether operators ran
    in the thread that noted them, and not on a CUDA device.
    """

    began: float
    first_step: int
    notes: list[Note] = field(default_factory=list)
    runs: list[GraphRun] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    on_host: bool = True


@dataclass(frozen=True)
class About:
    """What the transfers of a block are for: their subject, what else some kinds are called, and the step."""

    subject: str
    kinds: Mapping[str, str]
    step: int


_about: ContextVar[About | None] = ContextVar("zinf_fx_about", default=None)
_NOTHING: AbstractContextManager[None] = nullcontext()


class Recorder:
    """Notes what happens in this process while there is a `log`; else does nothing.

    A step begins with the first graph after an optimizer's step; of inference, with a graph that ran in it before.
    """

    def __init__(self) -> None:
        self.log: Log | None = None
        self._clocks: dict[torch.device, DeviceClock] = {}  # of the log
        self._step = 0  # is never used again, so that what outlives a recording is not taken for a step of the next
        self._step_is_over = False

    def start(self) -> Log:
        """Note from now on. Raises: ConfigError when another recording is under way."""
        if self.log is not None:
            raise ConfigError("a recording is under way in this process already: end it before another one begins")
        self._step += 1
        self._step_is_over = False
        self._clocks = {}
        self.log = Log(time.perf_counter(), self._step)
        return self.log

    def stop(self) -> None:
        """Note nothing from now on."""
        self.log = None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def graph_begins(self, plan: Plan, kind: GraphKind) -> None:
        """A graph of a plan begins."""
        log = self.log
        if log is None:
            return
        of_step = takewhile(lambda run: run.step == self._step, reversed(log.runs))
        again = kind == "inference" and any(run.plan is plan for run in of_step)
        if self._step_is_over or again:
            self._step += 1
            self._step_is_over = False
        log.runs.append(GraphRun(plan, kind, self._step, time.perf_counter()))

    def step_ends(self) -> None:
        """The optimizer steps, or an error ended a graph: the next graph is of another step."""
        log = self.log  # which another thread may end
        self._step_is_over = log is not None and bool(log.runs) and log.runs[-1].step == self._step

    # -- what transfers are for ----------------------------------------------------------------------------------------

    def purpose(self, subject: str | None = None, kinds: Mapping[str, str] | None = None) -> About | None:
        """What transfers are for now, as far as nothing else is given; for `within`. None when nothing is noted."""
        if self.log is None:
            return None
        now = _about.get()
        if subject is None and kinds is None:
            return now
        before, step = (now.subject, now.step) if now is not None else ("", self._step)
        return About(before if subject is None else subject, kinds or {}, step)

    def about(self, subject: str | None = None, kinds: Mapping[str, str] | None = None) -> AbstractContextManager[None]:
        """Transfers that are started in the block are for `subject`, and some kinds of them have another name."""
        return _NOTHING if self.log is None else _within(self.purpose(subject, kinds))

    def within(self, purpose: About | None) -> AbstractContextManager[None]:
        """Transfers that are started in the block are for what `purpose` told once; None: for whatever they are now."""
        return _NOTHING if self.log is None or purpose is None else _within(purpose)

    # -- what happens --------------------------------------------------------------------------------------------------

    def begin(
        self, kind: str, nbytes: int, device: torch.device, detail: str = "", subject: str | None = None
    ) -> Note | None:
        """Something begins, behind what is queued on the device; for `end`."""
        log = self.log
        if log is None:
            return None
        note = self._note(log, kind, nbytes, self._moment(device), detail, subject)
        note.device = device
        return note

    def end(self, note: Note | None) -> None:
        """What `begin` noted is over, when its device has done what is queued by now."""
        if note is not None:
            note.end = self._moment(note.device)

    def work(self, kind: str, nbytes: int, device: torch.device, detail: str = "") -> AbstractContextManager[None]:
        """The block does something, or queues it on the device."""
        return _NOTHING if self.log is None else self._working(kind, nbytes, device, detail)

    @contextmanager
    def _working(self, kind: str, nbytes: int, device: torch.device, detail: str) -> Iterator[None]:
        note = self.begin(kind, nbytes, device, detail)
        try:
            yield
        finally:
            self.end(note)

    def waited(self, since: float, subject: str | None = None, detail: str = "") -> float:
        """The training waited since a moment, until now. Returns the seconds, also when nothing is noted."""
        now, about = time.perf_counter(), _about.get()
        log = self.log
        if log is not None and (about is None or about.kinds is not STATES_BESIDE):
            self._note(log, "wait", 0, since, detail, subject).end = now
        return now - since

    def stored(self, kind: str, nbytes: int, tickets: Sequence[FileTicket]) -> None:
        """A transfer from or to the store was asked for."""
        log = self.log
        if log is not None:
            self._note(log, kind, nbytes, time.perf_counter()).spans = tuple(ticket.span() for ticket in tickets)

    def ends_with(self, note: Note | None, work: dist.Work | None) -> Note | None:
        """What `begin` noted is over when the collective `work` is; None: now. Returns the note if it is not over
        before somebody has waited for it: some works tell nobody when they are over."""
        if note is None or work is None:
            self.end(note)
            return None
        try:
            future = work.get_future()
        except RuntimeError:
            return note
        future.add_done_callback(lambda _: self.end(note))
        return None

    def holds(self, memory: str, nbytes: int) -> None:
        """What a memory holds now."""
        log = self.log
        if log is not None:
            log.memory.setdefault(memory, []).append((time.perf_counter(), nbytes))

    def _note(
        self, log: Log, kind: str, nbytes: int, begin: Moment, detail: str = "", subject: str | None = None
    ) -> Note:
        about = _about.get()
        named, step = ("", self._step) if about is None else (about.subject, about.step)
        if about is not None and kind in about.kinds:
            detail, kind = detail or kind, about.kinds[kind]
        named = named if subject is None else subject
        log.notes.append(note := Note(kind, named, detail, nbytes, max(step, log.first_step), begin))
        return note

    def _moment(self, device: torch.device) -> Moment:
        if device.type != "cuda":
            return time.perf_counter()
        if device not in self._clocks:
            self._clocks[device] = DeviceClock(device)
            log = self.log
            if log is not None:
                log.on_host = False
        return DeviceMoment(self._clocks[device], cuda.current_stream(device))


@contextmanager
def _within(purpose: About | None) -> Iterator[None]:
    token = _about.set(purpose)
    try:
        yield
    finally:
        _about.reset(token)


RECORDER = Recorder()
