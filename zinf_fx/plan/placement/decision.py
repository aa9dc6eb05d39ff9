"""`placement="auto"` where the model's graphs are known: the rule's choice, and what is near it, planned and simulated.

The placement that the rule chooses (`plan.placement.placing`) is taken unless a simulated step of another one is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from zinf_fx.config import PRESETS, Config
from zinf_fx.errors import BudgetError, ZinfError
from zinf_fx.placement import TIERS, Placement, PlacementRules, Tier
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.memory.accounting import flows
from zinf_fx.plan.memory.layout import for_own_memory
from zinf_fx.plan.memory.use import living_on, peak_device_bytes, peak_host_bytes, staying_on_device
from zinf_fx.plan.placement.placing import Rooms, Sizes, by_rule, bytes_by_tier, capacities, placements_near, tier_of
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.sizes import in_words
from zinf_fx.tables import table

# How many placements besides the rule's are planned and simulated at most.
_OTHERS = 4
# A model of more parameter tensors than that is placed by the rule alone: each plan of it takes many seconds.
PARAMETERS_AT_MOST = 500
# The share of a step by which another placement must be faster than the rule's.
_TIE = 0.01
_ALL_ON_NVME = Placement("nvme", "nvme", "nvme", "nvme")

_ALL_FIT = "everything fits on the device, so nothing leaves it"
_ALONE = "section 7.1's rule alone"

STATES = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Candidate:
    """A placement that was considered.

    Attributes:
        device, host, nvme: bytes of one rank in each memory; where it was planned, with what is in flight at most.
        seconds: of a simulated step; None: none was simulated.
        refused: why it doesn't fit; empty: it does.
        exceeded: the memory that is too small.
    """

    placement: Placement | PlacementRules
    device: int = 0
    host: int = 0
    nvme: int = 0
    seconds: float | None = None
    refused: str = ""
    exceeded: Tier | None = None


@dataclass(frozen=True)
class Decision:
    """What "auto" decided.

    Attributes:
        placement: that is taken.
        rule: that the rule chooses.
        hardware: what it was decided for.
        candidates: that were considered: first what the rule chose, until that fitted, and then what is near it.
        reason: for the choice, a clause.
    """

    placement: Placement | PlacementRules
    rule: Placement | PlacementRules
    hardware: str
    candidates: tuple[Candidate, ...]
    reason: str

    @property
    def nothing_moves(self) -> bool:
        """Whether every state lives on the device."""
        return self.placement == PRESETS["device"]

    def __str__(self) -> str:
        frozen = any(isinstance(candidate.placement, PlacementRules) for candidate in self.candidates)
        states = (*STATES, "frozen") if frozen else STATES
        headers = ["", *states, "device", "host", "NVMe", "s per step"]
        marks = {"taken": self.placement, "rule": self.rule}
        rows = [
            [
                ", ".join(mark for mark, placement in marks.items() if placement == candidate.placement),
                *(tier_of(state, candidate.placement) for state in states),
                *("" if not nbytes else in_words(nbytes) for nbytes in [getattr(candidate, tier) for tier in TIERS]),
                "doesn't fit" if candidate.refused else "" if candidate.seconds is None else f"{candidate.seconds:.4g}",
            ]
            for candidate in self.candidates
        ]
        refused = [f"{words(tried.placement)}: {tried.refused}" for tried in self.candidates if tried.refused]
        title = f"placement auto, for {self.hardware}: {self.reason}."
        return "\n".join([title, "", table(rows, headers, left=range(1 + len(states))), *refused])


def words(placement: Placement | PlacementRules, sizes: Sizes | None = None) -> str:
    """`parameters (12.0 MiB) on device, ...`."""
    known, states = sizes.by_state if sizes is not None else {}, dict(zip(STATES, STATES, strict=True))
    if isinstance(placement, PlacementRules):
        states = {"frozen": "frozen parameters", **states, "parameters": "trained ones"}
    elif "frozen" in known:
        known["parameters"] += known.pop("frozen")
    size = lambda state: f" ({in_words(known[state])})" if state in known else ""  # noqa: E731
    return ", ".join(f"{name}{size(state)} on {tier_of(state, placement)}" for state, name in states.items())


def by_rule_alone(sizes: Sizes, rooms: Rooms, hardware: str, why: str) -> Decision:
    """What the rule decides where nothing can be planned, and `why` that is so. Raises: BudgetError."""
    chosen = by_rule(sizes, rooms)
    reason = _ALL_FIT if chosen == PRESETS["device"] else f"{_ALONE}: {why}"
    return Decision(chosen, chosen, hardware, (Candidate(chosen, **bytes_by_tier(chosen, sizes)),), reason)


def decide(
    plans_with: Callable[[Placement | PlacementRules], Sequence[Plan]],
    sizes: Sizes,
    config: Config,
    hardware: Hardware,
    ranks: int,
    parameters: int,
) -> Decision:
    """The rule's choice, or one near it with which a simulated step is faster.

    Args:
        plans_with: makes the plans of the model's graphs for a placement.
        sizes: of the states that one of so many `ranks` has.
        config: the options, the placement apart.
        parameters: how many tensors the model has.

    Raises: BudgetError when nothing fits; what `plans_with` raises.
    """
    hardware = hardware.with_ranks(ranks)
    activations = _activations(plans_with, sizes, config, Rooms.of(hardware, config, ranks, None))
    sizes, rooms = replace(sizes, activations=activations), Rooms.of(hardware, config, ranks, activations)
    there = capacities(hardware, ranks)

    def considered(placement: Placement | PlacementRules) -> Candidate:
        try:
            return _held(plans_with(placement), placement, there)
        except BudgetError as error:
            living = bytes_by_tier(placement, sizes)
            exceeded: Tier = "device" if config.device_memory is not None and living["device"] else "host"
            return Candidate(placement, **living, refused=str(error).splitlines()[0], exceeded=exceeded)

    candidates, rooms = _until_one_fits(considered, sizes, rooms)
    chosen = candidates[-1]

    def decided(placement: Placement | PlacementRules, reason: str) -> Decision:
        return Decision(placement, chosen.placement, hardware.name, tuple(candidates), reason)

    if chosen.placement == PRESETS["device"]:
        return decided(chosen.placement, _ALL_FIT)
    if parameters > PARAMETERS_AT_MOST:
        many = f"it has {parameters:,} parameter tensors, and a model of over {PARAMETERS_AT_MOST} is planned once"
        return decided(chosen.placement, f"{_ALONE}: {many}")
    candidates += [considered(near) for near in islice(placements_near(chosen.placement, sizes, rooms), _OTHERS)]
    try:
        simulated = [tried if tried.refused else _simulated(tried, plans_with, hardware) for tried in candidates]
    except ZinfError as error:
        return decided(chosen.placement, f"{_ALONE}: no step can be simulated, because {error}")
    candidates[:] = simulated
    fitting = [candidate for candidate in candidates if not candidate.refused]
    chosen, fastest = fitting[0], min(fitting, key=_seconds_of)
    if _seconds_of(fastest) < (1 - _TIE) * _seconds_of(chosen):
        slower = f"with the choice of section 7.1's rule, which takes {chosen.seconds:.4g} s"
        return decided(fastest.placement, f"a simulated step takes {fastest.seconds:.4g} s, less than {slower}")
    none_faster = f"of {len(fitting) - 1} near its choice that fit, none is simulated to be over {_TIE:.0%} faster"
    return decided(
        chosen.placement, f"section 7.1's rule; {none_faster if len(fitting) > 1 else 'nothing near it fits'}"
    )


def _seconds_of(candidate: Candidate) -> float:
    assert candidate.seconds is not None
    return candidate.seconds


def _until_one_fits(
    considered: Callable[[Placement | PlacementRules], Candidate], sizes: Sizes, rooms: Rooms
) -> tuple[list[Candidate], Rooms]:
    """What the rule chooses while its choices don't fit as plans, and the first that does; and the rooms for that.

    Raises: BudgetError with what was tried.
    """
    candidates: list[Candidate] = []
    try:
        candidates.append(considered(by_rule(sizes, rooms)))
        while candidates[-1].refused:
            rooms = _smaller(rooms, candidates[-1], sizes)
            candidates.append(considered(by_rule(sizes, rooms)))
    except BudgetError as error:
        tried = [f"  {words(candidate.placement)}: {candidate.refused}" for candidate in candidates]
        raise BudgetError("\n".join([str(error), *(["Tried:"] if tried else []), *tried])) from None
    return candidates, rooms


def _activations(
    plans_with: Callable[[Placement | PlacementRules], Sequence[Plan]], sizes: Sizes, config: Config, rooms: Rooms
) -> int:
    """Bytes beside the states: those that are saved for backward and live where the placement says, and those that no
    plan moves; none where the policy of activations decides what is saved."""
    if config.activations in ("offload", "auto"):
        return 0
    try:
        plans = plans_with(by_rule(sizes, rooms))
    except BudgetError:
        try:
            plans = plans_with(_ALL_ON_NVME)
        except BudgetError as error:
            raise BudgetError(f"placement 'auto' finds none that fits. With all states on nvme: {error}") from None
    leaving = (tile.held_nbytes for plan in plans for tile in plan.tiles if tile.activation)
    return sum(plan.unmoved + plan.kept for plan in plans) + sum(leaving)


def _held(plans: Sequence[Plan], placement: Placement | PlacementRules, there: Rooms) -> Candidate:
    """What a rank needs of each memory, and whether there is as much."""
    needs = [needed_by(plan, there) for plan in plans]
    needed: dict[Tier, int] = {tier: max((need[tier] for need in needs), default=0) for tier in TIERS}
    exceeded, refused = exceeding(needed, there) or (None, "")
    return Candidate(placement, **needed, refused=refused, exceeded=exceeded)


def as_placed(plan: Plan, there: Rooms) -> Plan:
    """The plan as it is where these memories are: a model on the meta device is planned as for a CPU."""
    return for_own_memory(plan) if there.host and not plan.has_own_memory else plan


def needed_by(plan: Plan, there: Rooms) -> dict[Tier, int]:
    """Bytes of a rank in each memory, with what is in flight at most."""
    device, host = peak_device_bytes(plan), peak_host_bytes(as_placed(plan, there))
    if not there.host:
        device, host = device + host, 0
    elif not plan.has_own_memory:
        # The plan's budget is for what is in flight, without the gaps between buffers in a region of the device.
        moved = [flow.device for graph in plan.graphs for flow in flows(plan, graph)]
        device = staying_on_device(plan) + max(moved, default=0)
    return {"device": device, "host": host, "nvme": living_on("nvme", plan.tiles, plan.stage).total}


def needed_with_values(plan: Plan, there: Rooms) -> tuple[int, dict[Tier, int]]:
    """The values that an operator computes with at most, and what a rank needs of each memory with these."""
    values = max((operator.values for graph in plan.graphs for operator in graph.operators), default=0)
    needed = needed_by(plan, there)
    return values, {**needed, "device": needed["device"] + values}


def exceeding(needed: Mapping[Tier, int], there: Rooms) -> tuple[Tier, str] | None:
    """The first memory that is too small, and the reason in words; None: all are large enough."""
    for tier, nbytes in needed.items():
        if nbytes > (room := getattr(there, tier)):
            has = in_words(room)
            return tier, f"it needs {in_words(nbytes)} of {tier} memory with what is in flight, which has {has}"
    return None


def _smaller(rooms: Rooms, refused: Candidate, sizes: Sizes) -> Rooms:
    """Rooms that make the rule move another state out of the memory that a plan exceeds.

    Raises: BudgetError: nothing lives there that could leave.
    """
    living = bytes_by_tier(refused.placement, sizes)
    tier = "device" if refused.exceeded == "host" and not rooms.host else refused.exceeded
    assert tier is not None
    if not living[tier]:
        raise BudgetError(f"placement 'auto' finds none that fits: without any state, {tier} memory is too small")
    return replace(rooms, **{tier: living[tier] - 1})


def _simulated(
    candidate: Candidate, plans_with: Callable[[Placement | PlacementRules], Sequence[Plan]], hardware: Hardware
) -> Candidate:
    plans = plans_with(candidate.placement)
    steps = (simulate_plan(plan, hardware) for plan in plans)
    return replace(candidate, seconds=sum(step.seconds for step in steps))
