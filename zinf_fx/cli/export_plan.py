"""`zinf-fx export-plan TARGET -o FILE`: a model's plan, ahead of time."""

from __future__ import annotations

import argparse
from pathlib import Path

from zinf_fx.cli.machine import described
from zinf_fx.cli.planning import check_output, plans_of_model
from zinf_fx.plan.memory.accounting import phases
from zinf_fx.sizes import in_words


def run(options: argparse.Namespace) -> None:
    """Plan and write. Raises: ZinfError for whatever of the input can't be used."""
    check_output(options)
    hardware = described(options.hardware) if options.hardware else None
    planning = plans_of_model(options, hardware=hardware)
    plan = planning.only("a plan file")
    plan.save(options.output)
    for decided in planning.decision_texts:
        print(f"{decided}\n")
    operators = " + ".join(f"{len(graph.operators):,}" for graph in plan.graphs)
    moved = sum(traffic.nvme for _, traffic in phases(plan))
    size = in_words(Path(options.output).stat().st_size)
    print(f"{options.output}: {size}, {operators} operators, {in_words(moved)} of NVMe per step")
