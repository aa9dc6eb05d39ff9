"""Which state lives in which memory, by sizes alone: ZeRO-Infinity's rule (section 7.1), and what is near its choice.

Nothing leaves while the device has room for all. First the optimizer's states and gradients leave, then parameters and
activations, each to the fastest memory with room. Where most bytes are of frozen parameters, as with adapters, these
leave first: what trains is small beside them, and moving it would make little room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, cast

from zinf_fx.config import Config
from zinf_fx.errors import BudgetError
from zinf_fx.placement import TIERS, Placement, PlacementRules, Tier
from zinf_fx.plan.hardware import Hardware
from zinf_fx.sizes import in_words

# The share of a memory that what lives there may take: the rest is for what is in flight and operators compute with.
# Where activations aren't known, it is for them, too.
SHARE, SHARE_WITHOUT_ACTIVATIONS = 0.8, 0.5

# What leaves, in the order in which it takes the faster memory; tried until the device has room for the rest.
_STATES_FIRST = ("optimizer", "gradients")
_LEAVING = (
    (),
    _STATES_FIRST[:1],
    _STATES_FIRST,
    (*_STATES_FIRST, "parameters"),
    (*_STATES_FIRST, "activations"),
    (*_STATES_FIRST, "activations", "parameters"),
)
_LEAVING_BESIDE_FROZEN = (
    (),
    ("frozen",),
    ("activations",),
    ("activations", "frozen"),
    (*_STATES_FIRST, "activations", "frozen"),
    (*_STATES_FIRST, "activations", "frozen", "parameters"),
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of each state that one rank has. `activations`: that are saved for backward; None: not known yet.
    `frozen`: of parameters that don't train, where these are most; None: they are among `parameters`."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None = None
    frozen: int | None = None

    @property
    def by_state(self) -> dict[str, int]:
        """The placements that are known, by name."""
        return {state: nbytes for state, nbytes in asdict(self).items() if nbytes is not None}


@dataclass(frozen=True)
class Rooms:
    """Bytes that may live in each memory, of one rank. `host` is 0 where the device computes in host memory."""

    device: int
    host: int
    nvme: int

    @classmethod
    def of(cls, hardware: Hardware, config: Config, ranks: int, activations: int | None) -> Rooms:
        """What is left for states of described memories and of the budgets. `activations`: as in `Sizes`."""
        share = SHARE_WITHOUT_ACTIVATIONS if activations is None else SHARE
        there = capacities(hardware, ranks)
        # Where there is no host memory besides the device's, both budgets are of that.
        budgets = [config.device_memory, None if there.host else config.host_memory]
        return cls(
            min([int(there.device * share), *filter(None, budgets)]),
            min([int(there.host * share), *filter(None, [config.host_memory])]),
            there.nvme,
        )

    def __str__(self) -> str:
        parts = {"on the device": self.device, "in host memory": self.host, "on NVMe": self.nvme}
        return ", ".join(f"{in_words(nbytes)} {where}" for where, nbytes in parts.items() if nbytes) or "nothing"


def capacities(hardware: Hardware, ranks: int) -> Rooms:
    """All bytes of each memory that one of so many ranks has."""
    sharing = min(hardware.ranks_per_node, ranks)
    device, host = hardware.device.capacity, hardware.host.capacity // sharing
    if hardware.unified:
        device, host = device + host, 0
    return Rooms(device, host, hardware.nvme.capacity // sharing)


def by_rule(sizes: Sizes, rooms: Rooms) -> Placement | PlacementRules:
    """The placement that the rule chooses.

    "We only offload when the aggregated GPU memory is not sufficient", and no more than is needed. Of parameters and
    activations, one leaves if that is enough; if not, activations get the faster memory.

    Raises: BudgetError when some state finds no room.
    """
    for leaving in _LEAVING if sizes.frozen is None else _LEAVING_BESIDE_FROZEN:
        tiers = _placed([state for state in leaving if sizes.by_state.get(state)], sizes, rooms)
        if tiers is not None and bytes_by_tier(tiers, sizes)["device"] <= rooms.device:
            return _placement(tiers)
    raise BudgetError(_nothing_fits(sizes, rooms))


def placements_near(
    chosen: Placement | PlacementRules, sizes: Sizes, rooms: Rooms
) -> Iterator[Placement | PlacementRules]:
    """Other placements that fit and in which no state could live in a faster memory: those first in which fewer states
    live elsewhere than chosen and, of these, more bytes on the device."""
    states = list(sizes.by_state)
    now = {state: tier_of(state, chosen) for state in states}
    nearby = []
    for choice in product(TIERS, repeat=len(states)):
        tiers = dict(zip(states, choice, strict=True))
        changed = sum(tiers[state] != now[state] for state in states)
        if changed and fits(tiers, sizes, rooms) and not _could_be_faster(tiers, sizes, rooms):
            nearby.append((changed, -bytes_by_tier(tiers, sizes)["device"], _placement(tiers)))
    yield from (placement for *_, placement in sorted(nearby, key=lambda ranked: ranked[:2]))


def tier_of(state: str, placement: Placement | PlacementRules) -> Tier:
    """Return where a state lives; `frozen`: where parameters live that don't train."""
    frozen = placement.frozen if isinstance(placement, PlacementRules) else None
    if state == "frozen":
        return frozen or cast("Tier", placement.parameters)  # which has no rules here
    return getattr(placement, state)


def bytes_by_tier(tiers: Mapping[str, Tier] | Placement | PlacementRules, sizes: Sizes) -> dict[Tier, int]:
    """Bytes of the states in each memory."""
    where = tiers if isinstance(tiers, Mapping) else {state: tier_of(state, tiers) for state in sizes.by_state}
    return {tier: sum(nbytes for state, nbytes in sizes.by_state.items() if where.get(state) == tier) for tier in TIERS}


def fits(tiers: Mapping[str, Tier], sizes: Sizes, rooms: Rooms) -> bool:
    """Whether every memory has room."""
    there = asdict(rooms)
    return all(nbytes <= there[tier] for tier, nbytes in bytes_by_tier(tiers, sizes).items())


def _placement(tiers: Mapping[str, Tier]) -> Placement | PlacementRules:
    states: dict[str, Any] = {state: tier for state, tier in tiers.items() if state != "frozen"}
    if tiers.get("frozen", tiers["parameters"]) == tiers["parameters"]:
        return Placement(**states)
    return PlacementRules(**states, frozen=tiers["frozen"])


def _could_be_faster(tiers: Mapping[str, Tier], sizes: Sizes, rooms: Rooms) -> bool:
    return any(
        fits({**tiers, state: faster}, sizes, rooms)
        for state, tier in tiers.items()
        for faster in TIERS[: TIERS.index(tier)]
    )


def _placed(leaving: Sequence[str], sizes: Sizes, rooms: Rooms) -> dict[str, Tier] | None:
    """What leaves, one after the other to the fastest memory with room, and all else on the device; None: there is no
    room."""
    tiers: dict[str, Tier] = {state: "device" for state in sizes.by_state if state not in leaving}
    there = asdict(rooms)
    for state in leaving:
        taken = bytes_by_tier(tiers, sizes)
        room: Iterator[Tier] = (tier for tier in TIERS[1:] if taken[tier] + sizes.by_state[state] <= there[tier])
        tier = next(room, None)
        if tier is None:
            return None
        tiers[state] = tier
    return tiers


def _nothing_fits(sizes: Sizes, rooms: Rooms) -> str:
    needed = ", ".join(f"{in_words(nbytes)} of {state}" for state, nbytes in sizes.by_state.items())
    return (
        f"placement 'auto' finds no memory with room for every state: a rank has {needed}, and room for {rooms}. "
        "Train with more ranks, raise device_memory or host_memory, give a larger store, or activations='recompute'"
    )
