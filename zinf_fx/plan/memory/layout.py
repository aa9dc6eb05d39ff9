"""Where each transfer buffer of a plan lies: an offset in one region per memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from zinf_fx.plan.memory.accounting import Traffic, phases
from zinf_fx.plan.memory.buffers import Clock, PlannedBuffer, device_buffers, host_buffers
from zinf_fx.plan.memory.packing import pack
from zinf_fx.plan.memory.use import host_states, plan_chunk_buffers
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.schedule import CHUNKS, GraphSchedule, MemoryRegions, Operator, UpdateSchedule
from zinf_fx.plan.update import costs_of, update_of

# How much smaller the optimizer's chunks may become, so that they have room to themselves, within a budget.
_SMALLER = (1, 2, 4)
# Without a budget, a plan takes no more: of the default size, they take 2 GiB of bf16 parameters and fp32 states.
_MOST = 16


def layout_of(plan: Plan, rates: Rates) -> tuple[tuple[Mapping[int, int], ...], MemoryRegions, UpdateSchedule]:
    """For each graph of a plan, by the number of each event that takes a buffer, the buffer's offset; the regions that
    these lie in, and the optimizer's step in the room that it has there.

    The optimizer's chunks come first. They have room of their own during the forward graph, in which the step may go
    on, unless the budget has none: then the step ends where a tile needs the room. If `rates` say that it is of use,
    there are more of them, with room at any time.
    """
    clock = Clock(plan)
    tiles, on_device = host_buffers(plan), device_buffers(plan)
    limit = plan.config.host_memory
    whole = plan_chunk_buffers(plan).elements
    forward = _in_forward(clock)
    forms = [(CHUNKS, whole // divisor, forward) for divisor in _SMALLER] + [(CHUNKS, whole, range(0))]
    if (count := chunks_wanted(replace(plan, update=update_of(plan, whole)), rates)) > CHUNKS:
        few, more = (plan_chunk_buffers(plan, whole, number).total for number in (CHUNKS, CHUNKS + 1))
        if more == few:  # the update of all elements has no more in buffers
            count = CHUNKS
        elif limit is not None:  # what more of them take is nobody else's place at any time
            left = limit - host_states(plan).total - pack(tiles, clock.end).nbytes - few
            count = min(count, CHUNKS + left // (more - few))
        forms = [(count, whole, clock.always)] * (count > CHUNKS) + forms
    chunks, host, elements = [], pack([], clock.end), whole
    for count, elements, beside in forms:
        chunks = chunk_buffers_of(plan, beside, elements, count)
        host = pack([*chunks, *tiles], clock.end, bottom=len(chunks))
        if limit is None or host_states(plan).total + host.nbytes <= limit:
            break
    device = pack(on_device, clock.end)
    placed = zip([*tiles, *on_device], [*host.offsets[len(chunks) :], *device.offsets], strict=True)
    offsets: tuple[dict[int, int], ...] = tuple({} for _ in plan.graphs)
    for buffer, offset in placed:
        for at in buffer.takers:
            offsets[at.graph][at.number] = offset
    in_chunk = plan_chunk_buffers(plan, elements).elements
    regions = MemoryRegions(host.nbytes, device.nbytes, sum(chunk.nbytes for chunk in chunks), in_chunk, count)
    return offsets, regions, update_of(replace(plan, regions=regions))


def for_own_memory(plan: Plan) -> Plan:
    """The plan with the regions that it takes where the device has memory of its own.

    There, a tile is in host memory from its fetch until it is uploaded, no longer, and shards are gathered on the
    device. A plan for the CPU has both in host memory, until the tile's release.
    """
    copied = replace(plan, graphs=tuple(replace(graph, has_own_memory=True) for graph in plan.graphs))
    clock, few = Clock(copied), plan.regions.chunk_count == CHUNKS
    chunks = chunk_buffers_of(copied, _in_forward(clock) if few else clock.always)
    host = pack([*chunks, *host_buffers(copied)], clock.end, bottom=len(chunks))
    device = pack(device_buffers(copied), clock.end)
    in_chunks = sum(chunk.nbytes for chunk in chunks)
    return replace(copied, regions=replace(plan.regions, host=host.nbytes, device=device.nbytes, chunks=in_chunks))


def _in_forward(clock: Clock) -> range:
    """The times of the forward graph, in which the optimizer's step may go on."""
    return range(clock.starts[1]) if clock.plan.graphs[0].kind == "forward" else range(0)


def chunk_buffers_of(
    plan: Plan, beside: range = range(0), elements: int | None = None, count: int | None = None
) -> list[PlannedBuffer]:
    """The buffers of the optimizer's step, which may go on in the time `beside`; they lie one after the other, from 0
    on."""
    clock, sizes = Clock(plan), plan_chunk_buffers(plan, elements, count)
    buffers = []
    for nbytes, begin in ((sizes.opened, clock.step), (sizes.later, clock.step + 1)):
        if nbytes:
            buffers.append(PlannedBuffer("chunks", "", nbytes, tuple(filter(None, (beside, range(begin, clock.end))))))
    return buffers


def chunks_wanted(plan: Plan, rates: Rates) -> int:
    """For how many chunks of a plan's update room is of any use; no more than half of all, so that they are a part of
    the step.

    Three are enough while one is updated: another is read, and another written. With the optimizer's step, forward has
    most of what a training step moves, though, and where the disk is the limit, backward leaves it idle. What forward
    left to be written, and what the next step reads of states, can be moved then, through room for more chunks.
    """
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
