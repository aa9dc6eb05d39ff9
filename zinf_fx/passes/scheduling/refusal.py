"""Why a plan exceeds its budget: what needs how much, and which options would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zinf_fx.passes.ir.framework import GraphContext
from zinf_fx.passes.ir.in_flight import Ledger
from zinf_fx.plan.memory.buffers import Clock, device_buffers, host_buffers, profile
from zinf_fx.plan.memory.use import HostUse, peak_device_bytes, peak_host_bytes, plan_chunk_buffers
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE
from zinf_fx.sizes import at_least, at_most, in_words
from zinf_fx.tables import table


def refusal(ledger: Ledger, context: GraphContext) -> str:
    """The text for a graph of which some operators have more in flight than `ledger.budget`: about the worst."""
    operator = ledger.fullest()
    buffers = context.gradient_buffer + context.activation_buffer
    moved = ledger.at(operator) + buffers
    largest = ", ".join(f"{span.what} ({at_least(span.nbytes)})" for span in ledger.largest(operator))
    whole = ((context.tiles[token].name, reason) for token, reason in context.undivided.items())
    reasons = [f"'{name}' can't be tiled: {reason}" for name, reason in whole if f"'{name}'" in largest]
    needs = f"the {context.kind} graph needs {at_least(moved)} of tiles and gradients at once in operator {operator}"
    limit = context.limit
    assert limit is not None
    if limit >= 0:
        over = f"{needs}, and the budget is {_budget_in_words(context)}"
    elif moved:
        over = f"{needs}, and what lives there exceeds it by {at_least(-limit)}"
    else:
        over = f"what lives in a memory with a budget exceeds that by {at_least(-limit)}"
    about = [*([f"Largest: {largest}"] if largest else []), *reasons]
    first = ". ".join([f"{over}: raise device_memory or host_memory", *about])
    held = ledger.largest(operator, count=5)
    where = "in the prologue" if operator == PROLOGUE else f"in operator {operator}"
    parts = [
        ("gradients on their way to NVMe", context.gradient_buffer),
        ("activations and parameters on their way to NVMe", context.activation_buffer),
        *((f"{span.what} {where}", span.nbytes) for span in held),
        (f"everything else {where}", ledger.at(operator) - sum(span.nbytes for span in held)),
    ]
    return _text(first, parts, _options(moved, context), context)


def _budget_in_words(context: GraphContext) -> str:
    """The budget of the memory that leaves least, and how much that is, where something lives there."""
    option = min(context.left, key=context.left.__getitem__)
    budget, left = getattr(context.config, option), context.left[option]
    if left == budget:
        return at_most(budget)
    return f"{at_most(budget)} of {option}, of which what lives there leaves {at_most(left)}"


def refusal_of_buffers(plan: Plan, context: GraphContext) -> str:
    """The text for a plan whose buffers, in their places, exceed a budget."""
    config, on_host = context.config, peak_host_bytes(plan)
    if config.host_memory is not None and on_host > config.host_memory:
        memory, nbytes, buffers = "host_memory", on_host, host_buffers(plan)
        living, where, beside = context.living, "nvme", "optimizer's chunks, and what lies beside them"
        rest = plan.regions.host
    else:
        memory, nbytes, buffers = "device_memory", peak_device_bytes(plan), device_buffers(plan)
        living, where, beside = context.living_on_device, "host or nvme", "gradients on their way, and gaps"
        rest = nbytes - plan.unmoved - living.total - plan.kept
    needed = profile(buffers, Clock(plan).end)
    fullest = needed.index(max(needed))
    there = sorted(
        (b for b in buffers if any(fullest in span for span in b.spans)), key=lambda b: b.nbytes, reverse=True
    )
    parts = [
        *((f"{buffer.what} of '{buffer.label}'", buffer.nbytes) for buffer in there[:5]),
        ("other tiles and gradients on their way", sum(buffer.nbytes for buffer in there[5:])),
        (beside, rest - needed[fullest]),
    ]
    first = (
        f"the buffers of a step need {at_least(nbytes)} of {memory} at once, and the budget is "
        f"{at_most(getattr(config, memory))}: raise {memory}"
    )
    options = [_budget(memory, nbytes), *_elsewhere(living, where)]
    if memory == "host_memory" and plan_chunk_buffers(plan).total > needed[fullest]:
        options.append(f"chunk: smaller than {in_words(config.chunk)}")
    return _text(first, parts, options, context)


def _text(first: str, parts: Iterable[tuple[str, int]], options: Iterable[str], context: GraphContext) -> str:
    """`first`, a table of what needs how much, and what the user can change.

    The table has what lives in memories that have a budget, then `parts`, their sum, and the budgets.
    """
    config = context.config
    needed: list[tuple[str, int]] = []
    if config.host_memory is not None:
        needed += [(f"{what} that live in host memory", nbytes) for what, _, nbytes in _living(context.living)]
    if config.device_memory is not None:
        needed += [(f"{what} that live on the device", nbytes) for what, _, nbytes in _living(context.living_on_device)]
        needed += [
            ("buffers, and parameters that are not stored", context.unmoved),
            ("activations kept for backward", context.kept),
        ]
    needed += parts
    rows = [(what, in_words(nbytes)) for what, nbytes in needed if nbytes]
    rows += [("together", in_words(sum(nbytes for _, nbytes in needed)))]
    for name in ("device_memory", "host_memory"):
        if (nbytes := getattr(config, name)) is not None:
            rows.append((name, in_words(nbytes)))
    return "\n".join([first, "", table(rows, ("what", "needs")), "", "To fit:", *(f"  {option}" for option in options)])


def _options(moved: int, context: GraphContext) -> Iterator[str]:
    """What the user can change, each by itself enough, or at least of help; `moved`: bytes of tiles and gradients."""
    config, living = context.config, context.living
    on_device = moved + context.unmoved + context.kept + context.living_on_device.total
    if config.device_memory is not None and config.device_memory < on_device:
        yield _budget("device_memory", on_device)
        yield from _elsewhere(context.living_on_device, "host or nvme")
        if context.kept:
            yield f'activations="recompute", "offload" or "auto": up to {in_words(context.kept)} less'
    if config.host_memory is not None and config.host_memory < moved + living.total:
        yield _budget("host_memory", moved + living.total)
        yield from _elsewhere(living, "nvme")
    if config.tile != "auto":
        yield 'tile="auto": what exceeds the budget is divided'


def _budget(option: str, nbytes: int) -> str:
    return f'{option}="{at_least(nbytes)}"'


def _elsewhere(use: HostUse, where: str) -> Iterator[str]:
    for _, option, nbytes in _living(use):
        if nbytes:
            yield f"placement of {option} on {where}: {in_words(nbytes)} less"


def _living(use: HostUse) -> tuple[tuple[str, str, int], ...]:
    """Each kind of state, what the placement calls it, and its bytes."""
    return (
        ("parameters", "parameters", use.parameters),
        ("gradients", "gradients", use.gradients),
        ("optimizer states", "optimizer", use.states),
        ("activations", "activations", use.activations),
    )
