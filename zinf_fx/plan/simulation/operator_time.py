"""Estimate how long each operator of a plan computes on described hardware (a roofline: Williams et al. 2009)."""

from __future__ import annotations

from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Operator
from zinf_fx.plan.simulation.event_graph import Compute


def compute_seconds(plan: Plan, hardware: Hardware) -> Compute:
    """Return the seconds of every operator. Raises: ConfigError where the hardware has no peak for an operator's
    dtype."""
    return {
        (graph.kind, operator.index): seconds_of_operator(operator, hardware)
        for graph in plan.graphs
        for operator in graph.operators
    }


def seconds_of_operator(operator: Operator, hardware: Hardware) -> float:
    """Return the seconds of an operator's kernels, or of launching them where that takes longer."""
    return max(_of_kernels(operator, hardware), operator.kernels * hardware.launch)


def decided_by_launches(plan: Plan, hardware: Hardware) -> int:
    """Count the operators that take as long as launching their kernels."""
    operators = (operator for graph in plan.graphs for operator in graph.operators)
    return sum(operator.kernels * hardware.launch > _of_kernels(operator, hardware) for operator in operators)


def _of_kernels(operator: Operator, hardware: Hardware) -> float:
    """Return the seconds of an operator's kernels. Matrix products take the time of their arithmetic or of their bytes,
    whichever is longer; all else, which runs operation by operation, takes the time of its bytes."""
    memory = hardware.device.read
    products = operator.product_bytes / memory
    if operator.dtype is not None:
        products = max(products, operator.flops / hardware.achieved(str(operator.dtype).removeprefix("torch.")))
    return products + operator.other_bytes / memory
