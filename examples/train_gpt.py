"""Train a byte-level GPT on real text with its parameters and optimizer states in a zinf store.

python examples/train_gpt.py                                  # the standard library's source, states on disk
python examples/train_gpt.py --text book.txt --store /mnt/nvme
python examples/train_gpt.py --plain                          # the same training, ordinary PyTorch in memory
torchrun --nproc-per-node 2 examples/train_gpt.py             # two ranks, each with a part of the states
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from corpus import CorpusError, batches, bigram_loss, bits, evaluation_batches, load_corpus, unigram_loss
from defaults import ShowDefaults
from gpt import GPT, GPTConfig, default_dtype
from master_adamw import adamw
from resident import peak_resident_bytes, resident_bytes
from tabulate import tabulate
from together import Together, together
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.95), 0.1, 1.0
EVALUATION_BYTES = 64 * 1024
PROMPT_BYTES = 32

Batch = tuple[Tensor, Tensor]


class RefusedError(Exception):
    """zinf_fx can't do what the flags ask for."""


@dataclass(frozen=True)
class Job:
    """A model to sample from, the callable that trains it, its optimizer, and the bytes its store has moved."""

    model: GPT
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    traffic: Callable[[], tuple[int, int]] | None
    """Bytes read from and written to the store so far; None where there is no store."""
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    """For the micro-batches whose gradients other ranks need not know of yet."""
    logits: Callable[[Tensor], Tensor] | None = None
    """What computes the scores when text is generated. Default: the model's method, as it is."""


def plain_job(config: GPTConfig, dtype: torch.dtype, lr: float) -> Job:
    with default_dtype(dtype):
        model = GPT(config)
    optimizer = adamw(model.parameters(), dtype, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return Job(model, model, optimizer, traffic=None)


def zinf_job(args: argparse.Namespace, config: GPTConfig, dtype: torch.dtype) -> Job:
    import zinf_fx

    where = {} if args.store is None else {"store": args.store}
    with default_dtype(dtype), zinf_fx.offloading(placement=args.placement or "infinity-nvme", **where):
        model = GPT(config)
    states = getattr(torch, args.state_dtype, args.state_dtype)
    options = {"lr": args.lr, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "state_dtype": states}
    optimizer = zinf_fx.optim.AdamW(model.parameters(), **options)

    def traffic() -> tuple[int, int]:
        stats = zinf_fx.stats(model)
        return stats.bytes_read, stats.bytes_written

    logits = torch.compile(model.logits, backend="zinf", dynamic=True)
    return Job(model, torch.compile(model, backend="zinf"), optimizer, traffic, zinf_fx.no_sync, logits)


def warmup_then_cosine(warmup: int, steps: int) -> Callable[[int], float]:
    """Return the share of the peak learning rate at a step: a line up to 1, then half a cosine down to 0.1."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    return share


@dataclass
class Progress:
    """A progress bar on a terminal; elsewhere a line every few steps."""

    job: Job
    steps: int
    bytes_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bar = tqdm(total=self.steps, unit="step", disable=not sys.stdout.isatty(), file=sys.stdout)
        self._every = max(1, self.steps // 20)
        self._reported = 0
        self._traffic = (0, 0)

    def step(self, loss: float, seconds: float) -> None:
        self.losses.append(loss)
        self.seconds.append(seconds)
        done = len(self.losses)
        if self._bar.disable:
            if done % self._every == 0 or done in (1, self.steps):
                print(f"step {done:>{len(str(self.steps))}}/{self.steps}  {self._recent()}", flush=True)
        else:
            self._bar.set_postfix_str(self._recent(), refresh=False)
            self._bar.update()

    def note(self, text: str) -> None:
        self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        self._bar.close()

    def _recent(self) -> str:
        """Return what happened since the line before."""
        seconds = sum(self.seconds[self._reported :])
        steps = len(self.seconds) - self._reported
        self._reported = len(self.seconds)
        text = (
            f"loss {self.losses[-1]:.3f}  {steps * self.bytes_per_step / seconds:,.0f} tokens/s  "
            f"resident {resident_bytes() / 2**20:,.0f} MiB"
        )
        if self.job.traffic is None:
            return text
        before, self._traffic = self._traffic, self.job.traffic()
        read, written = ((now - then) / seconds for now, then in zip(self._traffic, before, strict=True))
        return f"{text}  disk read {read / 2**20:,.0f} written {written / 2**20:,.0f} MiB/s"


def evaluate(job: Job, evaluation: Sequence[Batch]) -> float:
    """Mean nats per byte."""
    with torch.no_grad():
        return sum(job.loss(tokens, targets).item() for tokens, targets in evaluation) / len(evaluation)


def train(job: Job, data: Callable[[], Batch], evaluation: Sequence[Batch], args: argparse.Namespace) -> Progress:
    scheduler = LambdaLR(job.optimizer, warmup_then_cosine(args.warmup, args.steps))
    progress = Progress(job, args.steps, args.accumulate * args.batch * args.context)
    try:
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            total = 0.0
            for micro in range(1, args.accumulate + 1):
                with nullcontext() if micro == args.accumulate else job.no_sync():
                    loss = job.loss(*data()) / args.accumulate
                    loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), CLIP_NORM)
            job.optimizer.step()
            job.optimizer.zero_grad()
            scheduler.step()
            progress.step(total, time.perf_counter() - start)
            if args.eval_every and step % args.eval_every == 0 and step < args.steps:
                progress.note(f"step {step}: held-out loss {evaluate(job, evaluation):.3f}")
    finally:
        progress.close()
    return progress


def report(job: Job, progress: Progress, held_out: float, unigram: float, bigram: float) -> str:
    recent = progress.losses[-20:]
    training = sum(recent) / len(recent)
    losses = [
        ("held out: byte frequencies alone", unigram, bits(unigram)),
        ("held out: byte pairs alone", bigram, bits(bigram)),
        ("held out: this GPT", held_out, bits(held_out)),
        (f"training: this GPT, mean of the last {len(recent)} steps", training, bits(training)),
    ]
    later = progress.seconds[1:] or progress.seconds
    parameters = sum(p.numel() for p in job.model.parameters())
    costs = [
        ("parameters", f"{parameters:,}"),
        ("first step, with any compilation", f"{progress.seconds[0]:.1f} s"),
        ("a later step", f"{sum(later) / len(later):.3f} s"),
        ("tokens per second", f"{progress.bytes_per_step * len(later) / sum(later):,.0f}"),
        ("peak resident memory", f"{peak_resident_bytes() / 2**20:,.0f} MiB"),
    ]
    if job.traffic is not None:
        read, written = (moved / len(progress.losses) / 2**20 for moved in job.traffic())
        costs += [("store, read per step", f"{read:.1f} MiB"), ("store, written per step", f"{written:.1f} MiB")]
    table = tabulate(losses, headers=("loss", "nats per byte", "bits per byte"), floatfmt=".3f")
    return f"{table}\n\n{tabulate(costs, tablefmt='plain', colalign=('left', 'right'))}"


def printable(text: bytes) -> str:
    """As text that can't upset a terminal: what isn't UTF-8, or controls it, shows as a replacement mark."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text.decode(errors="replace")
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    return 0 if text == "0" else positive(text)


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on text, with its states in a zinf store.",
        formatter_class=ShowDefaults,
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive, default=4, metavar="N", help="blocks")
    model.add_argument("--hidden", type=positive, default=128, metavar="N", help="hidden size")
    model.add_argument("--heads", type=positive, default=4, metavar="N", help="attention heads")
    model.add_argument("--context", type=positive, default=128, metavar="N", help="bytes per sequence")
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--text", type=Path, metavar="PATH", help="a file or directory, in place of the standard library's source"
    )
    training.add_argument("--steps", type=positive, default=500, metavar="N", help="of the optimizer")
    training.add_argument("--batch", type=positive, default=16, metavar="N", help="sequences per forward, on each rank")
    training.add_argument("--accumulate", type=positive, default=1, metavar="N", help="forwards and backwards per step")
    training.add_argument("--lr", type=positive_float, default=3e-3, help="peak learning rate")
    training.add_argument("--warmup", type=not_negative, default=50, metavar="N", help="steps to reach it")
    training.add_argument("--seed", type=not_negative, default=0, metavar="N", help="of weights, batches and sample")
    training.add_argument(
        "--eval-every",
        type=not_negative,
        default=100,
        metavar="N",
        help="steps between evaluations; 0: only at the end",
    )
    training.add_argument("--sample", type=not_negative, default=300, metavar="N", help="bytes to generate at the end")
    states = parser.add_argument_group("where the states live")
    states.add_argument("--store", type=Path, metavar="DIR", help="in place of $ZINF_STORE or the user cache")
    states.add_argument("--placement", help="a preset of zinf_fx.Config (default: infinity-nvme)")
    kinds = ("float32", "bfloat16", "8bit")
    states.add_argument("--state-dtype", choices=kinds, default="float32", help="of the optimizer's moments")
    states.add_argument("--plain", action="store_true", help="ordinary PyTorch, everything in memory")
    return parser


def start(args: argparse.Namespace, config: GPTConfig) -> Job:
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    if args.plain:
        return plain_job(config, dtype, args.lr)
    from zinf_fx.errors import ZinfError

    try:
        return zinf_job(args, config, dtype)
    except ZinfError as error:
        raise RefusedError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    with together() as ranks:
        return run(args, options, ranks)


def run(args: argparse.Namespace, options: argparse.ArgumentParser, ranks: Together) -> int:
    if args.plain and ranks.size > 1:
        options.error("--plain is one process alone: leave out torchrun, or --plain")
    if args.plain and (args.store or args.placement or args.state_dtype != "float32"):
        options.error(
            "--plain keeps everything in memory as PyTorch does: leave out --store, --placement, --state-dtype"
        )
    try:
        config = GPTConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, context=args.context)
    except ValueError as error:
        options.error(str(error))
    try:
        corpus = load_corpus(args.text)
        random_batches = batches(corpus.training, args.batch, args.context, args.seed * ranks.size + ranks.rank)
        limit = max(1, EVALUATION_BYTES // (args.batch * args.context))
        evaluation = evaluation_batches(corpus.held_out, args.batch, args.context, limit)
        job = start(args, config)
    except (CorpusError, RefusedError) as error:
        options.error(str(error))

    print(f"{corpus.name}: {len(corpus.training):,} bytes to train on, {len(corpus.held_out):,} held out")
    if ranks.size > 1:
        print(f"{ranks.size} ranks; below, losses, speed and memory of the first")
    progress = train(job, random_batches.__next__, evaluation, args)
    held_out = evaluate(job, evaluation)
    baselines = unigram_loss(corpus.training, evaluation), bigram_loss(corpus.training, evaluation)
    print(f"\n{report(job, progress, held_out, *baselines)}")
    if args.sample:
        prompt = bytes(corpus.held_out[:PROMPT_BYTES].tolist())
        text = job.model.generate(prompt, args.sample, temperature=0.8, seed=args.seed, logits=job.logits)
        print(f"\n--- {len(prompt)} bytes of the held-out text, continued\n{printable(text)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
