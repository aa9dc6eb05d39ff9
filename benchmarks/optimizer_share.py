"""The optimizer's share of a training step: what a step takes longer than its forward and backward pass alone.

    python benchmarks/optimizer_share.py                              # the 303 M-parameter GPT, minutes
    python benchmarks/optimizer_share.py --layers 8 --rounds 3        # as many bytes per FLOP, in a third of the time

Forward and backward alone, and whole steps in each mode of the optimizer, alternate in one process, a few steps at a
time: a machine that slows down for a minute slows all of them. Each share is taken within a round; the table has their
medians. `in memory` is plain PyTorch's fused AdamW over ordinary tensors: the arithmetic alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from tqdm import tqdm

import zinf_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from arguments import add_gpt, check
from gpt import GPT, GPTConfig, default_dtype, example_batch
from train_step import machine
from train_step_variant import OPTIONS, plain, timed_step
from turns import in_turns

MODES = {"overlap": {"overlap": True}, "in backward": {"step_in_backward": True}, "synchronous": {"overlap": False}}
ALONE = "forward and backward"


class Training:
    """A model on its tiers, compiled, with an optimizer."""

    def __init__(self, config: GPTConfig, batch: Sequence[torch.Tensor], fields: dict[str, str], mode: str) -> None:
        with default_dtype(torch.bfloat16), zinf_fx.offloading(**fields):
            self.model = GPT(config)
        self._loss = torch.compile(self.model, backend="zinf")
        self._batch = batch
        self._optimizer = zinf_fx.optim.AdamW(self.model.parameters(), **MODES[mode], **OPTIONS)

    def steps(self, mode: str, count: int) -> float:
        """Return the seconds per step, of `count` in a row, in the steady state: the first one comes before them."""
        self._step(mode)
        start = time.perf_counter()
        for _ in range(count):
            self._step(mode)
        seconds = time.perf_counter() - start
        self._optimizer.finish()
        return seconds / count

    def _step(self, mode: str) -> None:
        loss = self._loss(*self._batch)
        loss.item()
        loss.backward()
        if mode != ALONE:
            self._optimizer.overlap = mode != "synchronous"
            self._optimizer.step()
        self.model.zero_grad()


def in_memory(config: GPTConfig, batch: Sequence[torch.Tensor], count: int) -> tuple[float, float]:
    """Return the seconds of a step of plain PyTorch, and of its optimizer: medians of `count` after one."""
    variant = plain(config, torch.bfloat16, torch.device("cpu"), compiled=False)
    steps = [timed_step(variant, batch, clip=None) for _ in range(count + 1)][1:]
    return median(step["step"] for step in steps), median(step["optimizer"] for step in steps)


def measure(args: argparse.Namespace) -> dict[str, object]:
    config = GPTConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, context=args.context)
    batch = example_batch(config, args.batch)
    fields = {"placement": args.placement, **({"store": args.store} if args.store else {})}
    plain_step, plain_update = in_memory(config, batch, args.steps)
    gc.collect()
    # An optimizer that steps in backward takes every gradient, so it has a model to itself.
    training = Training(config, batch, fields, "overlap")
    in_backward = Training(config, batch, fields, "in backward") if "in backward" in args.modes else training
    runs: dict[str, Callable[[], float]] = {
        mode: lambda mode=mode: (in_backward if mode == "in backward" else training).steps(mode, args.steps)
        for mode in (ALONE, *args.modes)
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in runs}
    with tqdm(total=args.rounds * len(runs), unit="block", disable=not sys.stderr.isatty()) as bar:
        for _, mode in in_turns(list(runs), args.rounds):
            bar.set_postfix_str(mode)
            seconds[mode].append(runs[mode]())
            bar.update()
    shares = {
        mode: [1 - alone / whole for alone, whole in zip(seconds[ALONE], seconds[mode], strict=True)]
        for mode in args.modes
    }
    return {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "plain": {"step": plain_step, "optimizer": plain_update},
        "seconds": seconds,
        "shares": shares,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="What the optimizer adds to forward and backward.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_gpt(parser, context=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of the optimizer")
    parser.add_argument("--placement", default="nvme", help="a preset of zinf_fx.Config")
    parser.add_argument("--store", metavar="DIR", help="in place of $ZINF_STORE or the user cache")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each mode in a round, after one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    check(options, args, "layers", "hidden", "heads", "context", "batch", "steps", "rounds")
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"GPT {args.layers} x {args.hidden}, {result['parameters']:,} parameters, bfloat16, {args.placement}")
    plain, seconds, shares = result["plain"], result["seconds"], result["shares"]
    rows = [["in memory", f"{plain['step']:.3f}", f"{plain['optimizer'] / plain['step']:.1%}", "", ""]]
    rows += [[ALONE, f"{median(seconds[ALONE]):.3f}", "", "", ""]]
    rows += [
        [
            mode,
            f"{median(seconds[mode]):.3f}",
            f"{median(shares[mode]):.1%}",
            f"{min(shares[mode]):.1%}",
            f"{max(shares[mode]):.1%}",
        ]
        for mode in args.modes
    ]
    headers = ["step", "seconds", "optimizer's\nshare", "least", "most"]
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 4)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
