"""What checkpoints have and cost, as plain text."""

from __future__ import annotations

from zinf_fx.plan.checkpoint_bytes import Checkpoints
from zinf_fx.sizes import in_words
from zinf_fx.tables import digits, table


def checkpoints_text(checkpoints: Checkpoints) -> str:
    """A table of what they cost, in each way that there is."""
    of_one, ways = checkpoints.of_one, {"copied": checkpoints.copied, "by generations": checkpoints.by_generations}
    if not of_one.in_store:
        del ways["by generations"]
    costs = ways.values()
    rows = [
        ["written for one, all nodes", *(in_words(cost.written) for cost in costs)],
        ["seconds, at the drives' rate", *(digits(cost.seconds) for cost in costs)],
        ["on disk besides training, all nodes", *(in_words(cost.on_disk) for cost in costs)],
        ["written per day and node", *(f"{cost.written_per_day / 1e12:,.1f} TB" for cost in costs)],
        ["days until they alone wear the drives", *(days_text(cost.written_per_day, cost.days) for cost in costs)],
    ]
    parts = [f"{in_words(n)} of parameters in {dtype}" for dtype, n in of_one.parameters.items()]
    parts.append(f"{in_words(sum(of_one.states.values()))} of optimizer states")
    lines = [
        f"CHECKPOINTS ON DISK, every {checkpoints.every / 60:,.4g} minutes, {checkpoints.kept:,} kept",
        f"of {in_words(of_one.nbytes)}: {', '.join(parts)}",
        "",
        table(rows, ["", *ways]),
    ]
    if len(ways) > 1:
        lines += ["", "By generations: on the store's file system, what is in the store stays there."]
    return "\n".join(lines)


def days_text(written_per_day: float, days: float | None) -> str:
    """Days until drives are worn by what is written to them."""
    if not written_per_day:
        return "never"
    return "unknown" if days is None else f"{days:,.0f}"
