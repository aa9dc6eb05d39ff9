"""Train a GPT whose states are larger than this machine's memory, in a small part of it, on real text.

python examples/bigger_than_memory.py                                  # twice the memory, in at most 4 GiB of it
python examples/bigger_than_memory.py --memory 2GiB --resident 1GiB    # as if there were only 2 GiB: minutes less
systemd-run --user --scope -p MemoryMax=4G python examples/bigger_than_memory.py   # the kernel holds it to that
python examples/bigger_than_memory.py --memory 2GiB --resident 1GiB --checkpoint DIR   # kill it, and start it again

The limit is that of this process's control group or, without one, the machine's memory. Parameters, gradients and
optimizer states are on disk, 16 bytes per parameter (`--state-dtype 8bit`: 10): they need as much free space. Exit code
1: more was resident than `--resident` allows. With `--checkpoint`, every step is saved there, and training goes on
behind the last one, with the model that it was begun with.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from corpus import CorpusError, batches, load_corpus
from fitting import MOMENTS, Fit, RefusedError, bytes_per_parameter, fit, parameters_of, room_on
from gpt import GPT, GPTConfig, default_dtype
from resident import peak_resident_bytes, resident_bytes
from tabulate import tabulate
from timeline import Sample, Timeline
from tqdm import tqdm
from train_gpt import not_negative, positive, positive_float

import zinf_fx
from zinf_fx.config import parse_bytes
from zinf_fx.errors import ZinfError
from zinf_fx.placement import TIERS
from zinf_fx.plan.show.curve import ASCII, BLOCKS
from zinf_fx.runtime.memory.process import MemoryLimit, memory_limit
from zinf_fx.sizes import in_words

TIMES_THE_MEMORY = 2
RESIDENT = 4 << 30
# The arena's part of what may be resident; the rest is for PyTorch, its compiler, activations and one gradient.
ARENA_SHARE = 0.25
# What of it must be free when training begins.
FREE_SHARE = 0.5
MODEL = "gpt.json"  # beside the checkpoints: the shape of the model
CONSTRUCT, FORWARD, BACKWARD, OPTIMIZER, SAVE = "construct", "forward", "backward", "optimizer", "keep"


@dataclass
class Progress:
    """A bar on a terminal; elsewhere a line per step. It follows the timeline, whose phases it sets."""

    steps: int
    first: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bar = tqdm(total=self.steps, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout)
        self.timeline = Timeline(self._show)

    def phase(self, name: str) -> None:
        self.timeline.phase = name

    def note(self, text: str) -> None:
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def resumed(self, done: int) -> None:
        """So many steps were done before."""
        self.first = done
        self._bar.update(done)
        self.note(f"resumed after step {done}")

    def step(self, loss: float, seconds: float) -> None:
        self.losses.append(loss)
        self.seconds.append(seconds)
        self._bar.update()
        done = self.first + len(self.losses)
        resident = in_words(resident_bytes())
        self.note(f"step {done}/{self.steps}  loss {loss:.3f}  {seconds:.1f} s  resident {resident}")

    def close(self) -> None:
        self._bar.close()

    def _show(self, sample: Sample) -> None:
        if not self._bar.disable:
            self._bar.set_postfix_str(f"{sample.phase}, resident {in_words(sample.nbytes)}")


@dataclass(frozen=True)
class Outcome:
    """Loss and seconds of each step, and the counters before the first and after the last."""

    losses: Sequence[float]
    seconds: Sequence[float]
    before: zinf_fx.Stats
    after: zinf_fx.Stats


@dataclass(frozen=True)
class Optimizer:
    """The learning rate, and what moments are stored as."""

    lr: float
    state_dtype: str

    def of(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        states = getattr(torch, self.state_dtype, self.state_dtype)
        options = {"lr": self.lr, "betas": (0.9, 0.95), "weight_decay": 0.1, "state_dtype": states}
        return zinf_fx.optim.AdamW(model.parameters(), **options)


def train(
    fitted: Fit, config: zinf_fx.Config, data: Iterator, kind: Optimizer, progress: Progress, directory: Path | None
) -> Outcome:
    """Train, saving each step to `directory`, if any, and going on from what is there."""
    progress.phase(CONSTRUCT)
    started = time.perf_counter()
    with default_dtype(torch.bfloat16), zinf_fx.offloading(config):
        model = GPT(fitted.config)
    optimizer = kind.of(model)
    built = time.perf_counter() - started
    progress.note(f"built in {built:.1f} s, never whole in memory: resident {in_words(resident_bytes())}")
    loss_of = torch.compile(model, backend="zinf")

    checkpoints = None
    if directory is not None:
        checkpoints = zinf_fx.CheckpointManager(directory, model, optimizer, every_steps=1, keep=1)
        if done := checkpoints.resume():
            progress.resumed(done)
            for _ in range(done):
                next(data)
    before = zinf_fx.stats(model)
    for step in range(progress.first, progress.steps):
        begin = time.perf_counter()
        progress.phase(FORWARD)
        loss = loss_of(*next(data))
        value = loss.item()
        progress.phase(BACKWARD)
        loss.backward()
        progress.phase(OPTIMIZER)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == progress.steps:
            optimizer.finish()  # the other steps go on during the next forward
        progress.step(value, time.perf_counter() - begin)
        if checkpoints is not None:
            progress.phase(SAVE)
            checkpoints.after_step(step + 1)
    return Outcome(progress.losses, progress.seconds, before, zinf_fx.stats(model))


def report(
    limit: MemoryLimit, resident: int, fitted: Fit, config: zinf_fx.Config, moments: str, outcome: Outcome
) -> str:
    peak, steps, stats = peak_resident_bytes(), len(outcome.losses), outcome.after
    read, written = stats.bytes_read - outcome.before.bytes_read, stats.bytes_written - outcome.before.bytes_written
    tier_of = {kind: getattr(config.placement, kind) for kind in fitted.bytes_of_kind}
    kinds = {"parameters": "bfloat16", "gradients": "bfloat16", "optimizer": f"master copy, and moments in {moments}"}
    rows = [
        ("memory limit", f"{in_words(limit.nbytes)}, {limit.source}"),
        ("may be resident", in_words(resident)),
        ("parameters", f"{fitted.parameters:,}, {fitted.shape}"),
        *(
            (
                f"{kind}: {kinds[kind]}",
                f"{in_words(fitted.parameters * nbytes)} on {tier_of[kind]}, {nbytes} bytes each",
            )
            for kind, nbytes in fitted.bytes_of_kind.items()
        ),
        *(
            (
                f"states on {tier}",
                in_words(fitted.parameters * sum(fitted.bytes_of_kind[k] for k in tier_of if tier_of[k] == tier)),
            )
            for tier in TIERS
        ),
        ("states / memory limit", f"{fitted.states / limit.nbytes:.1f}"),
        ("states / resident at most", f"{fitted.states / peak:.1f}"),
        ("resident at most, everything included", in_words(peak)),
        ("host arena at most, measured", in_words(stats.peak_host_bytes)),
        ("host arena at most, as planned", in_words(stats.planned_host_bytes)),
        ("tokens per step", f"{fitted.config.context:,}"),
        ("seconds per step (compilation is in the first)", " ".join(f"{seconds:.1f}" for seconds in outcome.seconds)),
        ("read per step", _per_step(read, steps, fitted)),
        ("written per step", _per_step(written, steps, fitted)),
        ("read and written, over all steps", _rate(read + written, sum(outcome.seconds))),
        ("while anything was being read", _rate(stats.bytes_read, stats.read_seconds)),
        ("while anything was being written", _rate(stats.bytes_written, stats.write_seconds)),
        ("loss of each step, nats per byte", " ".join(f"{loss:.3f}" for loss in outcome.losses)),
    ]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)


def _per_step(nbytes: int, steps: int, fitted: Fit) -> str:
    return f"{in_words(nbytes // steps)}, {nbytes / steps / fitted.parameters:.1f} bytes per parameter"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{in_words(round(nbytes / seconds))}/s" if seconds else "nothing"


def size(text: str) -> int:
    try:
        return parse_bytes(text, "the size")
    except ZinfError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a GPT whose states are larger than memory, with all of them in a zinf store on disk.",
        epilog="Sizes are bytes, or such as 512MiB or 4GiB.",
    )
    parser.add_argument("--memory", type=size, metavar="SIZE", help="what to exceed (default: the limit found here)")
    parser.add_argument("--states", type=size, metavar="SIZE", help="of the model at least (default: twice the memory)")
    parser.add_argument("--resident", type=size, metavar="SIZE", help="at most (default: 4GiB, or all the memory)")
    parser.add_argument("--store", type=Path, metavar="DIR", help="in place of $ZINF_STORE or the user cache")
    parser.add_argument("--disk", type=size, metavar="SIZE", help="to take at most (default: 95 %% of what is free)")
    parser.add_argument("--steps", type=positive, default=3, help="(default: 3)")
    parser.add_argument("--context", type=positive, default=256, help="bytes of text per step (default: 256)")
    parser.add_argument("--text", type=Path, help="a file or directory, in place of the standard library's source")
    parser.add_argument(
        "--lr", type=positive_float, help="learning rate (default: 0.1 / width / layers, which needs no warm-up)"
    )
    parser.add_argument(
        "--state-dtype", choices=MOMENTS, default="float32", help="of the optimizer's moments (default: float32)"
    )
    parser.add_argument("--seed", type=not_negative, default=0, help="(default: 0)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save each step there, and go on behind the last one that is"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write the timeline there, as SVG")
    parser.add_argument("--ascii", action="store_true", help="no block characters in the chart")
    return parser


def prepared(args: argparse.Namespace) -> tuple[MemoryLimit, int, zinf_fx.Config, Fit]:
    """Return the limit, what may be resident, the options, and the model. Raises: RefusedError, ZinfError."""
    limit = memory_limit() if args.memory is None else MemoryLimit(args.memory, "as given")
    resident = min(RESIDENT, limit.nbytes) if args.resident is None else args.resident
    if resident > limit.nbytes:
        raise RefusedError(f"--resident {in_words(resident)} is more than the memory, {in_words(limit.nbytes)}")
    if resident_bytes() > resident * FREE_SHARE:
        raise RefusedError(
            f"{in_words(resident)} may be resident, and Python with PyTorch takes {in_words(resident_bytes())} before "
            f"anything is trained: allow at least {in_words(int(resident_bytes() / FREE_SHARE))}"
        )
    states = TIMES_THE_MEMORY * limit.nbytes if args.states is None else args.states
    if states <= limit.nbytes:
        raise RefusedError(f"--states {in_words(states)} is no more than the memory, {in_words(limit.nbytes)}")
    config = zinf_fx.Config(
        **({} if args.store is None else {"store": args.store}),
        placement="nvme",
        host_memory=int(resident * ARENA_SHARE),
        activations="recompute",
        chunk="8MiB",
        residency=False,  # memory is what is scarce here
    )
    room = room_on(config.stores)
    room = room if args.disk is None else min(args.disk, room)
    bytes_of_kind = bytes_per_parameter(args.state_dtype)
    if args.checkpoint is not None and (args.checkpoint / MODEL).exists():
        return limit, resident, config, begun(args.checkpoint / MODEL, args.state_dtype)
    if args.checkpoint is not None:  # a step leaves what is saved as it is, and writes parameters and states elsewhere
        kept = sum(bytes_of_kind.values())
        room = room * kept // (kept + bytes_of_kind["parameters"] + bytes_of_kind["optimizer"])
    return limit, resident, config, fit(states, limit.nbytes, room, args.context, bytes_of_kind)


def begun(path: Path, state_dtype: str) -> Fit:
    """Return the model of the training that is to go on: the disk, of which that took a part, doesn't say it again.
    Raises: RefusedError."""
    try:
        content = json.loads(path.read_text())
        shape = GPTConfig(**content["model"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError(f"{path} can't be read, and says which model was trained: {error}") from None
    if content.get("state_dtype") != state_dtype:
        raise RefusedError(
            f"{path} says that training began with --state-dtype {content.get('state_dtype')}: give the same, or "
            "another --checkpoint"
        )
    note = f"the model is that of {path}"
    return Fit(shape, parameters_of(shape), bytes_per_parameter(state_dtype), note)


def note_begun(path: Path, fitted: Fit, state_dtype: str) -> None:
    """Say there which model is trained. Raises: RefusedError."""
    content = {"model": asdict(fitted.config), "state_dtype": state_dtype}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    except OSError as error:
        raise RefusedError(f"{path} can't be written: {error.strerror}; choose another --checkpoint") from None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    try:
        text = load_corpus(args.text).training
        limit, resident, config, fitted = prepared(args)
        data = batches(text, 1, fitted.config.context, args.seed)
        if args.checkpoint is not None:
            note_begun(args.checkpoint / MODEL, fitted, args.state_dtype)
    except (CorpusError, RefusedError, ZinfError) as error:
        options.error(str(error))

    print(f"memory limit {in_words(limit.nbytes)} ({limit.source}), of which {in_words(resident)} may be resident")
    if fitted.note:
        print(fitted.note)
    print(f"a GPT of {fitted.parameters:,} parameters, {fitted.shape}: {in_words(fitted.states)} of states", flush=True)
    torch.manual_seed(args.seed)
    progress = Progress(args.steps)
    try:
        with progress.timeline.running():
            lr = 0.1 / (fitted.config.hidden * fitted.config.layers) if args.lr is None else args.lr
            kind = Optimizer(lr, args.state_dtype)
            outcome = train(fitted, config, data, kind, progress, args.checkpoint)
    except ZinfError as error:
        options.error(str(error))
    finally:
        progress.close()

    if not outcome.losses:
        print(f"all {args.steps} steps are done; --steps for more")
        return 0
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 100
    glyphs = BLOCKS if terminal and not args.ascii else ASCII
    print(f"\n{report(limit, resident, fitted, config, args.state_dtype, outcome)}")
    print(f"\n{progress.timeline.chart(resident, glyphs, width)}")
    if args.plot:
        progress.timeline.write_svg(args.plot, resident)
        print(f"\nthe timeline is in {args.plot}")
    if (peak := peak_resident_bytes()) > resident:
        print(f"\n{peak:,} bytes were resident, more than the {resident:,} allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
