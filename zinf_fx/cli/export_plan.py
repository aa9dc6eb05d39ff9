"""`zinf-fx export-plan TARGET -o FILE`: a model's plan, ahead of time."""

from __future__ import annotations

import argparse
from pathlib import Path

from zinf_fx.cli.planning import fields_of, planning_target
from zinf_fx.cli.target import build
from zinf_fx.config import Config
from zinf_fx.frontend.explain import plan_model
from zinf_fx.plan.hardware import load
from zinf_fx.plan.memory.accounting import phases
from zinf_fx.sizes import in_words


def run(options: argparse.Namespace) -> None:
    """Plan and write. Raises: ZinfError for whatever of the input can't be used."""
    fields = fields_of(options)
    Config.of(None, fields)  # bad options are refused before a model is built
    hardware = load(options.hardware) if options.hardware else None
    built = build(options.target)
    with planning_target(options) as ranks:
        planning = plan_model(*built, hardware=hardware, **ranks, **fields)
    plan = planning.only("a plan file")
    plan.save(options.output)
    for decided in planning.decision_texts:
        print(f"{decided}\n")
    operators = " + ".join(f"{len(graph.operators):,}" for graph in plan.graphs)
    moved = sum(traffic.nvme for _, traffic in phases(plan))
    size = in_words(Path(options.output).stat().st_size)
    print(f"{options.output}: {size}, {operators} operators, {in_words(moved)} of NVMe per step")
