"""What a training step costs besides arithmetic: models of many tensors that are so small that only the host's work is
seen, on every placement, beside plain PyTorch.

    python benchmarks/overhead.py                                     # a GPT of 292 parameter tensors, a minute
    python benchmarks/overhead.py --model experts                     # 5,000 parameter tensors of 32 x 32
    python benchmarks/overhead.py --model lora                        # adapters over a frozen base

All variants live in one process with one thread and take some steps in turn, so that a machine that slows down for a
while slows all of them; what goes on behind the last of these is waited for, and counted with the optimizer. Ratios
are taken within a round, to `aot_eager` with PyTorch's fused AdamW; the table has their medians. `events` are the
plan's, `calls` the Python functions that are called, `requests` the transfers that the operating system was given, each
in one step. In the first one, the model is captured and compiled; of its seconds, `planned` are those of the passes,
PyTorch's partitioner among them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import zinf_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from frozen_worker import adapt
from gpt import GPT, GPTConfig
from train_step import machine
from turns import in_turns

IN_MEMORY = ("eager", "aot_eager")
PLACEMENTS = ("device", "host", "nvme", "infinity-nvme")
REFERENCE = "aot_eager"
PARTS = ("forward", "backward", "optimizer")
LOG = logging.getLogger("zinf_fx.frontend.capture")


class Planning(logging.Handler):
    """Adds up the seconds for which graphs are planned, in a block."""

    seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self.seconds += getattr(record, "planning_seconds", 0.0)

    def __enter__(self) -> Planning:
        LOG.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        LOG.removeHandler(self)


class Experts(nn.Module):
    """`count` linear layers of 32 x 32 in a mixture where every expert sees every token; biases too."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.experts), 50):
            x = x + torch.stack([expert(x) for expert in self.experts[first : first + 50]]).mean(0)
        return x.square().mean()


def gpt(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    config = GPTConfig(layers=layers, hidden=64, heads=4, context=16)
    return GPT(config), (torch.randint(0, 256, (1, 16)), torch.randint(0, 256, (1, 16)))


def lora(layers: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, batch = gpt(layers)
    return adapt(model, rank=4), batch


def experts(count: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Experts(count), (torch.randn(4, 32),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": lambda: gpt(24),
    "lora": lambda: lora(24),
    "experts": lambda: experts(2500),
}


class Variant:
    """One model with its optimizer, trained in one way."""

    def __init__(self, name: str, model: str, store: Path | None, pack: str | None) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model, self.batch = MODELS[model]()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.tensors = sum(1 for _ in self.model.parameters())
        if name in IN_MEMORY:
            self.optimizer = torch.optim.AdamW(trained, fused=True)
            self.loss = self.model if name == "eager" else torch.compile(self.model, backend=name)
        else:
            zinf_fx.offload(self.model, placement=name, pack=pack, **({"store": store} if store else {}))
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = zinf_fx.optim.AdamW(trained)
            self.loss = torch.compile(self.model, backend="zinf")
        started = time.perf_counter()
        with Planning() as planning:
            self.step()
        self.first, self.planned = time.perf_counter() - started, planning.seconds
        self.step()

    def step(self) -> dict[str, float]:
        """Take a step. Returns the seconds of each of its parts."""
        marks = [time.perf_counter()]
        loss = self.loss(*self.batch)
        if isinstance(self.model, GPT):
            loss.item()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return {part: end - begin for part, (begin, end) in zip(PARTS, pairwise(marks), strict=True)}

    def finish(self) -> float:
        """Wait for what of the last step still goes on, which would else go on in another variant's. Returns the
        seconds."""
        started = time.perf_counter()
        if self.name not in IN_MEMORY:
            self.optimizer.finish()
        return time.perf_counter() - started

    def requests(self) -> int:
        """Transfers that the operating system was given so far."""
        if self.name in IN_MEMORY:
            return 0
        store = next(self.model.parameters()).stored.tiers.store_in_use
        return store.counters().transfers if store is not None else 0

    def events(self) -> int:
        """Events of the plan: what one step does with tiles."""
        if self.name in IN_MEMORY:
            return 0
        with zinf_fx.record(self.model) as recording:
            self.step()
        return sum(len(graph.events) for plan in recording.plans for graph in plan.graphs)

    def counts(self) -> dict[str, int]:
        """Events, calls of Python functions and transfers of one step."""
        self.step()  # after those of other variants
        self.finish()
        calls, before = 0, self.requests()

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            self.step()
        finally:
            sys.setprofile(None)
        self.step()
        self.finish()
        return {"events": self.events(), "calls": calls, "requests": (self.requests() - before) // 2}


def measure(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    LOG.setLevel(logging.DEBUG)
    variants = [Variant(name, args.model, args.store, args.pack) for name in (*IN_MEMORY, *args.placements)]
    rounds: list[dict[str, dict[str, float]]] = [{} for _ in range(args.rounds)]
    with tqdm(total=args.rounds * len(variants), unit="turn", disable=not sys.stderr.isatty()) as bar:
        for number, variant in in_turns(variants, args.rounds):
            steps = [variant.step() for _ in range(args.steps)]
            steps[-1]["optimizer"] += variant.finish()
            rounds[number][variant.name] = {part: sum(step[part] for step in steps) / args.steps for part in PARTS}
            bar.update()
    rows = []
    for variant in variants:
        mine = [by_variant[variant.name] for by_variant in rounds]
        ratios = [sum(by_variant[variant.name].values()) / sum(by_variant[REFERENCE].values()) for by_variant in rounds]
        rows.append(
            {
                "variant": variant.name,
                **{part: median(seconds[part] for seconds in mine) for part in PARTS},
                "step": median(sum(seconds.values()) for seconds in mine),
                "ratio": median(ratios),
                "first step": variant.first,
                "planned": variant.planned,
                **variant.counts(),
            }
        )
    return {"model": args.model, "tensors": variants[0].tensors, "rounds": args.rounds, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--placements", nargs="+", default=list(PLACEMENTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="of each variant in a round (default: %(default)s)")
    parser.add_argument(
        "--pack", default="auto", help="largest pack of small parameters, or none (default: %(default)s)"
    )
    parser.add_argument("--store", type=Path, help="directory of the store (default: zinf_fx's)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    args.pack = None if args.pack == "none" else args.pack
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(f"{args.model}: {result['tensors']} parameter tensors, {args.rounds} rounds; {machine()}")
    heads = ["", *(f"{part} ms" for part in (*PARTS, "step")), f"/ {REFERENCE}", "first step s", "planned s"]
    rows = []
    for variant in result["variants"]:
        milliseconds = [f"{1e3 * variant[part]:.1f}" for part in (*PARTS, "step")]
        counted = [variant["events"], variant["calls"], variant["requests"]]
        once = [f"{variant['first step']:.1f}", f"{variant['planned']:.1f}"]
        rows.append([variant["variant"], *milliseconds, f"{variant['ratio']:.2f}", *once, *counted])
    heads += ["events", "calls", "requests"]
    print(tabulate(rows, heads, disable_numparse=True, colalign=["left"] + ["right"] * 10))


if __name__ == "__main__":
    main()
