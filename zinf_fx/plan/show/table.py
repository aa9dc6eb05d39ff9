"""The plan as plain text: a table per graph with a line per operator, and what a step moves.

Cells name modules, not parameters: `0.qkv` stands for the weight and the bias of `blocks.0.attention.qkv`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest

from zinf_fx.config import FrozenDtype, FrozenPatterns
from zinf_fx.plan.checkpoint_bytes import checkpoint_sizes
from zinf_fx.plan.lifetimes import TRANSFERS
from zinf_fx.plan.memory.accounting import flows, phases
from zinf_fx.plan.memory.use import host_arena, host_states, peak_host_bytes
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import PROLOGUE, GraphSchedule, PlannedChunk
from zinf_fx.plan.show.curve import ASCII, Glyphs
from zinf_fx.plan.show.living import placement_lines
from zinf_fx.plan.show.memory_curve import render_curves
from zinf_fx.plan.show.names import GraphNames, first_parameter, module_of, short_names
from zinf_fx.plan.simulation.communication import communication
from zinf_fx.plan.update import costs_of
from zinf_fx.sizes import in_words
from zinf_fx.tables import counted, table

WIDTH = 160
_TITLES: dict[str, tuple[str, str]] = {
    "wait": ("", "waits for"),
    "allgather": ("", "all-gathers"),
    "upload": ("", "uploads"),
    "fetch": ("", "fetches"),
    "release": ("", "releases"),
    "keep": ("", "keeps"),
    "reduce_scatter": ("reduce-", "scatters"),
    "offload": ("", "offloads"),
    "write": ("", "writes"),
}
# Widths of cells that are tried until a table fits, and whether cells then still say which operations are computed.
_CELLS = [*((limit, True) for limit in range(40, 13, -1)), *((limit, False) for limit in range(24, 5, -1))]
# Width of a cell that lists modules, where a table has no other that is wide.
_LONGEST_CELL = 40
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def render(plan: Plan, *, width: int = WIDTH, operators: range | None = None, glyphs: Glyphs = ASCII) -> str:
    """The plan as text of at most `width` columns (as far as names allow).

    `operators`: the operators to print; default all. The prologue is printed with operator 0. Charts are of all.
    `glyphs`: what charts are drawn with.
    """
    short = short_names(plan)
    parts = [_header(plan), _legend(plan, short)]
    for graph in plan.graphs:
        names = GraphNames(plan, graph, short)
        parts += [_graph(plan, graph, names, width, operators), *render_curves(plan, graph, glyphs, width)]
    if plan.update.chunks and operators is None:
        parts.append(_update(plan, short))
    parts += [_traffic(plan), _peaks(plan), _arena(plan), *_checkpoint(plan)]
    return "\n\n".join(parts) + "\n"


# -- the tables -------------------------------------------------------------------------------------------------------


def _graph(plan: Plan, graph: GraphSchedule, names: GraphNames, width: int, wanted: range | None) -> str:
    """A line per operator: what it computes, and what happens to which tiles meanwhile."""
    count = len(graph.operators)
    title = f"{graph.kind.upper()}: {counted(count, 'operator')}"
    shown = [o for o in (PROLOGUE, *range(count)) if wanted is None or max(o, 0) in wanted]
    if not shown:
        return f"{title}, none in the range asked for (the last is {count - 1})"
    if len(shown) <= count:
        title += f", shown are {max(shown[0], 0)} to {shown[-1]}"
    columns = _columns(plan, graph)
    kinds = [kind for kind in _TITLES if kind in columns.values()]
    tiles = {
        operator: [names.groups(n for n, _ in graph.numbered(operator) if columns.get(n) == kind) for kind in kinds]
        for operator in shown
    }
    sizes = {flow.operator: (flow.fetched, flow.device, flow.host) for flow in flows(plan, graph)}
    largest = max(map(max, sizes.values()))
    unit, nbytes = _unit(largest)
    heads = [("", "op"), ("", "computes"), *(_TITLES[k] for k in kinds), ("", "fetched"), ("in flight", "device")]
    header = list(zip(*heads, ("", "host"), strict=True))
    lines: list[list[str]] = []
    for limit, detailed in _CELLS:
        lines = [
            [
                *_operator(graph, operator, names, limit, detailed),
                *(_fitting(group, limit) for group in tiles[operator]),
                *(f"{size / nbytes:.1f}" if size else "" for size in sizes[operator]),
            ]
            for operator in shown
        ]
        if _width_of(header, lines) <= width:
            break
    return f"{title}; sizes in {unit}\n\n{_layout(header, lines, left=range(1, len(kinds) + 2))}"


def _width_of(header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> int:
    """How wide `_layout` makes a table, with two spaces between columns: laying it out takes long."""
    widths = [max(map(len, column)) for column in zip(*header, *rows, strict=True)]
    return sum(widths) + 2 * (len(widths) - 1)


def _layout(header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A table under a line of dashes. The header goes in as rows: as headers, tabulate would pad them."""
    rule = ["-" * max(map(len, column)) for column in zip(*header, *rows, strict=True)]
    return table([*header, rule, *rows], left=left)


def _columns(plan: Plan, graph: GraphSchedule) -> dict[int, str]:
    """By number, the columns that a graph's events stand in. What moves nothing, because the tile is in memory, has
    none."""
    lifetimes, number = plan.lifetimes, plan.graphs.index(graph)
    columns: dict[int, str] = {}
    for position, event in enumerate(graph.events):
        live_range = lifetimes.live_range_of(number, position)
        if event.kind in TRANSFERS:
            if live_range is None or live_range.found != "kept":
                columns[position] = event.kind
        elif event.kind == "release" and live_range is not None and live_range.kept:
            if not lifetimes.is_always_kept(live_range.tile):
                columns[position] = "keep"
        else:
            columns[position] = "offload" if event.kind == "offload_activation" else event.kind
    return columns


def _fitting(names: Sequence[str], limit: int) -> str:
    """A cell of at most about `limit` characters: all names, or the first and how many more."""
    everything = " ".join(names)
    if len(everything) <= limit:
        return everything
    rest = f" +{len(names) - 1}" if len(names) > 1 else ""
    return _middle_cut(names[0], max(limit - len(rest), 5)) + rest


def _operator(graph: GraphSchedule, number: int, names: GraphNames, limit: int, detailed: bool) -> tuple[str, str]:
    """An operator's number, and the module whose matrix opens it.

    `detailed`: with its heavy operations, which stand alone where no matrix opens it.
    """
    if number == PROLOGUE:
        return "", "prologue"
    label = _plain_label(graph.operators[number].label)
    opening = [e.tile for e in graph.at(number, "wait") if graph.tiles[e.tile].opens_operator]
    if not opening:
        return str(number), _end_cut(label, max(limit, 8))
    module = names.module(graph.tiles[opening[0]])
    if not detailed or not label:
        return str(number), _middle_cut(module, limit)
    limit = max(limit, 26)
    room = limit - len(module) - 2
    fits = room >= min(len(label), 8)
    return str(number), f"{module}: {_end_cut(label, room)}" if fits else _middle_cut(module, limit)


def _plain_label(label: str) -> str:
    """`addmm, _scaled_dot_product_flash_attention_for_cpu_backward` -> `matmul, attention`."""
    parts = []
    for name in filter(None, label.split(", ")):
        stem = name.removesuffix("_backward")
        if "attention" in stem:
            stem = "attention"
        elif stem in _MATRIX_PRODUCTS:
            stem = "matmul"
        parts.append(stem.removesuffix("_dense").strip("_"))
    return ", ".join(dict.fromkeys(parts))


def _end_cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip(" ,") + "~"


def _middle_cut(name: str, limit: int) -> str:
    """Layer numbers stand at a name's beginning, and what tells modules of a layer apart at its end."""
    if len(name) <= limit:
        return name
    head = (limit - 1) // 3
    return f"{name[:head]}~{name[len(name) - (limit - 1 - head) :]}"


def _update(plan: Plan, short: Mapping[str, str]) -> str:
    """A line per chunk of the optimizer's step: what is updated, what that reads and writes, and where it lies."""
    chunks, events = plan.update.chunks, plan.update.events
    early = {event.chunk for event in events if event.prefetched}
    offsets = {event.chunk: event.offset for event in events if event.offset is not None}
    costs = costs_of(plan, plan.update)
    unit, nbytes = _unit(max((size for cost in costs for size in (cost.read, cost.written)), default=0))
    rows = []
    for number, (chunk, cost) in enumerate(zip(chunks, costs, strict=True)):
        first = cost.read - cost.gradients if number in early else 0
        sizes = (first, cost.read - first, cost.written)
        place = in_words(offsets[number]) if number in offsets else ""
        cells = [f"{size / nbytes:.1f}" if size else "" for size in sizes]
        modules = _fitting(_modules(plan, chunk, short), _LONGEST_CELL)
        rows.append([str(number), modules, f"{cost.elements:,}", *cells, place])
    header = [["chunk", "updates", "elements", "in backward", "reads", "writes", "offset"]]
    if not early:
        header, rows = ([[*row[:3], *row[4:]] for row in part] for part in (header, rows))
    count = f"{counted(len(chunks), 'chunk')}, at most {plan.regions.chunk_count} in memory at a time"
    return f"ADAM STEP: {count}; sizes in {unit}\n\n{_layout(header, rows, left=(1,))}"


def _modules(plan: Plan, chunk: PlannedChunk, short: Mapping[str, str]) -> list[str]:
    """The short names of the modules of a chunk's parameters."""
    tiles = ((plan.tiles[part.tile], part.member) for part in chunk.slices)
    names = (tile.members[member].name if tile.members else tile.name for tile, member in tiles)
    modules = dict.fromkeys(map(module_of, names))
    return [short.get(module, module) for module in modules]


def _unit(largest: int) -> tuple[str, int]:
    """The unit in which so many bytes have no more than four digits, and how many bytes it is."""
    return next((unit for unit in _UNITS.items() if largest < 10_000 * unit[1]), ("GiB", _UNITS["GiB"]))


# -- around the tables ------------------------------------------------------------------------------------------------


def _header(plan: Plan) -> str:
    tiles = [tile for tile in plan.tiles if not tile.activation]
    leaving = [tile for tile in plan.tiles if tile.activation]
    config = plan.config
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tiles}))
    total = sum(sum(t.updated_elements(0)) * t.dtype.itemsize for t in tiles)
    packed = [len(tile.members) for tile in tiles if tile.members]
    what = "a training step" if any(g.kind == "backward" for g in plan.graphs) else "inference"
    lines = [
        f"Plan of {what}: {counted(len(tiles), 'tile')}, {counted(_parameters(plan), 'parameter')} "
        f"({dtypes}, {in_words(total)}), {counted(plan.world_size, 'rank')}"
    ]
    if packed:
        tiles_of_packs = "which is a tile" if len(packed) == 1 else "each of which is a tile"
        lines.append(f"packs      {sum(packed)} small parameters in {counted(len(packed), 'pack')}, {tiles_of_packs}")
    if where := placement_lines(plan):
        lines += [f"{title:11}{line}" for title, line in zip_longest(["placement"], where, fillvalue="")]
        if plan.world_size > 1:
            groups = f" over the {plan.world_size // plan.replicas} of each of {counted(plan.replicas, 'group')}"
            hybrid = groups if plan.stage and plan.replicas > 1 else ""
            owners = ", each whole at one owner" if plan.stage and config.partition == "owner" else ""
            lines.append(f"ranks      ZeRO stage {plan.stage}: {_STAGES[plan.stage]}{hybrid}{owners}")
    if config.prefetch is None:
        lines.append("prefetch   none: each transfer starts when it is needed")
    else:
        lines.append(
            "prefetch   all-gather {}, upload {}, fetch {} operators ahead of the use".format(*config.prefetch)
        )
    budgets = [f"{n} {in_words(v)}" for n in ("device_memory", "host_memory") if (v := getattr(config, n)) is not None]
    lines.append("budgets    " + (", ".join(budgets) or "none"))
    tile, pack = (in_words(size) if isinstance(size, int) else size for size in (config.tile, config.pack))
    frozen = f", frozen matrices {_formats(config.frozen_dtype)}" if config.frozen_dtype else ""
    divided = f", {config.micro_batches} micro-batches" if config.micro_batch_count > 1 else ""
    if divided and config.micro_batch_group != 1:
        size = "" if config.micro_batch_group == "auto" else f"{config.micro_batch_group} "
        divided += f" by groups of {size}operators"
    compiled = ", operators compiled by Inductor" if config.compute == "inductor" else ""
    lines.append(f"options    activations {config.activations}, tile {tile}, pack {pack}{frozen}{divided}{compiled}")
    if plan.kept or leaving:
        gone = sum(tile.held_nbytes for tile in leaving)
        text = f"saved      {in_words(plan.kept)} of activations stay on the device from forward to backward"
        where = f", {in_words(gone)} in {counted(len(leaving), 'tile')} go to {leaving[0].tier}" if leaving else ""
        lines.append(text + where)
    if plan.unmoved:
        lines.append(f"unmoved    {in_words(plan.unmoved)} of buffers and parameters stay on the device throughout")
    if divided := [tile for tile in leaving if tile.partitioned]:
        lines.append(
            f"divided    {counted(len(divided), 'activation')} over {divided[0].ranks} ranks of tensor parallelism: "
            f"{in_words(sum(t.held_nbytes for t in divided))} of {in_words(sum(t.nbytes for t in divided))} are here"
        )
    lifetimes = plan.lifetimes
    if always := [plan.tiles[index].nbytes for index in lifetimes.of_tile if lifetimes.is_always_kept(index)]:
        lines.append(f"resident   {counted(len(always), 'tile')} ({in_words(sum(always))}) in memory from step to step")
    return "\n".join(lines)


def _formats(frozen_dtype: FrozenDtype | FrozenPatterns) -> str:
    if isinstance(frozen_dtype, str):
        return frozen_dtype
    return ", ".join(f"{pattern} {form or 'as they are'}" for pattern, form in frozen_dtype)


_STAGES = (
    "every rank has everything",
    "optimizer states are partitioned",
    "optimizer states and gradients are partitioned",
    "optimizer states, gradients and parameters are partitioned",
)


def _parameters(plan: Plan) -> int:
    return sum(sum(tile.updated_elements(0)) for tile in plan.tiles if not tile.activation)


def _legend(plan: Plan, short: Mapping[str, str]) -> str:
    lines = [
        "A line per operator: the tiles that it waits for, and the transfers that start then and run meanwhile.",
        "Cells name modules; a name stands for all parameters of one (~: cut), +n for n smaller modules.",
    ]
    path, name = max(short.items(), key=lambda item: len(item[0]) - len(item[1]), default=("", ""))
    if path != name:
        lines.append(f"{name} stands for {path}.")
    if pack := next((tile for tile in plan.tiles if tile.members), None):
        name, further = short[module_of(first_parameter(pack))], len(pack.members) - 1
        lines.append(f"{name}&{further} is a pack: a parameter of {name} and {further} more.")
    lines.append("prologue: what starts before operator 0. fetched: bytes of which the read from NVMe starts here.")
    if any("keep" in _columns(plan, graph).values() for graph in plan.graphs):
        lines.append("keeps: what stays in memory for its next use, and is not moved again for it.")
    if any(live_range.prefetched for live_range in plan.lifetimes):
        lines.append("*: the forward graph starts these transfers, with which the backward graph begins.")
    if idle := _idle_stages(plan):
        lines.append(f"Stages that move nothing in this placement: {', '.join(idle)}.")
    return "\n".join(lines)


def _idle_stages(plan: Plan) -> list[str]:
    """The stages of a tile's live range that stand in the schedule and cost nothing."""
    tiers = {tile.tier for tile in plan.tiles}
    idle = [] if "nvme" in tiers else ["fetch"]
    idle += [] if tiers - {"device"} else ["upload"]
    if plan.world_size == 1:
        return [*idle, "all-gather", "reduce-scatter"]
    return idle + ([] if plan.stage == 3 else ["all-gather"])


def _traffic(plan: Plan) -> str:
    moved = dict(phases(plan))
    of_phase = {
        "NVMe -> host": [phase.nvme_to_host for phase in moved.values()],
        "host -> device": [phase.host_to_device for phase in moved.values()],
        "device -> host": [phase.device_to_host for phase in moved.values()],
        "host -> NVMe": [phase.host_to_nvme for phase in moved.values()],
    }
    if plan.world_size > 1:
        sent = {graph_sent.graph: graph_sent.total for graph_sent in communication(plan)}
        of_phase["to other ranks"] = [sent.get(phase, 0) for phase in moved]
    of_phase["NVMe in all"] = [phase.nvme for phase in moved.values()]
    rows = []
    for label, sizes in of_phase.items():
        per_parameter = f"{sum(sizes) / max(_parameters(plan), 1):.1f}"
        rows.append([label, *map(in_words, sizes), in_words(sum(sizes)), per_parameter])
    return _layout([["moved per step", *map(_title, moved), "total", "bytes per parameter"]], rows)


def _title(phase: str) -> str:
    return "Adam step" if phase == "optimizer" else phase


def _peaks(plan: Plan) -> str:
    rows = []
    for graph in plan.graphs:
        of_graph = flows(plan, graph)
        peak = max(of_graph, key=lambda f: f.device + f.host)
        sizes = max(f.device for f in of_graph), max(f.host for f in of_graph), peak.device + peak.host
        what = f"{graph.kind}, gradients included" if graph.kind == "backward" else graph.kind
        where = "prologue" if peak.operator == PROLOGUE else str(peak.operator)
        values = max((operator.values for operator in graph.operators), default=0)
        rows.append([what, *map(in_words, sizes), where if sizes[2] else "", in_words(values)])
    headers = ["most in flight", "device", "host", "together", "in operator", "values computed with"]
    return _layout([headers], rows)


def _arena(plan: Plan) -> str:
    """What the host arena holds at most in each phase, and of what."""
    uses = host_arena(plan)
    parts = {
        "tiles": [use.tiles for use in uses],
        "being written": [use.writes for use in uses],
        "activations": [use.activations for use in uses],
        "gradients": [use.gradients for use in uses],
        "parameters": [use.parameters for use in uses],
        "optimizer states": [use.states for use in uses],
        "optimizer chunks": [use.chunks for use in uses],
        "together": [use.total for use in uses],
    }
    rows = [[what, *map(in_words, sizes)] for what, sizes in parts.items() if any(sizes) or what == "together"]
    headers = ["host arena at most", *(_title(use.phase) for use in uses)]
    return _layout([headers], rows) + _regions(plan)


def _checkpoint(plan: Plan) -> list[str]:
    """What is saved of training, if it is."""
    of_one = checkpoint_sizes(plan)
    if not of_one.states:
        return []
    parts = {"parameters": of_one.parameters, "optimizer states": of_one.states}
    dtypes = sorted({*of_one.parameters, *of_one.states})
    rows = [
        [what, *(in_words(sizes.get(dtype, 0)) for dtype in dtypes), in_words(sum(sizes.values()))]
        for what, sizes in parts.items()
    ]
    rows.append(["in the store", *("" for _ in dtypes), in_words(of_one.in_store)])
    return [_layout([["checkpoint", *dtypes, "total"]], rows)]


def _regions(plan: Plan) -> str:
    """What is set apart for transfer buffers, in which each has its place."""
    regions, lines = plan.regions, []
    if regions.host:
        parts = f"{in_words(regions.host)} for transfers in one piece"
        if regions.chunks:
            parts += f", of which {in_words(regions.chunks)} for optimizer chunks"
        if states := host_states(plan).total:
            parts += f"; {in_words(states)} for states"
        lines.append(f"host arena {in_words(peak_host_bytes(plan))}: {parts}")
    if regions.device:
        lines.append(f"device arena {in_words(regions.device)}: for tiles in one piece")
    return "\n\n" + "\n".join(lines) if lines else ""
