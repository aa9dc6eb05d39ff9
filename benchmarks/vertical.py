"""Tokens per second of steps of several micro-batches, beside a loop over them, and plain PyTorch in memory.

    python benchmarks/vertical.py                                                 # the 303 M-parameter GPT, minutes
    python benchmarks/vertical.py --layers 4 --hidden 256 --heads 4 --counts 1 4  # a minute

All model states are on NVMe. "vertical": all micro-batches run an operator before the next one begins
(`micro_batches`); "horizontal": a forward and a backward pass for each, as gradient accumulation does; "in memory":
that loop in plain PyTorch. The ways take turns, a few steps each after one that isn't counted, and ratios are taken
within each round. "simulated" are the seconds that `zinf-fx simulate --hardware this-machine` predicts, of the disk,
the memory and operators that are measured in the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import zinf_fx
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import add_gpt, check, computing_with
from gpt import GPT, GPTConfig, default_dtype, example_batch
from master_adamw import adamw
from train_step import machine
from train_step_variant import OPTIONS

WAYS = ("vertical", "horizontal", "in memory")


class Training:
    """One way to train the model with batches of `count` micro-batches."""

    def __init__(self, args: argparse.Namespace, way: str, count: int, store: str) -> None:
        config = config_of(args)
        torch.manual_seed(0)
        with default_dtype(torch.bfloat16):
            if way == "in memory":
                self._model = self._loss = GPT(config)
                self._optimizer = adamw(self._model.parameters(), torch.bfloat16, **OPTIONS)
            else:
                with zinf_fx.offloading(store=store, placement="nvme"):
                    self._model = GPT(config)
                self._optimizer = zinf_fx.optim.AdamW(self._model.parameters(), **OPTIONS)
                divided = {"dynamic": True, "options": options_of(args, count)} if way == "vertical" else {}
                self._loss = torch.compile(self._model, backend="zinf", **divided)
        self._batch = example_batch(config, count * args.micro_batch)
        self._parts = 1 if way == "vertical" else count
        self._moved = self._step() if way == "in memory" else self._bytes_of(self._step)

    def seconds(self, steps: int) -> float:
        """Of a step in the steady state: the mean of some after a first one, whose optimizer's step is done in the
        forward pass of the next, as that of the last is after them."""
        self._step()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = (time.perf_counter() - start) / steps
        self._finish()
        return seconds

    @property
    def bytes_per_parameter(self) -> float | None:
        """Moved to and from NVMe in a step."""
        return self._moved and self._moved / sum(p.numel() for p in self._model.parameters())

    def _bytes_of(self, step: Callable[[], None]) -> int:
        step()
        self._finish()
        before = zinf_fx.stats(self._model)
        step()
        self._finish()
        after = zinf_fx.stats(self._model)
        return after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written

    def _step(self) -> None:
        parts: list[tuple[Tensor, ...]] = list(zip(*(one.chunk(self._parts) for one in self._batch), strict=True))
        for part in parts:
            (self._loss(*part) / len(parts)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _finish(self) -> None:
        if hasattr(self._optimizer, "finish"):
            self._optimizer.finish()


def config_of(args: argparse.Namespace) -> GPTConfig:
    """The model, without a tied head."""
    return GPTConfig(args.layers, args.hidden, args.heads, context=args.context, tied=False)


def options_of(args: argparse.Namespace, count: int) -> dict[str, object]:
    """The options of a vertical step."""
    return {"micro_batches": count, "activations": args.activations}


def simulated(args: argparse.Namespace, count: int, store: str) -> dict[str, float]:
    """Seconds that a step is predicted to take here, by the way it is trained in."""
    hardware = measure_machine(store)
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model = GPT(config_of(args))

    def seconds(micro_batches: int, accumulate: int) -> float:
        batch = example_batch(config_of(args), micro_batches * args.micro_batch)
        options = options_of(args, micro_batches)
        planning = plan_model(model, batch, store=store, placement="nvme", timed=True, **options)
        return simulate_plan(planning.plans[0], hardware, planning.seconds[0], accumulate=accumulate).seconds

    return {"vertical": seconds(count, 1), "horizontal": seconds(1, count)}


def measure(args: argparse.Namespace, store: str) -> list[dict]:
    """A row for each number of micro-batches and way."""
    rows = []
    with tqdm(total=len(args.counts) * args.rounds, unit="round", disable=not sys.stderr.isatty()) as bar:
        for count in args.counts:
            bar.set_postfix_str(f"{count} micro-batches")
            trainings = {way: Training(args, way, count, store) for way in WAYS}
            rounds, predicted = [], []
            for number in range(args.rounds):
                turn = WAYS if number % 2 == 0 else WAYS[::-1]
                rounds.append({way: trainings[way].seconds(args.steps) for way in turn})
                predicted.append(simulated(args, count, store) if args.simulate else {})
                bar.update()
            for way, training in trainings.items():
                tokens = count * args.micro_batch * args.context
                row = {"micro_batches": count, "way": way, "bytes_per_parameter": training.bytes_per_parameter}
                row |= {"seconds": median(one[way] for one in rounds)}
                row |= {"tokens_per_second": median(tokens / one[way] for one in rounds)}
                row |= {"to_horizontal": median(one["horizontal"] / one[way] for one in rounds)}
                row |= {"to_memory": median(one["in memory"] / one[way] for one in rounds)}
                if way in predicted[0]:
                    pairs = list(zip(predicted, rounds, strict=True))
                    row["simulated"] = median(guess[way] for guess, _ in pairs)
                    row["simulated_to_measured"] = median(guess[way] / one[way] for guess, one in pairs)
                rows.append(row)
            del trainings, training
            torch.compiler.reset()
            gc.collect()
    return rows


def table(rows: Sequence[dict]) -> str:
    headers = ["micro-\nbatches", "way", "s per\nstep", "tokens\nper s", "x hori-\nzontal", "x in\nmemory"]
    headers += ["bytes per\nparameter", "simulated\ns", "simulated\n/ measured"]
    cells = []
    for r in rows:
        guess, moved = r.get("simulated"), r["bytes_per_parameter"]
        numbers = [f"{r[name]:.2f}" for name in ("seconds", "tokens_per_second", "to_horizontal", "to_memory")]
        more = ["", ""] if guess is None else [f"{guess:.2f}", f"{r['simulated_to_measured']:.2f}"]
        cells.append([r["micro_batches"], r["way"], *numbers, "" if moved is None else f"{moved:.1f}", *more])
    return tabulate(cells, headers, disable_numparse=True, colalign=("right", "left", *["right"] * 7))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Steps of several micro-batches, operator by operator and one after the other.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_gpt(parser, context=128)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences in each")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16], help="micro-batches of a step")
    parser.add_argument("--activations", choices=("keep", "recompute", "offload"), default="keep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of each way in a round")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--simulate", action=argparse.BooleanOptionalAction, default=True, help="predict steps, too")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    numbers = ("layers", "hidden", "heads", "context", "micro_batch", "counts", "rounds", "steps", "threads")
    check(options, args, *numbers)
    with computing_with(args.threads), tempfile.TemporaryDirectory(prefix="vertical-") as directory:
        rows = measure(args, args.store or directory)
    if args.json:
        print(json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{machine()}; torch {torch.__version__}, {args.threads} thread(s)")
    print(
        f"GPT {args.layers} x {args.hidden}, bfloat16 with fp32 AdamW, everything on NVMe, micro-batches of "
        f"{args.micro_batch} x {args.context}, activations={args.activations!r}"
    )
    print(f"medians of {args.rounds} rounds of {args.steps} steps; ratios within each round\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
