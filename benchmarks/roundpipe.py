"""Simulate full fine-tuning of Llama 8B and Qwen3 32B on one RTX 4090, and compare it with what RoundPipe publishes
(arXiv 2604.27085).

    python benchmarks/roundpipe.py [--models "Llama 8B" "Qwen3 32B"] [--context 2048] [--all] [--json]

RoundPipe's artifact (ITcarrot/RoundPipe-artifact) has the tokens per second of one RTX 4090 (`exp/raw-data.csv`), and
the sequences of a step, of 2048 tokens each (`roundpipe/run.sh`). RoundPipe computes in fp16, accumulates in fp16 too,
recomputes the forward pass, divides the loss into chunks, and overlaps the optimizer with the next step.

The machine is `rtx-4090.toml` with 1 TB of host memory; the artifact asks for more than 800 GB. All model states live
in host memory. `rtx-4090.toml` has the peak of tensor cores that accumulate in fp32, 165.2 TFLOP/s. In fp16 they may
accumulate in fp16, with a peak of 330.3 TFLOP/s (NVIDIA Ada architecture white paper). Training reaches half of a peak
(`achievable` of `rtx-4090.toml`, which is assumed) or, as a bound, all of it. The CPU updates parameters as fast as
host memory gives and takes their states.

Plans differ in the sequences of a micro-batch, in how many micro-batches run each operator before the next one, in what
is saved for backward, and in the optimizer's states. The table has the fastest that fits, or of those within 1 % of it
the first; `--all` prints all. The head has tiles, so that logits are never whole. The optimizer's step overlaps the
next forward pass. Each model is planned at two depths, and extended by what each further layer adds. What isn't a
matrix product runs operation by operation, at the rate of device memory ("elementwise"): the simulator doesn't know
what a compiler fuses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tabulate import tabulate

import zinf_fx
from zinf_fx.adam import SPLIT, AdamStates, MasterForm, StateForm
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.placement.fit import fit_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.sizes import in_words

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import check
from gpt import default_dtype
from llama import Llama, LlamaConfig

DEPTHS = (2, 4)
TILE = "128MiB"
PLACEMENT = {"parameters": "host", "gradients": "host", "optimizer": "host", "activations": "host"}
TIE = 0.01
PEAKS = {"fp32": 165.2e12, "fp16": 330.3e12}
"""FLOP/s of fp16 matrix products, by what they accumulate in."""
RESOURCES = {"compute": "compute", "upload": "upload link", "download": "download link", "host": "host update"}


@dataclass(frozen=True)
class Model:
    """A model has the sequences of a step, and the tokens per second that RoundPipe publishes for it."""

    name: str
    config: LlamaConfig
    sequences: int
    published: float


MODELS = (
    Model("Llama 8B", LlamaConfig(), 256, 3142.17),
    Model("Qwen3 32B", LlamaConfig(64, 5120, 25600, 64, 8, 151936, head=128, normalised=True), 128, 740.46),
)


@dataclass(frozen=True)
class States:
    """The forms of the optimizer's states, and the dtype of the parameters, which is bf16 where masters are split."""

    name: str
    dtype: torch.dtype = torch.float16
    moments: StateForm | None = None
    master: MasterForm | None = None

    @property
    def of_element(self) -> AdamStates:
        return AdamStates(self.dtype.itemsize, self.moments, splits=self.master == SPLIT)


FP32 = States("fp32")
OTHER_STATES = (
    States("bf16", moments="bfloat16"),
    States("8-bit, split", torch.bfloat16, "8bit", SPLIT),
)


@dataclass(frozen=True)
class Choice:
    """A choice is what a plan is made with.

    Attributes:
        sequences: how many sequences a micro-batch has.
        micro_batches: how many micro-batches run each operator before the next one; a loop runs as often as a step
            has so many.
        activations: how many layers lie between two checkpoints, from which they are recomputed; or "offload" for all
            that is saved.
    """

    sequences: int
    micro_batches: int = 1
    activations: int | str = 1
    states: States = FP32

    def __str__(self) -> str:
        saved = "all saved" if self.activations == "offload" else "recomputed"
        return f"{self.micro_batches} x {self.sequences} sequences, {saved}, {self.states.name} states"


CHOICES = (Choice(8), Choice(16), Choice(32), Choice(4, 4), Choice(8, activations="offload"))


def plans_of(model: Model, choice: Choice, context: int) -> list[Plan]:
    """Return the plans of a model at both depths."""
    states = choice.states
    plans = []
    for layers in DEPTHS:
        with torch.device("meta"), default_dtype(states.dtype):
            module = Llama(replace(model.config, layers=layers))
            tokens = torch.zeros(choice.micro_batches * choice.sequences, context, dtype=torch.int64)
        plans.append(
            zinf_fx.export_plan(
                module,
                (tokens, tokens.clone()),
                placement=PLACEMENT,
                tile=TILE,
                activations=choice.activations,
                micro_batches=choice.micro_batches,
                state_dtype=states.moments,
                master_dtype=states.master,
            )
        )
    return plans


def machine(accumulation: str = "fp32", achievable: float | None = None) -> Hardware:
    """Return a machine of one RTX 4090 with 1 TB of host memory."""
    described = load("rtx-4090")
    host = replace(described.host, capacity=10**12)
    updates = {}
    for states in (FP32, *OTHER_STATES):
        nbytes = sum(states.of_element.bytes_each)
        updates[states.of_element.form] = 1 / host.seconds(nbytes, nbytes)
    peak = described.peak | {"float16": PEAKS[accumulation]}
    achievable = described.achievable if achievable is None else achievable
    return replace(described, host=host, updates=updates, peak=peak, achievable=achievable)


@dataclass(frozen=True)
class Step:
    """The figures of a step.

    Attributes:
        seconds: of the step.
        compute, upload, download, host: seconds for which each resource works.
        elementwise: seconds of compute for what isn't a matrix product.
        flops: FLOP of matrix products.
        device_memory, host_memory: bytes that are needed of each memory.
    """

    seconds: float
    compute: float
    upload: float
    download: float
    host: float
    elementwise: float
    flops: float
    device_memory: float
    host_memory: float

    @classmethod
    def of(cls, plan: Plan, hardware: Hardware, passes: int) -> Step:
        simulation = simulate_plan(plan, hardware, accumulate=passes)
        memories = fit_of(plan, hardware).memories
        busy = [simulation.busy[resource] for resource in RESOURCES]
        nbytes = sum(operator.other_bytes for graph in plan.graphs for operator in graph.operators)
        elementwise = passes * nbytes / hardware.device.read
        needed = [memories[tier].needed for tier in ("device", "host")]
        return cls(simulation.seconds, *busy, elementwise, simulation.flops, *needed)

    def extended(self, deeper: Step, times: float) -> Step:
        """Return this step with what `deeper` adds, `times` times."""
        pairs = zip(vars(self).values(), vars(deeper).values(), strict=True)
        return Step(*(fewer + times * (more - fewer) for fewer, more in pairs))


def simulated(model: Model, choice: Choice, plans: Sequence[Plan], hardware: Hardware, context: int) -> dict:
    """Return the row of a model: its step by the plans, and what limits it. A row whose model doesn't fit has no tokens
    per second."""
    passes = model.sequences // (choice.micro_batches * choice.sequences)
    times = (model.config.layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    fewer, more = (Step.of(plan, hardware, passes) for plan in plans)
    step = fewer.extended(more, times)
    row: dict = {"model": model.name, "plan": str(choice), "passes": passes, "published": model.published}
    row |= {"peak": hardware.peak[str(choice.states.dtype).removeprefix("torch.")], "share": hardware.achievable}
    row |= {"device_memory": step.device_memory, "host_memory": step.host_memory}
    for name, memory in (("device", hardware.device), ("host", hardware.host)):
        if (needed := row[f"{name}_memory"]) > memory.capacity:
            too_large = f"{name} memory: {in_words(int(needed))} of {in_words(memory.capacity)}"
            return row | {"tokens": None, "ratio": None, "limit": "memory", "left_out": too_large}
    tokens = passes * choice.micro_batches * choice.sequences * context / step.seconds
    busy = {name: getattr(step, resource) / step.seconds for resource, name in RESOURCES.items()}
    row |= {"seconds": step.seconds, "tokens": tokens, "ratio": tokens / model.published}
    row |= {"elementwise": step.elementwise / step.seconds, "flops": step.flops}
    return row | {"limit": max(busy, key=lambda name: busy[name]), "busy": busy}


def fastest(rows: Sequence[dict]) -> dict:
    """Return the row of the fewest seconds or, of those within a percent of it, the first."""
    least = min(row["seconds"] for row in rows)
    return next(row for row in rows if row["seconds"] <= (1 + TIE) * least)


def rows_of(model: Model, choices: Sequence[Choice], context: int) -> list[dict]:
    """Return the rows of all plans at the assumed share of both peaks, and of the fastest at all of each peak. The
    fastest choice is planned with `OTHER_STATES`, too."""
    plans: dict[str, tuple[Choice, list[Plan]]] = {}
    rows: list[dict] = []

    def add(choice: Choice) -> None:
        plans[str(choice)] = choice, plans_of(model, choice, context)
        accumulations = PEAKS if choice.states.dtype == torch.float16 else ["fp32"]  # bf16 has one peak
        rows.extend(simulated(model, *plans[str(choice)], machine(name), context) for name in accumulations)

    for choice in choices:
        add(choice)
    if fitting := [row for row in rows if row["tokens"] and row["peak"] == PEAKS["fp16"]]:
        choice, _ = plans[fastest(fitting)["plan"]]
        for states in OTHER_STATES:
            add(replace(choice, states=states))
    for accumulation, peak in PEAKS.items():
        if fitting := [row for row in rows if row["tokens"] and row["peak"] == peak and row["share"] < 1]:
            half = fastest(fitting)
            whole = simulated(model, *plans[half["plan"]], machine(accumulation, 1.0), context)
            rows.append(whole | {"share_for_published": share_for_published(half, whole)})
    return rows


def share_for_published(half: dict, whole: dict) -> float:
    """Return the share of a peak at which a plan is as fast as published, from steps at two shares. Matrix products
    take seconds in inverse proportion to the share, and the rest of a step takes the same at each."""
    products = (half["seconds"] - whole["seconds"]) / (1 / half["share"] - 1 / whole["share"])
    rest = whole["seconds"] - products / whole["share"]
    left = whole["ratio"] * whole["seconds"] - rest
    return products / left if left > 0 else math.inf


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence (2048)")
    parser.add_argument("--all", action="store_true", help="print all plans, and not the fastest ones alone")
    parser.add_argument("--json", action="store_true", help="print the figures of all plans as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    accepted = parser()
    options = accepted.parse_args(arguments)
    check(accepted, options, "context")
    models = [model for model in MODELS if model.name in options.models]
    rows = [row for model in models for row in rows_of(model, CHOICES, options.context)]
    if options.json:
        print(json.dumps(rows))
    else:
        print(table(rows, options.all))
    return 0


def table(rows: Sequence[dict], everything: bool = False) -> str:
    """Return the rows as text: the fastest plan of each model at each peak and share of it, or all plans."""
    hardware = machine()
    link, memory = hardware.upload.bandwidth / 1e9, hardware.host.read / 1e9
    peaks = ", ".join(f"{peak / 1e12:.1f} TFLOP/s with {name} accumulation" for name, peak in PEAKS.items())
    rates = ", ".join(f"{rate / 1e9:.2f} ({form})" for form, rate in hardware.updates.items())
    lines = [
        f"{hardware.name}, 1 TB of host memory. Peaks of fp16 products: {peaks}.",
        f"Each link has {link:.0f} GB/s, host memory {memory:.0f} GB/s. 1e9 parameters are updated a second: {rates}.",
        "",
    ]
    heads = ["model", "peak", "share", "plan", "tokens/s", "published", "ratio", "limit", "then", "elementwise"]
    by_peak: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["tokens"]:
            by_peak.setdefault((row["model"], row["peak"], row["share"]), []).append(row)
    shown = [row for group in by_peak.values() for row in (group if everything else [fastest(group)])]
    lines.append(tabulate([_cells(row) for row in shown], heads, disable_numparse=True, stralign="right"))
    left_out = dict.fromkeys(f"{row['model']}, {row['plan']}: {row['left_out']}" for row in rows if not row["tokens"])
    if left_out:
        lines += ["", "Left out, because they don't fit:", *left_out]
    lines.append("")
    for row in shown:
        if "share_for_published" in row:
            seconds = row["seconds"] * row["ratio"]  # of a step, as published
            products, needed = row["flops"] / seconds / row["peak"], row["share_for_published"]
            lines.append(
                f"{row['model']}, as published: matrix products do {products:.2f} of {row['peak'] / 1e12:.1f} TFLOP/s "
                f"over the step. The plan is as fast where they reach {needed:.2f}."
            )
    return "\n".join(lines)


def _cells(row: dict) -> list[str]:
    first, second = sorted(row["busy"].items(), key=lambda resource: -resource[1])[:2]
    busy = [f"{name}, {share:.0%}" for name, share in (first, second)]
    rates = [f"{row['tokens']:.0f}", f"{row['published']:.0f}", f"{row['ratio']:.2f}"]
    return [
        row["model"],
        f"{row['peak'] / 1e12:.1f}",
        f"{row['share']:.2f}",
        row["plan"],
        *rates,
        *busy,
        f"{row['elementwise']:.0%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
