"""Why a plan exceeds its budget: what needs how much, and which options would make it fit."""

from __future__ import annotations

from collections.abc import Iterator

from tabulate import tabulate

from zinf_fx.passes.framework import GraphContext
from zinf_fx.passes.in_flight import Ledger
from zinf_fx.plan.schedule import HEAD
from zinf_fx.sizes import in_words


def refusal(ledger: Ledger, context: GraphContext) -> str:
    """The text for a graph of which some operators have more in flight than `ledger.budget`: about the worst."""
    operator = ledger.fullest()
    largest = ", ".join(map(str, ledger.largest(operator)))
    whole = ((context.tiles[token].name, reason) for token, reason in context.undivided.items())
    reasons = [f"'{name}' can't be tiled: {reason}" for name, reason in whole if f"'{name}'" in largest]
    first = (
        f"the {context.kind} graph needs {ledger.at(operator) + context.gradient_buffer} bytes of tiles and gradients "
        f"at once in operator {operator}, and the budget is {context.limit}: raise device_memory or host_memory. "
    )
    lines = [first + ". ".join([f"Largest: {largest}", *reasons]), "", _table(ledger, operator, context), "", "To fit:"]
    return "\n".join(lines + [f"  {option}" for option in _options(ledger, operator, context)])


def _table(ledger: Ledger, operator: int, context: GraphContext) -> str:
    living, config = context.living, context.config
    held = ledger.largest(operator, count=5)
    rest = ledger.at(operator) - sum(span.nbytes for span in held)
    where = "at the head" if operator == HEAD else f"in operator {operator}"
    needed = [
        ("parameters that live in host memory", living.parameters),
        ("gradients that live in host memory", living.gradients),
        ("optimizer states that live in host memory", living.states),
        ("gradients on their way to NVMe", context.gradient_buffer),
        *((f"{span.what} {where}", span.nbytes) for span in held),
        (f"everything else {where}", rest),
    ]
    rows = [(what, in_words(nbytes)) for what, nbytes in needed if nbytes]
    rows += [("together", in_words(sum(nbytes for _, nbytes in needed)))]
    for name in ("device_memory", "host_memory"):
        if (nbytes := getattr(config, name)) is not None:
            rows.append((name, in_words(nbytes)))
    return tabulate(rows, headers=["what", "needs"], colalign=("left", "right"), disable_numparse=True)


def _options(ledger: Ledger, operator: int, context: GraphContext) -> Iterator[str]:
    """What the user can change, each by itself enough, or at least of help."""
    config, living = context.config, context.living
    moved = ledger.at(operator) + context.gradient_buffer
    if config.device_memory is not None and config.device_memory < moved:
        yield f"device_memory={moved}"
    if config.host_memory is not None and config.host_memory < moved + living.total:
        yield f"host_memory={moved + living.total}"
        for state, nbytes in (
            ("parameters", living.parameters),
            ("gradients", living.gradients),
            ("optimizer", living.states),
        ):
            if nbytes:
                yield f"placement of {state} on nvme: {in_words(nbytes)} less"
    if config.tile != "auto":
        yield 'tile="auto": what exceeds the budget is divided'
