"""How many chunks of the optimizer's step a plan has room for at a time.

Three are enough while one is updated: another is read, and another written. With the optimizer's step, forward has most
of what a training step moves, though, and where the disk is the limit, backward leaves it idle. What forward left to be
written, and what the next step reads of states, can be moved then, through room for more chunks.
"""

from __future__ import annotations

from math import ceil

from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import CHUNKS, GraphSchedule, Operator
from zinf_fx.plan.update import costs_of

# Without a budget, a plan takes no more: of the default size, they take 2 GiB of bf16 parameters and fp32 states.
_MOST = 16


def chunks_wanted(plan: Plan, rates: Rates) -> int:
    """For how many chunks of a plan's update room is of any use; no more than half of all, so that they are a part of
    the step."""
    of_phase = dict(phases(plan))
    if (step := of_phase.get("optimizer")) is None:
        return CHUNKS
    costs = costs_of(plan, plan.update)
    forward, backward = plan.graphs
    update = 2 * sum(cost.states for cost in costs) / rates.memory
    waits = _disk(of_phase["forward"] + step, rates) - _computing(forward, rates) - update
    idle = _computing(backward, rates) - _disk(of_phase["backward"], rates)
    ahead = (costs[0].read - costs[0].gradients) / rates.disk_read  # seconds
    if not ahead or min(waits, idle) <= 0:
        return CHUNKS
    wanted = min(CHUNKS + ceil(min(waits, idle) / ahead), len(costs) // 2)
    return max(wanted if plan.config.host_memory is not None else min(wanted, _MOST), CHUNKS)


def _disk(traffic: Traffic, rates: Rates) -> float:
    """Seconds of the disk."""
    return traffic.nvme_to_host / rates.disk_read + traffic.host_to_nvme / rates.disk_write


def _computing(graph: GraphSchedule, rates: Rates) -> float:
    """Seconds of what computes."""

    def seconds(operator: Operator) -> float:
        return max(operator.flops / rates.flops, (operator.product_bytes + operator.other_bytes) / rates.memory)

    return sum(map(seconds, graph.operators))
