"""`zinf-fx simulate TARGET --hardware NAME`: how long a step takes, and what it waits for."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from zinf_fx.cli.arguments import saving_of
from zinf_fx.cli.machine import described
from zinf_fx.cli.planning import plans_of_target
from zinf_fx.config import parse_count, shortened
from zinf_fx.errors import ConfigError, PlanError
from zinf_fx.frontend.explain import Planning
from zinf_fx.plan.checkpoint_bytes import checkpoint_sizes, checkpoints
from zinf_fx.plan.hardware import THIS_MACHINE, Hardware
from zinf_fx.plan.placement.fit import Fit, fit_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.show.checkpoint_bytes import checkpoints_text
from zinf_fx.plan.simulation.batch import batch_of, with_batch
from zinf_fx.plan.simulation.operator_time import decided_by_launches
from zinf_fx.plan.simulation.simulate import Simulation, Stall, simulate_plan
from zinf_fx.plan.simulation.timeline import slices
from zinf_fx.sizes import in_words
from zinf_fx.tables import table

_STALLS = 5
_LARGEST_SWEEP = 64


def run(options: argparse.Namespace) -> None:
    """Print what a simulated step does. Raises: ZinfError for whatever of the input can't be used."""
    batches = _batches(options.sweep)
    accumulate, every = parse_count(options.accumulate, "accumulate"), saving_of(options)
    machine = described(options.hardware)
    # What is measured holds for the batch that it was measured with.
    timed = options.hardware == THIS_MACHINE and batches is None
    planned = plans_of_target(options, timed, machine)
    plan = planned.only("a simulation")
    hardware = machine().with_ranks(plan.world_size)
    how: dict[str, Any] = {"in_turn": options.no_overlap, "overlap": options.overlap}
    how |= {"accumulate": accumulate, "in_backward": options.in_backward}
    if batches is not None:
        plans = {batch: with_batch(plan, batch) for batch in batches}
        sweep = {b: (simulate_plan(plan, hardware, **how), fit_of(plan, hardware)) for b, plan in plans.items()}
        text = json.dumps([{"batch": b} | _data(*p) for b, p in sweep.items()]) if options.json else _sweep_table(sweep)
        print(text if options.json else f"{_title(planned, plan, hardware, accumulate)}\n\n{text}")
        return
    simulation = simulate_plan(plan, hardware, planned.seconds[0] if planned.seconds else None, **how)
    saves, fit = checkpoints(checkpoint_sizes(plan), hardware, **every), fit_of(plan, hardware)
    if options.json:
        decision = {"decision": asdict(planned.decision)} if planned.decision is not None else {}
        decision |= {"divisions": [*map(asdict, planned.divisions)]} if planned.divisions else {}
        timeline = {"timeline": [asdict(piece) for piece in slices(plan, simulation)]}
        print(json.dumps(_data(simulation, fit) | decision | {"saves": asdict(saves)} | timeline))
    else:
        launches = 0 if planned.seconds else decided_by_launches(plan, hardware)
        parts = [_title(planned, plan, hardware, accumulate), _report(simulation, launches), _memories(fit)]
        parts += [checkpoints_text(saves)] if saves.of_one.states else []
        print("\n\n".join(parts))


def _title(planned: Planning, plan: Plan, hardware: Hardware, accumulate: int) -> str:
    decided = "".join(f"{text}\n\n" for text in planned.decision_texts)
    operators = " + ".join(f"{len(graph.operators):,} {graph.kind}" for graph in plan.graphs)
    times = f", {accumulate} times before the optimizer's step" if accumulate > 1 else ""
    return f"{decided}A step of {operators} operators on {hardware.name}, batch {_batch_text(plan)}{times}, simulated"


def _batch_text(plan: Plan) -> str:
    try:
        return str(batch_of(plan))
    except PlanError:  # inputs without a dimension in common: the figure is for people only
        return "as planned"


def _batches(text: str | None) -> list[int] | None:
    if text is None:
        return None
    name, equals, values = text.partition("=")
    parts = values.split(",")
    if name != "batch" or not equals or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"sweep={shortened(text)} is not accepted; give batch= and sizes, such as batch=1,2,4,8")
    if len(parts) > _LARGEST_SWEEP:
        raise ConfigError(f"sweep={shortened(text)} has {len(parts)} sizes; at most {_LARGEST_SWEEP} are accepted")
    return [parse_count(part, "batch") for part in parts]


def _report(simulation: Simulation, launches: int) -> str:
    """`launches`: the operators that take as long as launching their kernels."""
    rate = simulation.flops_per_second / 1e12
    critical, stalled = simulation.critical_seconds, simulation.stalled
    lines = [f"step {simulation.seconds:.4g} s, {rate:.4g} TFLOP/s per device (recomputation included)"]
    if launches:
        lines.append(
            f"{launches:,} operators take as long as launching their kernels: a larger batch costs them little"
        )
    lines.append("")
    rows = [
        [name, f"{share:.1%}", f"{critical[name]:.4g}", f"{stalled[name]:.4g}"]
        for name, share in simulation.utilisation.items()
        if share
    ]
    headers = ["resource", "busy", "s of the critical path", "s that compute waited for it"]
    lines.append(table(rows, headers))
    if stalls := _longest_first(simulation):
        lines += ["", f"The longest of {len(stalls)} times that compute waited:"]
        for stall in stalls[:_STALLS]:
            job, seconds = max(stall.waited_for, key=lambda job_and_seconds: job_and_seconds[1])
            lines.append(f"  {stall.seconds:.4g} s before {stall.before}: {seconds:.4g} s of it for {job.name}")
    return "\n".join(lines)


def _memories(fit: Fit) -> str:
    rows = [
        [
            tier if tier != "device" or "host" in fit.memories else "device and host",
            in_words(memory.needed),
            in_words(memory.values) if memory.values else "",
            in_words(memory.capacity),
            "yes" if memory.fits else f"no: {in_words(memory.needed - memory.capacity)} too much",
        ]
        for tier, memory in fit.memories.items()
    ]
    fits = "It fits" if fit.refused is None else f"It doesn't fit: {fit.refused}"
    return f"{fits}.\n\n{table(rows, ['memory of a rank', 'needed', 'values computed with', 'there is', 'fits'])}"


def _longest_first(simulation: Simulation) -> list[Stall]:
    return sorted(simulation.stalls(), key=lambda stall: -stall.seconds)


def _sweep_table(sweep: dict[int, tuple[Simulation, Fit]]) -> str:
    rows = []
    for batch, (simulation, fit) in sweep.items():
        waited, seconds = max(simulation.stalled.items(), key=lambda item: item[1])
        most = f"{waited} ({seconds / simulation.seconds:.0%})" if seconds else "nothing"
        busy = [f"{share:.0%}" for share in simulation.utilisation.values()]
        rows.append([batch, f"{simulation.seconds:.4g}", f"{simulation.flops_per_second / 1e12:.4g}", *busy, most])
        rows[-1].append(", ".join(f"not {tier}" for tier, memory in fit.memories.items() if not memory.fits) or "yes")
    names = next(iter(sweep.values()))[0].utilisation
    return table(rows, ["batch", "s per step", "TFLOP/s per device", *names, "compute waits for", "fits"])


def _data(simulation: Simulation, fit: Fit) -> dict[str, object]:
    return {
        "fits": fit.refused is None,
        "memory": {tier: asdict(memory) | {"fits": memory.fits} for tier, memory in fit.memories.items()},
        "seconds": simulation.seconds,
        "flops": simulation.flops,
        "flops_per_second": simulation.flops_per_second,
        "utilisation": simulation.utilisation,
        "critical_seconds": simulation.critical_seconds,
        "stalled_seconds": simulation.stalled,
        "stalls": [
            {"before": stall.before, "seconds": stall.seconds, "waited_for": {j.name: s for j, s in stall.waited_for}}
            for stall in _longest_first(simulation)
        ],
    }
