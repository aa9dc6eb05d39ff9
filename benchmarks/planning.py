"""How long planning takes, and how much memory, by a model's depth; and what reading and simulating the plan take.

    python benchmarks/planning.py [--layers 8 32 128] [--hidden 25600] [--ranks 512] [--placement infinity-nvme]

Nothing of the model is there: it is planned on the meta device, each depth in a process of its own. The processor's
seconds per layer are those that a depth takes more than the one above it, for each layer that it has more: they stay
the same where planning takes time in proportion to depth.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from tabulate import tabulate

import zinf_fx
from zinf_fx.plan.hardware import load
from zinf_fx.plan.show.html import to_html
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpt import GPT, GPTConfig, default_dtype, example_batch
from processes import answer_of

HEAD = 160  # elements of one attention head
MACHINE = "dgx-2"


def measure(layers: int, hidden: int, ranks: int, placement: str) -> dict[str, float]:
    """Seconds, bytes and counts of one depth."""
    config = GPTConfig(layers=layers, hidden=hidden, heads=max(hidden // HEAD, 1), context=1024)
    with torch.device("meta"), default_dtype(torch.float16):
        model, batch = GPT(config), example_batch(config, batch=1)
    started, computed = time.perf_counter(), time.process_time()
    plan = zinf_fx.export_plan(model, batch, world_size=ranks, placement=placement)
    exported, cpu = time.perf_counter() - started, time.process_time() - computed
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        plan.save(path)
        nbytes = path.stat().st_size
        started = time.perf_counter()
        again = zinf_fx.load_plan(path)
        loaded = time.perf_counter() - started
    started = time.perf_counter()
    hardware = load(MACHINE).with_ranks(ranks)
    simulation = simulate_plan(again, hardware)
    simulation.stalls()
    simulated = time.perf_counter() - started
    return {
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": sum(len(graph.operators) for graph in plan.graphs),
        "export": exported,
        "cpu": cpu,
        "peak": peak,
        "file": nbytes,
        "load": loaded,
        "simulate": simulated,
        "html": len(to_html(again, simulation, hardware, "plan")),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--hidden", type=int, default=25_600)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--placement", default="infinity-nvme")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.layers[0], options.hidden, options.ranks, options.placement)))
        return
    same = ["--hidden", str(options.hidden), "--ranks", str(options.ranks), "--placement", options.placement]
    rows = [
        answer_of(f"planning {layers} layers", __file__, "--one", "--layers", str(layers), *same)
        for layers in sorted(set(options.layers))
    ]
    for shallower, row in zip([None, *rows], rows, strict=False):
        if shallower is not None:
            row["per_layer"] = (row["cpu"] - shallower["cpu"]) / (row["layers"] - shallower["layers"])
    if options.json:
        print(json.dumps(rows))
        return
    print(f"GPT of {options.hidden:,} hidden, {options.ranks} ranks, {options.placement}")
    print(tabulate([_cells(row) for row in rows], headers=_HEADS, disable_numparse=True, stralign="right"))


_HEADS = [
    "layers",
    "parameters",
    "operators",
    "export, s",
    "CPU s/layer",
    "peak, MiB",
    "file, MiB",
    "load, s",
    "simulate, s",
]


def _cells(row: dict[str, float]) -> list[str]:
    per_layer = f"{row['per_layer']:.3f}" if "per_layer" in row else ""
    sizes = [f"{row[name] / 2**20:.1f}" for name in ("peak", "file")]
    return [
        str(row["layers"]),
        f"{row['parameters'] / 1e9:,.1f} B",
        f"{row['operators']:,}",
        f"{row['export']:.1f}",
        per_layer,
        *sizes,
        f"{row['load']:.2f}",
        f"{row['simulate']:.2f}",
    ]


if __name__ == "__main__":
    main()
