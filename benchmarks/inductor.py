"""Operators that Inductor compiles (`compute="inductor"`): how far their results are from those of PyTorch's kernels,
how long compiling takes for models of several depths, and a training step beside plain `torch.compile` in memory.

    python benchmarks/inductor.py                                       # all tables; the steps of 303 M parameters
    python benchmarks/inductor.py --tables errors compile               # minutes
    python benchmarks/inductor.py --tables steps --layers 4 --rounds 3  # a smaller model

Errors are those after some steps of SGD, of gradients in the first, relative to the largest; plain `torch.compile` is
there for comparison. Each compilation is a process of its own with a cache of its own, which is empty; the same again
finds what it compiled in files. Variants of the steps live in processes of their own, since zinf_fx sets how much freed
memory a process holds, and plain `torch.compile` is faster with that. They take turns of some steps in a row, of which
the first isn't timed: an optimizer's step goes on during the next forward, so that what the first one takes from the
step before its turn is missing, as what follows the last is. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import zinf_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from arguments import add_gpt, check
from gpt import GPT, GPTConfig, default_dtype, example_batch
from processes import answer_of
from train_step import machine
from turns import in_turns

WORKER = Path(__file__).with_name("inductor_worker.py")
TABLES = ("errors", "compile", "steps")
IN_MEMORY = "torch.compile"
Loss = Callable[..., Tensor]


def trained(name: str, dtype: torch.dtype, placement: str, store: Path, steps: int) -> list[list[Tensor]]:
    """Losses, gradients of the first step and parameters at the end, of a small GPT. `name`: what computes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = GPTConfig(layers=3, hidden=64, heads=4, context=32)
    with default_dtype(dtype):
        model = GPT(config)
    if name in ("eager", "inductor"):
        zinf_fx.offload(model, placement=placement, store=store)
        call: Loss = torch.compile(model, backend="zinf", options={"compute": name})
        optimizer = zinf_fx.optim.SGD(model.parameters(), lr=0.1)
    else:
        call = torch.compile(model, backend="aot_eager" if name == "aot_eager" else "inductor")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, gradients = [], []
    for number in range(steps):
        torch.manual_seed(number)
        loss = call(*example_batch(config, 4))
        loss.backward()
        if not gradients:
            gradients = [full(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses, gradients, [full(parameter.detach()) for parameter in model.parameters()]]


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def largest_error(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error, relative to the largest element of each tensor."""
    pairs = zip(computed, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in pairs)


def errors(args: argparse.Namespace) -> str:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, reference, placement in (
            (IN_MEMORY, "aot_eager", "-"),
            *(("inductor", "eager", placement) for placement in args.placements),
        ):
            with tempfile.TemporaryDirectory(dir=args.store) as store:
                expected, computed, again = (
                    trained(backend, dtype, placement, Path(store), args.error_steps)
                    for backend in (reference, name, name)
                )
            pairs = zip(chain(*computed), chain(*again), strict=True)
            same = all(torch.equal(first, second) for first, second in pairs)
            values = [
                f"{largest_error(tensors, references):.1e}"
                for tensors, references in zip(computed, expected, strict=True)
            ]
            rows.append([str(dtype).removeprefix("torch."), name, placement, *values, "yes" if same else "NO"])
    heads = ["", "", "placement", "losses", "first gradients", "parameters", "again the same"]
    return tabulate(rows, heads, disable_numparse=True)


def compile_times(args: argparse.Namespace) -> str:
    rows = []
    for name in (IN_MEMORY, *args.placements):
        for layers in args.depths:
            request = json.dumps({"name": name, "layers": layers, "store": args.store and str(args.store)})
            with tempfile.TemporaryDirectory() as cache:
                own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                first, second = (answer_of(request, WORKER, request, environment=own) for _ in range(2))
            seconds = [f"{first[key]:.1f}" for key in ("compiling", "rest")] + [f"{second['compiling']:.1f}"]
            rows.append([name, layers, *seconds, first["compiled"], second["compiled"], first["calls"]])
    heads = ["", "layers", "s to compile", "s to capture\nand plan", "s to compile,\nsecond process"]
    heads += ["graphs\ncompiled", "second\nprocess", "regions\nper step"]
    return tabulate(rows, heads, disable_numparse=True)


class Variant:
    """One model with its optimizer, trained in one way."""

    def __init__(self, placement: str, compute: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.in_memory = placement == IN_MEMORY
        config = GPTConfig(layers=args.layers, hidden=args.hidden, heads=args.heads, context=args.context)
        dtype = getattr(torch, args.dtype)
        if self.in_memory:
            with default_dtype(dtype):
                model = GPT(config)
            self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            self.loss: Loss = torch.compile(model)
        else:
            with default_dtype(dtype), zinf_fx.offloading(placement=placement, store=args.store):
                model = GPT(config)
            self.optimizer = zinf_fx.optim.AdamW(model.parameters())
            self.loss = torch.compile(model, backend="zinf", options={"compute": compute})
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.batch = example_batch(config, args.batch)
        self.first = self._step()
        self.turn(1)

    def turn(self, steps: int) -> float:
        """Median seconds of `steps` steps after one that isn't timed. Nothing goes on behind them when it returns."""
        self._step()
        seconds = median([self._step() for _ in range(steps)])
        if not self.in_memory:
            self.optimizer.finish()
        return seconds

    def _step(self) -> float:
        started = time.perf_counter()
        loss = self.loss(*self.batch)
        loss.item()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def serve(connection: Connection, placement: str, compute: str, args: argparse.Namespace) -> None:
    """Make a variant, and let it take a turn whenever a number of steps is received, until that is 0."""
    variant = Variant(placement, compute, args)
    connection.send((variant.parameters, variant.first))
    while count := connection.recv():
        connection.send(variant.turn(count))


class OwnProcess:
    """A variant in a process of its own, which waits between its turns."""

    def __init__(self, placement: str, compute: str, args: argparse.Namespace) -> None:
        self.name = f"{placement}, {compute}" if compute else placement
        spawned = multiprocessing.get_context("spawn")
        self._connection, theirs = spawned.Pipe()
        self._process = spawned.Process(target=serve, args=(theirs, placement, compute, args), daemon=True)
        self._process.start()
        theirs.close()
        self.parameters, self.first = self._answer()

    def turn(self, steps: int) -> float:
        """As that of the variant."""
        self._connection.send(steps)
        return self._answer()

    def end(self) -> None:
        self._connection.send(0)
        self._process.join()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self.name} ended; above is why") from None


def steps(args: argparse.Namespace) -> str:
    kinds = [(IN_MEMORY, ""), *((placement, compute) for placement in args.placements for compute in args.computes)]
    variants = [OwnProcess(*kind, args) for kind in kinds]
    rounds: list[dict[str, float]] = [{} for _ in range(args.rounds)]
    with tqdm(total=args.rounds * len(variants), unit="turn", disable=not sys.stderr.isatty()) as bar:
        for number, variant in in_turns(variants, args.rounds):
            rounds[number][variant.name] = variant.turn(args.steps)
            bar.update()
    for variant in variants:
        variant.end()
    rows = []
    for variant in variants:
        ratios = [by_name[variant.name] / by_name[IN_MEMORY] for by_name in rounds]
        seconds = median(by_name[variant.name] for by_name in rounds)
        cells = [f"{seconds:.3f}", f"{median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        rows.append([variant.name, *cells, f"{variant.first:.1f}"])
    title = (
        f"GPT {args.layers} x {args.hidden}, {variants[0].parameters:,} parameters, {args.dtype}, batch {args.batch} x "
        f"{args.context}, {torch.get_num_threads()} threads, {args.rounds} rounds\n"
    )
    heads = ["", "s per step", f"/ {IN_MEMORY}", "least to most", "first step s"]
    return title + tabulate(rows, heads, disable_numparse=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--placements", nargs="+", default=["device", "infinity-nvme"])
    parser.add_argument("--computes", nargs="+", choices=("eager", "inductor"), default=["inductor"], help="of steps")
    parser.add_argument("--depths", nargs="+", type=int, default=[6, 24, 48], help="layers of what is compiled")
    parser.add_argument("--error-steps", type=int, default=5, help="steps after which errors are looked at")
    parser.add_argument("--store", type=Path, help="directory of the store (default: zinf_fx's)")
    steps = parser.add_argument_group("the steps")
    add_gpt(steps, context=512)
    steps.add_argument("--batch", type=int, default=2)
    steps.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    steps.add_argument("--rounds", type=int, default=5)
    steps.add_argument("--steps", type=int, default=2, help="timed ones of each variant in each round")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    check(options, args, "error_steps", "layers", "hidden", "heads", "context", "batch", "rounds", "steps")
    print(f"{machine()}; torch {torch.__version__}")
    for name, table in (("errors", errors), ("compile", compile_times), ("steps", steps)):
        if name in args.tables:
            print(f"\n{table(args)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
