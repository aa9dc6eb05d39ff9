"""What checkpoints have and cost, as plain text."""

from __future__ import annotations

from zinf_fx.plan.saving import Checkpoints
from zinf_fx.sizes import in_words
from zinf_fx.tables import digits, table


def checkpoints_text(found: Checkpoints) -> str:
    """A table of what they cost, in each way that there is."""
    of_one, ways = found.of_one, {"copied": found.copied, "by generations": found.by_generations}
    if not of_one.in_store:
        del ways["by generations"]
    several = ways.values()
    rows = [
        ["written for one, all nodes", *(in_words(one.written) for one in several)],
        ["seconds, at the drives' rate", *(digits(one.seconds) for one in several)],
        ["on disk besides training, all nodes", *(in_words(one.on_disk) for one in several)],
        ["written per day and node", *(f"{one.written_per_day / 1e12:,.1f} TB" for one in several)],
        ["days until they alone wear the drives", *(days_text(one.written_per_day, one.days) for one in several)],
    ]
    parts = [f"{in_words(n)} of parameters in {dtype}" for dtype, n in of_one.parameters.items()]
    parts.append(f"{in_words(sum(of_one.states.values()))} of optimizer states")
    lines = [
        f"CHECKPOINTS ON DISK, every {found.every / 60:,.4g} minutes, {found.kept:,} kept",
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
