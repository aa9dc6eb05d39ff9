"""Plan and simulate the runs of ZeRO-Infinity's table 1 on the DGX-2 cluster that the paper describes.

    python benchmarks/dgx2.py [--runs 10B 50B 100B 5T 10T 20T] [--json]

Each model is planned ahead of time at two depths, with its own hidden size, ranks, placement and checkpoints, and a
simulated step is extended to the whole depth: from one depth to the other every layer adds the same. Figures are
TFLOP/s per GPU, recomputation counted, as the paper counts.

- off, on: a simulated step with nothing overlapped, at the least peak that the paper measured (62 TFLOP/s), and with
  the plan's overlap, at the greatest (78): the ends of table 4's range. 70, its average, is between them.
- 7.7: the same seconds, combined as section 7.7 does: 1 less the shares of a step that the three states take, each
  looked at as if it were alone with computing, times 62; or times 78 and the speedup that overlap gives, here the
  simulator's.

The optimizer's step overlaps with nothing, as section 4.2 has it. Model parallelism is left out, as in section 7.7.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from tabulate import tabulate

import zinf_fx
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.batch import with_batch
from zinf_fx.plan.simulation.event_graph import RESOURCES, Job, Resource
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT, GPTConfig, default_dtype, example_batch

K = 1024  # "K for 1024" (table 1)
HEAD = 128  # elements of one attention head, as in figure 2a for 64K
LEAST, AVERAGE, MOST = 62e12, 70e12, 78e12  # measured without communication (section 4.2)
ON_DEVICE = {"parameters": "device", "gradients": "device", "optimizer": "device"}
ON_HOST = {"parameters": "host", "gradients": "host", "optimizer": "nvme", "activations": "host"}
ON_NVME = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme", "activations": "host"}


@dataclass(frozen=True)
class Run:
    """A run is a row of table 1.

    Attributes:
        hidden: the hidden size in K.
        batch: sequences per GPU.
        interval: layers between two checkpoints (ci).
        printed: table 4's least, greatest and measured TFLOP/s.
        over: the TFLOP/s that all runs on one node are over, as section 7.4 says.
    """

    name: str
    nodes: int
    layers: int
    hidden: int
    batch: Fraction
    placement: dict[str, str]
    interval: int = 1
    printed: tuple[float, float, float] | None = None
    over: float | None = None


RUNS = (
    Run("10B", 1, 50, 4, Fraction(8), ON_DEVICE, interval=4, over=40),
    Run("50B", 1, 62, 8, Fraction(26), ON_HOST, over=40),
    Run("100B", 1, 125, 8, Fraction(24), ON_HOST, over=40),
    Run("5T", 32, 174, 48, Fraction(3), ON_NVME, printed=(39, 63.82, 44)),
    Run("10T", 32, 200, 64, Fraction(2), ON_NVME, printed=(32, 52.22, 43)),
    Run("20T", 32, 205, 88, Fraction(5, 4), ON_NVME, printed=(21.08, 34.73, 34)),
)


@dataclass(frozen=True)
class Figures:
    """The figures of one step.

    Attributes:
        seconds: of the step.
        flops: FLOP of the step.
        computing, between_devices, optimizer, checkpoints: seconds of its jobs.
        waited: seconds for which forward and backward waited for each resource.
    """

    seconds: float
    flops: float
    computing: float
    between_devices: float
    optimizer: float
    checkpoints: float
    waited: dict[Resource, float]

    @property
    def rate(self) -> float:
        """Return the FLOP per second."""
        return self.flops / self.seconds

    @property
    def efficiency(self) -> float:
        """Return 1 less the shares of a step that the states take, each alone with computing (equation 2 and section
        7.7)."""
        states = (self.between_devices, self.optimizer, self.checkpoints)
        return 1 - sum(moving / (moving + self.computing) for moving in states)

    def extended(self, deeper: Figures, steps: float) -> Figures:
        """Return this step with what `deeper` adds, `steps` times."""
        own, theirs = vars(self), vars(deeper)
        grown = {name: figure + steps * (theirs[name] - figure) for name, figure in own.items() if name != "waited"}
        waited = {name: seconds + steps * (deeper.waited[name] - seconds) for name, seconds in self.waited.items()}
        return Figures(**grown, waited=waited)


def plan_of(run: Run, layers: int) -> Plan:
    """Return the plan of a run with so many layers, for four times its batch."""
    config = GPTConfig(layers=layers, hidden=run.hidden * K, heads=run.hidden * K // HEAD, context=K)
    with torch.device("meta"), default_dtype(torch.float16):
        model, inputs = GPT(config), example_batch(config, batch=int(4 * run.batch))
    ranks = run.nodes * load("dgx-2").ranks_per_node
    return zinf_fx.export_plan(model, inputs, placement=run.placement, activations=run.interval, world_size=ranks)


def figures(plan: Plan, run: Run, hardware: Hardware, in_turn: bool = False) -> Figures:
    """Return the figures of a simulated step of a plan. `in_turn`: nothing overlaps."""
    simulation = simulate_plan(with_batch(plan, run.batch), hardware, in_turn=in_turn, overlap=False)
    activations = {tile.label for graph in plan.graphs for tile in graph.tiles if tile.activation}

    def seconds(wanted: Callable[[Job], bool]) -> float:
        return sum(job.seconds for job in simulation.jobs if wanted(job))

    waited = dict.fromkeys(RESOURCES, 0.0)
    for stall in simulation.stalls():
        if not stall.before.startswith("update"):  # the optimizer's share is `optimizer`
            for job, of_job in stall.waited_for:
                waited[job.resource] += of_job
    return Figures(
        simulation.seconds,
        simulation.flops,
        seconds(lambda job: job.kind in ("forward", "backward")),
        seconds(lambda job: job.resource == "link"),
        seconds(lambda job: job.kind in ("read_states", "update", "write_states")),
        seconds(lambda job: job.subject in activations),
        waited,
    )


def simulated(run: Run) -> dict[str, object]:
    """Return the row of a run: its TFLOP/s, and what computing waits for."""
    depths = (2 * run.interval, 4 * run.interval)
    plans = [plan_of(run, layers) for layers in depths]
    steps = (run.layers - depths[0]) / (depths[1] - depths[0])

    def whole(peak: float, in_turn: bool = False) -> Figures:
        described = load("dgx-2").with_ranks(plans[0].world_size)
        hardware = replace(described, achievable=peak / described.peak["float16"])
        fewer, more = (figures(plan, run, hardware, in_turn) for plan in plans)
        return fewer.extended(more, steps)

    off, on = whole(LEAST, in_turn=True), whole(MOST)
    average = whole(AVERAGE)
    apart = whole(AVERAGE, in_turn=True)
    speedup = whole(MOST, in_turn=True).seconds / on.seconds
    waits = max(average.waited, key=lambda name: average.waited[name])
    return {
        "run": run.name,
        "printed": run.printed,
        "over": run.over,
        "off": off.rate / 1e12,
        "on": on.rate / 1e12,
        "average": average.rate / 1e12,
        "least": LEAST * apart.efficiency / 1e12,
        "most": MOST * apart.efficiency * speedup / 1e12,
        "waits_for": waits if average.waited[waits] > 0.005 * average.seconds else None,
        "waited": average.waited[waits] / average.seconds,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=[run.name for run in RUNS], default=[run.name for run in RUNS])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    rows = [simulated(run) for run in RUNS if run.name in options.runs]
    if options.json:
        print(json.dumps(rows))
        return
    heads = ["run", "paper", "actual", "off at 62", "at 70", "on at 78", "7.7 least", "7.7 most", "computing waits for"]
    print(tabulate([_cells(row) for row in rows], headers=heads, disable_numparse=True, stralign="right"))


def _cells(row: dict) -> list[str]:
    paper = f"{row['printed'][0]:g} to {row['printed'][1]:g}" if row["printed"] else f"over {row['over']:g}"
    rates = [f"{row[name]:.1f}" for name in ("off", "average", "on", "least", "most")]
    waits = f"{row['waits_for']}, {row['waited']:.0%}" if row["waits_for"] else "nothing"
    return [row["run"], paper, f"{row['printed'][2]:g}" if row["printed"] else "", *rates, waits]


if __name__ == "__main__":
    main()
