"""What a run had resident over time, as a chart in text or in SVG."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from resident import resident_bytes

from zinf_fx.plan.show.curve import Curve, Glyphs
from zinf_fx.sizes import in_words

INTERVAL = 0.25
START = "start"
_PHASE_COLOURS = ("#dbe7f5", "#f6e3cf", "#dcefdc", "#eadcf0", "#f3f0cf")


@dataclass(frozen=True)
class Sample:
    """Seconds since the start, the phase the run was in, and what it had resident."""

    second: float
    phase: str
    nbytes: int


@dataclass
class Timeline:
    """Samples taken every `INTERVAL` seconds while `running`; `on_sample` is told of each, in a thread of its own.

    Attributes:
        phase: what the run is doing; set it as it changes.
    """

    on_sample: Callable[[Sample], None] = lambda sample: None
    phase: str = START
    samples: list[Sample] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        over, started = threading.Event(), time.perf_counter()

        def sample() -> None:
            while True:
                self.samples.append(Sample(time.perf_counter() - started, self.phase, resident_bytes()))
                self.on_sample(self.samples[-1])
                if over.wait(INTERVAL):
                    return

        thread = threading.Thread(target=sample, name="timeline", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def chart(self, budget: int, glyphs: Glyphs, width: int) -> str:
        """Below the axis, in seconds, stands the first letter of each phase."""
        values = [sample.nbytes for sample in self.samples]
        distance = self.samples[-1].second / max(len(values) - 1, 1)
        marks = "".join(sample.phase[0] for sample in self.samples)
        legend = ", ".join(f"{phase[0]}: {phase}" for phase in dict.fromkeys(s.phase for s in self.samples))
        chart = Curve(values, budget=budget, distance=distance, marks=marks).draw(glyphs, width, rows=8)
        return f"resident memory over time in seconds ({legend})\n\n{chart}"

    def write_svg(self, path: Path, budget: int) -> None:
        """Bands for the phases, a line for what was resident, a dashed one for the budget."""
        path.write_text(self._svg(budget))

    def _svg(self, budget: int) -> str:
        width, height, left, top = 900, 320, 80, 30
        seconds = max(self.samples[-1].second, INTERVAL)
        most = max(budget, *(sample.nbytes for sample in self.samples))
        x = lambda second: left + second / seconds * (width - left - 20)  # noqa: E731
        y = lambda nbytes: top + (1 - nbytes / most) * (height - top - 40)  # noqa: E731
        colours = dict(zip(dict.fromkeys(sample.phase for sample in self.samples), _PHASE_COLOURS, strict=False))
        parts = []
        for begin, end in zip(self.samples, self.samples[1:], strict=False):
            colour = colours.get(begin.phase, _PHASE_COLOURS[-1])
            parts.append(
                f'<rect x="{x(begin.second):.1f}" y="{top}" width="{x(end.second) - x(begin.second) + 0.5:.1f}" '
                f'height="{y(0) - top:.1f}" fill="{colour}"/>'
            )
        points = " ".join(f"{x(sample.second):.1f},{y(sample.nbytes):.1f}" for sample in self.samples)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="#1f4e8c" stroke-width="1.5"/>',
            f'<line x1="{left}" x2="{width - 20}" y1="{y(budget):.1f}" y2="{y(budget):.1f}" stroke="#a33" '
            'stroke-dasharray="6 4"/>',
            f'<text x="{left - 6}" y="{y(budget) + 4:.1f}" text-anchor="end">{in_words(budget)}</text>',
            f'<text x="{left - 6}" y="{y(0) + 4:.1f}" text-anchor="end">0</text>',
            f'<text x="{left}" y="{height - 18}">0 s</text>',
            f'<text x="{width - 20}" y="{height - 18}" text-anchor="end">{seconds:.0f} s</text>',
        ]
        for number, (phase, colour) in enumerate(colours.items()):
            at = left + number * 130
            parts.append(f'<rect x="{at}" y="8" width="12" height="12" fill="{colour}" stroke="#888"/>')
            parts.append(f'<text x="{at + 18}" y="18">{escape(phase)}</text>')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        return "\n".join([f'{head} font-size="12">', *parts, "</svg>"]) + "\n"
