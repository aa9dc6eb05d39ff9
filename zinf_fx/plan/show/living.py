"""Where the states of a plan's parameters live, in words."""

from __future__ import annotations

from collections import defaultdict

from zinf_fx.placement import Placement, Tier
from zinf_fx.plan.placement.decision import words
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.show.names import first_parameter
from zinf_fx.sizes import in_words
from zinf_fx.tables import counted


def placement_lines(plan: Plan) -> list[str]:
    """One line where all parameters live alike; else one for those that do, and one for activations."""
    placement = plan.config.placement
    if placement == "auto":  # only a model without stored parameters is planned with it
        return []
    if isinstance(placement, Placement):
        return [words(placement)]
    alike: defaultdict[tuple[Tier | None, ...], list[Tile]] = defaultdict(list)
    for tile in plan.tiles:
        if not tile.activation:
            alike[tile.tier, tile.gradient_tier, tile.state_tier].append(tile)
    return [*(_alike(tiles) for tiles in alike.values()), f"activations on {placement.activations}"]


def _alike(tiles: list[Tile]) -> str:
    first = tiles[0]
    states = f"gradients on {first.gradient_tier}, optimizer on {first.state_tier}" if first.gradient_tier else "frozen"
    nbytes = sum(sum(tile.updated_elements(0)) * tile.dtype.itemsize for tile in tiles)
    parameters = len({parameter.name for tile in tiles for parameter in tile.members or (tile,)})
    more = f" and {parameters - 1} more" if parameters > 1 else ""
    what = f"{counted(parameters, 'parameter')} ({in_words(nbytes)}) on {first.tier}, {states}"
    return f"{what}: {first_parameter(first)}{more}"
