"""A training step that the disk bounds, beside the disk's limit: a large model, few tokens, all model states on NVMe.

    python benchmarks/disk_bound.py                                       # the 303 M-parameter GPT, minutes
    python benchmarks/disk_bound.py --layers 4 --hidden 256 --heads 4

The limit is the engine alone: it moves the very bytes of a recorded step once more, request by request in the same
order, both directions at once, through as much memory as the plan has for buffers, without waiting for anything but
room. Where plain PyTorch takes longer to compute the same step in memory, that is the limit. Steps, the engine and
PyTorch take turns, and ratios are taken within each round. What remains open when the optimizer's ``step`` returns is
done in the next forward, and counted there. The training runs in one thread by default, so that the engine has a
processor; `--threads` gives it more.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from tqdm import tqdm

import zinf_fx
from zinf_fx.observe.recording import Recording
from zinf_fx.plan.intervals import merged
from zinf_fx.plan.memory.accounting import phases
from zinf_fx.runtime.recorder import RECORDER
from zinf_fx.runtime.tensor.tiers import Tiers
from zinf_fx.sizes import blocks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import add_gpt, check, computing_with
from engine_alone import EngineAlone, recorded
from gpt import GPT, GPTConfig, default_dtype, example_batch
from optimizer import seconds
from train_step import machine
from train_step_variant import OPTIONS, plain, timed_step
from turns import in_turns

MODES = {"default": {}, "step_in_backward": {"step_in_backward": True}}
PHASES = ("forward", "backward", "step")
DISK = ("fetch", "read", "write", "read_states", "write_states")
"""First words of the recorded slices in which the disk moves something."""


class Subject:
    """The model, trained in one mode from `store`, and the engine that moves the bytes of its step.

    Attributes:
        seconds: of each phase of each measured step, and for which the thread was ready and had no processor.
        planned, moved: bytes per step read and written, by the plan, and by a step that was recorded.
    """

    def __init__(
        self, config: GPTConfig, batch: Sequence[torch.Tensor], args: argparse.Namespace, mode: str, store: str
    ) -> None:
        torch.manual_seed(0)
        with default_dtype(torch.bfloat16), zinf_fx.offloading(store=store, placement=args.placement, pack="auto"):
            self.model = GPT(config)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        kept = {"state_dtype": args.state_dtype, "master_dtype": args.master_dtype}
        states = {option: dtypes.get(name, name) for option, name in kept.items()}
        self._optimizer = zinf_fx.optim.AdamW(self.model.parameters(), **MODES[mode], **states, **OPTIONS)
        self._loss = torch.compile(self.model, backend="zinf")
        self._batch = batch
        self.tiers: Tiers = next(self.model.parameters()).stored.tiers
        self.seconds: list[dict[str, float]] = []
        self._marks: list[float] = []
        with zinf_fx.record(self.model) as recording:
            self._step()
        self._step()
        traffic = [of_phase for plan in recording.plans for _, of_phase in phases(plan)]
        self.planned = (
            sum(of_phase.nvme_to_host for of_phase in traffic),
            sum(of_phase.host_to_nvme for of_phase in traffic),
        )
        self._step()
        with recorded(self.tiers) as requests:
            self._step()
        sizes = [(blocks(request.nbytes), request.write) for request in requests.requests]
        self.moved = tuple(sum(nbytes for nbytes, write in sizes if write == which) for which in (False, True))
        self._optimizer.finish()
        self.engine = EngineAlone(self.tiers.store, requests.requests, self.tiers.planned_peak)

    def train(self, steps: int) -> None:
        """Measure some steps, after one."""
        self._step()
        self.seconds += [self._step() for _ in range(steps)]
        self._optimizer.finish()

    def recorded(self) -> dict[str, dict[str, float]]:
        """Return where a step's time goes: by phase, seconds of what the training thread does, and with nothing under
        way to or from the disk."""
        self._step()
        with zinf_fx.record(self.model) as recording:
            began = RECORDER.log.began
            self._step()
            marks = [mark - began for mark in self._marks]
            self._step()  # what was asked for in the first one is over
        self._optimizer.finish()
        return {
            phase: shares_of(recording, start, end) for phase, start, end in zip(PHASES, marks, marks[1:], strict=False)
        }

    def _step(self) -> dict[str, float]:
        waited = seconds_without_processor()
        self._marks = [time.perf_counter()]
        loss = self._loss(*self._batch)
        loss.item()
        self._marks.append(time.perf_counter())
        loss.backward()
        self._marks.append(time.perf_counter())
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._marks.append(time.perf_counter())
        phases = dict(zip(PHASES, (b - a for a, b in zip(self._marks, self._marks[1:], strict=False)), strict=True))
        return phases | {"all": self._marks[-1] - self._marks[0], "ready": seconds_without_processor() - waited}


def seconds_without_processor() -> float:
    """For which this thread was ready to run, and others ran; 0 where the kernel doesn't say."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


def shares_of(recording: Recording, start: float, end: float) -> dict[str, float]:
    """Return the seconds between two moments of a recording, by what the training thread does and, of those, idle ones
    of the disk."""
    kinds = {
        "computes": ("forward", "backward"),
        "updates": ("update",),
        "waits": ("wait",),
        "disk": DISK,
    }
    slices = [span for step in recording.steps for span in step.slices]

    def during(kinds: Sequence[str]) -> list[range]:
        chosen = (span for span in slices if span.name.partition(" ")[0] in kinds)
        clipped = ((max(span.start, start), min(span.end, end)) for span in chosen)
        return merged(range(round(first * 1e9), round(last * 1e9)) for first, last in clipped)

    times = {name: sum(map(len, during(words))) / 1e9 for name, words in kinds.items()}
    # Operators wait and update, too, before they compute.
    apart = sum(map(len, during((*kinds["computes"], *kinds["updates"], *kinds["waits"])))) / 1e9
    times["computes"] = apart - times["updates"] - times["waits"]
    return times | {"idle": end - start - times.pop("disk"), "all": end - start}


def measure(args: argparse.Namespace, store: str) -> list[dict]:
    """Return a row for each mode."""
    config = GPTConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, context=args.context)
    batch = example_batch(config, args.batch)
    in_memory = plain(config, torch.bfloat16, torch.device("cpu"), compiled=False)
    timed_step(in_memory, batch, clip=None)
    rows = []
    with tqdm(total=2 * len(args.modes) * args.rounds, unit="turn", disable=not sys.stderr.isatty()) as bar:
        for mode in args.modes:
            subject = Subject(config, batch, args, mode, store)
            rounds: list[dict[str, float]] = [{} for _ in range(args.rounds)]
            for number, turn in in_turns(("step", "limit"), args.rounds):
                bar.set_postfix_str(mode)
                if turn == "step":
                    subject.train(args.steps)
                    rounds[number]["step"] = median(step["all"] for step in subject.seconds[-args.steps :])
                else:
                    memory = timed_step(in_memory, batch, clip=None)["step"]
                    limits = {"engine": seconds(subject.engine.run), "memory": memory}
                    rounds[number] |= limits | {"limit": max(limits.values())}
                bar.update()
            rows.append(row(mode, subject, rounds))
            subject.engine.close()
            del subject
            torch.compiler.reset()
            gc.collect()
    return rows


def row(mode: str, subject: Subject, rounds: Sequence[dict[str, float]]) -> dict:
    """Return what is printed of a mode. Ratios are taken within each round."""
    return {
        "mode": mode,
        "parameters": sum(p.numel() for p in subject.model.parameters()),
        **{name: median(step[name] for step in subject.seconds) for name in ("all", *PHASES, "ready")},
        "planned": subject.planned,
        "moved": subject.moved,
        **{name: median(times[name] for times in rounds) for name in ("engine", "memory")},
        "ratio_to_engine": median(times["engine"] / times["step"] for times in rounds),
        "ratio": median(times["limit"] / times["step"] for times in rounds),
        "where": subject.recorded(),
        "rounds": list(rounds),
    }


def table(rows: Sequence[dict]) -> str:
    headers = ["mode", "s per\nstep", *PHASES, "ready, no\nprocessor", "B/param read\nplanned, moved"]
    headers += [
        "B/param written\nplanned, moved",
        "engine\nalone, s",
        "engine\n/ step",
        "in memory\ns",
        "limit\n/ step",
    ]

    def bytes_of(row: dict, number: int) -> str:
        return ", ".join(f"{row[name][number] / row['parameters']:.2f}" for name in ("planned", "moved"))

    cells = [
        [
            r["mode"],
            *(f"{r[name]:.3f}" for name in ("all", *PHASES, "ready")),
            bytes_of(r, 0),
            bytes_of(r, 1),
            f"{r['engine']:.3f}",
            f"{r['ratio_to_engine']:.2f}",
            f"{r['memory']:.3f}",
            f"{r['ratio']:.2f}",
        ]
        for r in rows
    ]
    return tabulate(cells, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))


def where(rows: Sequence[dict]) -> str:
    """Return the table of one recorded step of each mode."""
    headers = ["mode", "phase", "seconds", "computes", "updates", "waits for\nthe disk", "else", "the queue\nis empty"]
    cells = []
    for r in rows:
        for phase, times in r["where"].items():
            known = [times[name] for name in ("computes", "updates", "waits")]
            values = [times["all"], *known, times["all"] - sum(known), times["idle"]]
            cells.append([r["mode"], phase, *(f"{value:.3f}" for value in values)])
    return tabulate(cells, headers, disable_numparse=True, colalign=("left", "left", *["right"] * (len(headers) - 2)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A training step that the disk bounds, beside the disk's limit.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_gpt(parser, context=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--placement", choices=("nvme", "infinity-nvme"), default="nvme", help="of the model states")
    kinds = ("float32", "bfloat16", "8bit")
    parser.add_argument("--state-dtype", choices=kinds, default="float32", help="of the moments")
    parser.add_argument("--master-dtype", choices=("float32", "split"), default="float32", help="of the masters")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of the optimizer")
    parser.add_argument("--rounds", type=int, default=5, help="of steps, the engine alone, and PyTorch in memory")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a round")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    check(options, args, "layers", "hidden", "heads", "context", "batch", "rounds", "steps", "threads")
    with computing_with(args.threads), tempfile.TemporaryDirectory(prefix="disk-bound-") as directory:
        rows = measure(args, args.store or directory)
    if args.json:
        print(json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{machine()}; torch {torch.__version__}, {args.threads} thread(s)")
    print(
        f"GPT {args.layers} x {args.hidden}, {rows[0]['parameters']:,} parameters, bfloat16, AdamW, masters in "
        f"{args.master_dtype}, moments in {args.state_dtype}, batch {args.batch} x {args.context}; {args.placement}, "
        "pack='auto'"
    )
    print(f"medians of {args.rounds} rounds of {args.steps} steps; ratios within each round\n")
    print(table(rows))
    print("\nwhere one recorded step went, in seconds of the training thread; and with nothing to do for the disk\n")
    print(where(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
