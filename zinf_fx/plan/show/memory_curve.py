"""Memory over a step as charts, operator by operator: what is in flight, and what the host arena holds."""

from __future__ import annotations

from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.memory.use import arena_by_operator, staying_on_device
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, GraphSchedule
from zinf_fx.plan.show.curve import Curve, Glyphs
from zinf_fx.sizes import in_words


def in_flight(plan: Plan, graph: GraphSchedule) -> Curve:
    """Bytes on the device, and stacked on them those still in host memory. The budget of both is what `device_memory`
    leaves beside what is on the device throughout, and the activations that stay there for backward."""
    budget = plan.config.device_memory
    if budget is not None:
        budget -= staying_on_device(plan)
    of_graph = flows(plan, graph)
    on_device, in_host = [flow.device for flow in of_graph], [flow.host for flow in of_graph]
    return Curve(on_device, in_host, budget=budget, first=PROLOGUE)


def host_arena_curve(plan: Plan, graph: GraphSchedule) -> Curve:
    """Bytes of the host arena, whose budget is `host_memory`."""
    return Curve(arena_by_operator(plan, graph), budget=plan.config.host_memory, first=PROLOGUE)


def render_curves(plan: Plan, graph: GraphSchedule, glyphs: Glyphs, width: int) -> list[str]:
    """A chart for each memory, under a line that says what it shows; none for a memory that holds nothing."""
    device, host = in_flight(plan, graph), host_arena_curve(plan, graph)
    full, above = glyphs.fills[-1], glyphs.above
    parts = (
        (f"device memory in flight by operator ({full}; {above}: still in host memory)", device),
        ("host arena by operator", host),
    )
    return [f"{graph.kind}, {_title(what, curve)}\n{curve.draw(glyphs, width)}" for what, curve in parts if curve.peak]


def _title(what: str, curve: Curve) -> str:
    operator = PROLOGUE + curve.fullest
    where = "the prologue" if operator == PROLOGUE else f"operator {operator}"
    text = f"{what}: at most {in_words(curve.peak)}, in {where}"
    if curve.budget is not None and not curve.budget_in_sight:
        text += f"; budget {in_words(curve.budget)}"
    return text
