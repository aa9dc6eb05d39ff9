"""Simulate micro-batches operator by operator and a loop over them, for GPTs of 65 and 175 billion parameters on one
A100, and compare their ratio with what GreedySnake publishes (arXiv 2512.17570).

    python benchmarks/greedysnake.py [--runs 65B 175B] [--sequences 1 2 4] [--drives 1 2 4] [--json]

Its abstract has ratios to ZeRO-Infinity, which loops over micro-batches, of throughput that more micro-batches don't
raise any more: 1.96 for 65 B and 2.53 for 175 B. It doesn't say what the machine's drives and links move, how long a
micro-batch is, or what is kept in host memory: all three decide the ratio, so that each is varied here. The machine is
`a100.toml`, with one to four of its drives. Both schedules are ours, on one simulator: parameters and optimizer states
live on NVMe, a layer's input in host memory, and gradients in either. The optimizer's step overlaps the next forward
pass in both.

Each model is planned at two depths, and extended by what each further layer adds. Its shape is that of LLaMA-65B
(Touvron et al. 2023, table 2) or GPT-3 (Brown et al. 2020, table 2.1), with the bytes' vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

import zinf_fx
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import Simulation, simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import check
from gpt import GPT, GPTConfig, default_dtype, example_batch

MACHINE, ITS_DRIVES = "a100", 4
DEPTHS = (2, 4)


@dataclass(frozen=True)
class Run:
    """A run is a model, with how many times ZeRO-Infinity's throughput GreedySnake publishes for it."""

    name: str
    layers: int
    hidden: int
    heads: int
    published: float


RUNS = (Run("65B", 80, 8192, 64, 1.96), Run("175B", 96, 12288, 96, 2.53))


def plan_of(run: Run, layers: int, gradients: str, micro_batches: int, batch: int, context: int) -> Plan:
    """Return the plan of a run with so many layers, for a batch of so many sequences."""
    config = GPTConfig(layers=layers, hidden=run.hidden, heads=run.heads, context=context)
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model, inputs = GPT(config), example_batch(config, batch)
    placement = {"parameters": "nvme", "gradients": gradients, "optimizer": "nvme", "activations": "host"}
    return zinf_fx.export_plan(model, inputs, placement=placement, activations=1, micro_batches=micro_batches)


def with_drives(hardware: Hardware, drives: int) -> Hardware:
    """Return the machine with so many of its drives."""
    share = drives / ITS_DRIVES
    nvme = hardware.nvme
    return replace(hardware, nvme=replace(nvme, read=share * nvme.read, write=share * nvme.write))


@dataclass(frozen=True)
class Step:
    """The seconds of a step, and for how many of them compute waits for the disk, and for the link to the host."""

    seconds: float
    disk: float
    link: float

    @staticmethod
    def of(simulation: Simulation) -> Step:
        stalled = simulation.stalled
        return Step(simulation.seconds, stalled["disk"], stalled["upload"] + stalled["download"])

    def extended(self, deeper: Step, times: float) -> Step:
        """Return this step with what `deeper` adds, `times` times."""
        pairs = zip(vars(self).values(), vars(deeper).values(), strict=True)
        return Step(*(fewer + times * (more - fewer) for fewer, more in pairs))

    @property
    def waits_for(self) -> str:
        """Say what compute waits for most, and the share of the step for which it does."""
        name = max(("disk", "link"), key=lambda name: getattr(self, name))
        share = getattr(self, name) / self.seconds
        return f"{name}, {share:.0%}" if share > 0.005 else "nothing"


def simulated(run: Run, gradients: str, sequences: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each number of drives: both schedules of a run whose micro-batches have so many sequences."""
    count, context = options.micro_batches, options.context
    times = (run.layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def plans(micro_batches: int, batch: int) -> list[Plan]:
        return [plan_of(run, layers, gradients, micro_batches, batch, context) for layers in DEPTHS]

    whole, parts = plans(count, count * sequences), plans(1, sequences)
    rows = []
    for drives in options.drives:
        hardware = with_drives(load(MACHINE), drives)
        fewer, more = (Step.of(simulate_plan(plan, hardware)) for plan in whole)
        vertical = fewer.extended(more, times)
        fewer, more = (Step.of(simulate_plan(plan, hardware, accumulate=count)) for plan in parts)
        loop = fewer.extended(more, times)
        row = {"run": run.name, "published": run.published, "gradients": gradients, "sequences": sequences}
        row |= {"drives": drives, "vertical": vertical.seconds, "loop": loop.seconds}
        row |= {"tokens": count * sequences * context / vertical.seconds, "ratio": loop.seconds / vertical.seconds}
        rows.append(row | {"vertical_waits": vertical.waits_for, "loop_waits": loop.waits_for})
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS], default=[run.name for run in RUNS])
    parser.add_argument("--gradients", nargs="+", choices=("host", "nvme"), default=["host", "nvme"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 2, 4], help="of a micro-batch (1 2 4)")
    parser.add_argument("--drives", nargs="+", type=int, default=[1, 2, 4], help="NVMe drives (1 2 4)")
    parser.add_argument("--micro-batches", type=int, default=32, help="of a step (32)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence (2048)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    accepted = parser()
    options = accepted.parse_args(arguments)
    check(accepted, options, "sequences", "drives", "micro_batches", "context")
    rows = [
        row
        for run in RUNS
        if run.name in options.runs
        for gradients in options.gradients
        for sequences in options.sequences
        for row in simulated(run, gradients, sequences, options)
    ]
    if options.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{load(MACHINE).name}, {options.micro_batches} micro-batches of so many sequences of {options.context} tokens"
    )
    heads = ["run", "published", "gradients", "sequences", "drives", "loop, s", "waits for", "vertical, s", "waits for"]
    print(
        tabulate([_cells(row) for row in rows], [*heads, "tokens/s", "ratio"], disable_numparse=True, stralign="right")
    )
    return 0


def _cells(row: dict) -> list[str]:
    names = [str(row[name]) for name in ("run", "published", "gradients", "sequences", "drives")]
    loop, vertical = ([f"{row[way]:.0f}", row[f"{way}_waits"]] for way in ("loop", "vertical"))
    return [*names, *loop, *vertical, f"{row['tokens']:.0f}", f"{row['ratio']:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
