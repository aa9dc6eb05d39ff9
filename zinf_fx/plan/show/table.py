"""The plan as plain text: a table per graph with a line per operator, and what a step moves.

Cells name modules, not parameters: `0.qkv` stands for the weight and the bias of `blocks.0.attention.qkv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from zinf_fx.plan.journeys import TRANSFERS
from zinf_fx.plan.memory.accounting import Flow, Traffic, always_kept, flows, phases, tiles_of
from zinf_fx.plan.memory.use import host_arena, living, most
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.schedule import HEAD, GraphSchedule, Operator
from zinf_fx.plan.show.curve import ASCII, Glyphs
from zinf_fx.plan.show.memory_curve import render_curves
from zinf_fx.plan.show.names import GraphNames, PlanNames
from zinf_fx.plan.simulation.communication import communication
from zinf_fx.sizes import in_words

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
_MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


def render(plan: Plan, *, width: int = WIDTH, operators: range | None = None, glyphs: Glyphs = ASCII) -> str:
    """The plan as text of at most `width` columns (as far as names allow).

    `operators`: the operators to print; default all. The head line is printed with operator 0. Charts are of all.
    `glyphs`: what charts are drawn with.
    """
    names = PlanNames(plan)
    parts = [_header(plan), _legend(plan, names)]
    for graph in plan.graphs:
        parts += [_graph(plan, graph, names, width, operators), *render_curves(plan, graph, glyphs, width)]
    parts += [_traffic(plan), _peaks(plan), _arena(plan)]
    return "\n\n".join(parts) + "\n"


# -- the tables -------------------------------------------------------------------------------------------------------


def _graph(plan: Plan, graph: GraphSchedule, names: PlanNames, width: int, wanted: range | None) -> str:
    columns = _columns(plan, graph)
    there = set(columns.values())
    kinds = [kind for kind in _TITLES if kind in there]
    flow_of = {flow.operator: flow for flow in flows(plan, graph)}
    unit = _Unit.of(max((max(f.fetched, f.device, f.host) for f in flow_of.values()), default=0))
    count = len(graph.operators)
    shown = [o for o in (HEAD, *range(count)) if wanted is None or max(o, 0) in wanted]
    title = f"{graph.kind.upper()}: {_count(count, 'operator')}"
    if len(shown) <= count:
        title += f", {_shown_part(shown, count)}"
    if not shown:
        return title
    heads = [("", "op"), ("", "computes"), *(_TITLES[k] for k in kinds), ("", "fetched"), ("in flight", "device")]
    header = list(zip(*heads, ("", "host"), strict=True))
    align = ("right", *["left"] * (len(kinds) + 1), *["right"] * 3)
    of_graph = names.of(plan, graph)
    rows = [_Row(graph, operator, kinds, columns, of_graph) for operator in shown]
    for limit, detailed in _CELLS:
        lines = [[*row.cells(limit, detailed), *_sizes(flow_of[row.operator], unit)] for row in rows]
        text = _layout(header, lines, align)
        if max(map(len, text.splitlines())) <= width:
            break
    return f"{title}; sizes in {unit.name}\n\n{text}"


def _layout(header: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    """Columns two spaces apart, under a line of dashes. The header goes in as rows: tabulate would pad it."""
    widths = [max(map(len, column)) for column in zip(*header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    text = tabulate([*header, rule, *rows], tablefmt="plain", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _shown_part(shown: Sequence[int], count: int) -> str:
    if not shown:
        return f"none in the range asked for (the last is {count - 1})"
    return f"shown are {max(shown[0], 0)} to {shown[-1]}"


def _sizes(flow: Flow, unit: _Unit) -> list[str]:
    return [unit.show(flow.fetched), unit.show(flow.device), unit.show(flow.host)]


def _columns(plan: Plan, graph: GraphSchedule) -> dict[int, str]:
    """By number, the columns that a graph's events stand in. What moves nothing, because the tile is in memory, has
    none."""
    journeys, number = plan.journeys, plan.graphs.index(graph)
    found: dict[int, str] = {}
    for position, event in enumerate(graph.events):
        if event.kind in TRANSFERS:
            transfer = journeys.transfer(number, position)
            if transfer is None or transfer.stay.found != "kept":
                found[position] = event.kind
        elif event.kind == "release" and (stay := journeys.stay_of(number, position)).kept:
            if not journeys.is_always_kept(stay.tile):
                found[position] = "keep"
        else:
            found[position] = "offload" if event.kind == "offload_activation" else event.kind
    return found


@dataclass(frozen=True)
class _Row:
    """One line: what an operator computes, and what happens to which tiles meanwhile."""

    graph: GraphSchedule
    operator: int
    kinds: Sequence[str]
    columns: Mapping[int, str]
    names: GraphNames

    def cells(self, limit: int, detailed: bool) -> list[str]:
        """The cells before the sizes, each of at most about `limit` characters.

        `detailed`: say which operations are computed, besides the module.
        """
        tiles = [self._tiles(kind, limit) for kind in self.kinds]
        if self.operator == HEAD:
            return ["", "head", *tiles]
        operator = self.graph.operators[self.operator]
        return [str(self.operator), _computes(self.graph, operator, self.names, limit, detailed), *tiles]

    def _tiles(self, kind: str, limit: int) -> str:
        numbers = (number for number, _ in self.graph.numbered(self.operator))
        names = self.names.groups(number for number in numbers if self.columns.get(number) == kind)
        everything = " ".join(names)
        if len(everything) <= limit or not names:
            return everything
        rest = f" +{len(names) - 1}" if len(names) > 1 else ""
        return _middle_cut(names[0], max(limit - len(rest), 5)) + rest


def _computes(graph: GraphSchedule, operator: Operator, names: GraphNames, limit: int, detailed: bool) -> str:
    """The module whose matrix opens the operator, and its heavy operations, which stand alone where no matrix does."""
    label = _plain_label(operator.label)
    opening = [e.tile for e in graph.at(operator.index, "wait") if graph.tiles[e.tile].opens_operator]
    if not opening:
        return _end_cut(label, max(limit, 8))
    module = names.short(graph.tiles[opening[0]].name)
    if not detailed or not label:
        return _middle_cut(module, limit)
    limit = max(limit, 26)
    room = limit - len(module) - 2
    return f"{module}: {_end_cut(label, room)}" if room >= min(len(label), 8) else _middle_cut(module, limit)


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


# -- around the tables ------------------------------------------------------------------------------------------------


def _header(plan: Plan) -> str:
    tiles = [tile for tile in tiles_of(plan).values() if not tile.activation]
    leaving = [tile for tile in tiles_of(plan).values() if tile.activation]
    config, placement = plan.config, plan.config.placement
    parameters = sum(t.nbytes // t.dtype.itemsize for t in tiles)
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tiles}))
    total = sum(t.nbytes for t in tiles)
    what = "a training step" if any(g.kind == "backward" for g in plan.graphs) else "inference"
    lines = [
        f"Plan of {what}: {_count(len(tiles), 'tile')}, {_count(parameters, 'parameter')} "
        f"({dtypes}, {in_words(total)}), {_count(plan.world_size, 'rank')}"
    ]
    if placement != "auto":
        states = ("parameters", "gradients", "optimizer", "activations")
        lines.append("placement  " + ", ".join(f"{state} on {getattr(placement, state)}" for state in states))
        if plan.world_size > 1:
            groups = f" over the {plan.world_size // plan.replicas} of each of {_count(plan.replicas, 'group')}"
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
    lines.append(
        f"options    compute {config.compute}, activations {config.activations}, tile {_tile_text(config.tile)}"
    )
    if plan.kept or leaving:
        gone = sum(tile.held_nbytes for tile in leaving)
        text = f"saved      {in_words(plan.kept)} of activations stay on the device from forward to backward"
        where = f", {in_words(gone)} in {_count(len(leaving), 'tile')} go to {leaving[0].tier}" if leaving else ""
        lines.append(text + where)
    if plan.unmoved:
        lines.append(f"unmoved    {in_words(plan.unmoved)} of buffers and parameters stay on the device throughout")
    if divided := [tile for tile in leaving if tile.partitioned]:
        lines.append(
            f"divided    {_count(len(divided), 'activation')} over {divided[0].ranks} ranks of tensor parallelism: "
            f"{in_words(sum(t.held_nbytes for t in divided))} of {in_words(sum(t.nbytes for t in divided))} are here"
        )
    if always := always_kept(plan):
        nbytes = sum(tiles_of(plan)[label].nbytes for label in always)
        lines.append(f"resident   {_count(len(always), 'tile')} ({in_words(nbytes)}) in memory from step to step")
    return "\n".join(lines)


_STAGES = (
    "every rank has everything",
    "optimizer states are partitioned",
    "optimizer states and gradients are partitioned",
    "optimizer states, gradients and parameters are partitioned",
)


def _tile_text(tile: int | str | None) -> str:
    return in_words(tile) if isinstance(tile, int) else str(tile)


def _legend(plan: Plan, names: PlanNames) -> str:
    lines = [
        "A line per operator: the tiles that it waits for, and the transfers that start then and run meanwhile.",
        "Cells name modules; a name stands for all parameters of one (~: cut), +n for n smaller modules.",
    ]
    if names.example and names.example[0] != names.example[1]:
        path, short = names.example
        lines.append(f"{short} stands for {path}.")
    lines.append("head: what starts before operator 0. fetched: bytes of which the read from NVMe starts here.")
    if any("keep" in _columns(plan, graph).values() for graph in plan.graphs):
        lines.append("keeps: what stays in memory for its next use, and is not moved again for it.")
    if any(stay.ahead for stay in plan.journeys):
        lines.append("*: the turn. The forward graph starts these transfers, with which the backward graph begins.")
    if idle := _idle_stages(plan):
        lines.append(f"Stages that move nothing in this placement: {', '.join(idle)}.")
    return "\n".join(lines)


def _idle_stages(plan: Plan) -> list[str]:
    """The stages of a tile's journey that stand in the schedule and cost nothing."""
    tiers = {tile.tier for tile in tiles_of(plan).values()}
    idle = [] if "nvme" in tiers else ["fetch"]
    idle += [] if tiers - {"device"} else ["upload"]
    if plan.world_size == 1:
        return [*idle, "all-gather", "reduce-scatter"]
    return idle + ([] if plan.stage == 3 else ["all-gather"])


def _traffic(plan: Plan) -> str:
    titles = {"optimizer": "Adam step"}
    columns = list(phases(plan))
    total = sum((moved for _, moved in columns), Traffic())
    parameters = sum(t.nbytes // t.dtype.itemsize for t in tiles_of(plan).values() if not t.activation)
    directions = {
        "NVMe -> host": "nvme_to_host",
        "host -> device": "host_to_device",
        "device -> host": "device_to_host",
        "host -> NVMe": "host_to_nvme",
    }
    rows = []
    for label, name in directions.items():
        moved = getattr(total, name)
        per_phase = [in_words(getattr(phase, name)) for _, phase in columns]
        rows.append([label, *per_phase, in_words(moved), f"{moved / max(parameters, 1):.1f}"])
    if plan.world_size > 1:
        sent = {each.graph: each.total for each in communication(plan)}
        per_phase = [in_words(sent.get(name, 0)) for name, _ in columns]
        in_all = sum(sent.values())
        rows.append(["to other ranks", *per_phase, in_words(in_all), f"{in_all / max(parameters, 1):.1f}"])
    per_parameter = f"{total.nvme / max(parameters, 1):.1f}"
    rows.append(["NVMe in all", *[in_words(phase.nvme) for _, phase in columns], in_words(total.nvme), per_parameter])
    headers = ["moved per step", *(titles.get(n, n) for n, _ in columns), "total", "bytes per parameter"]
    align = ("left", *["right"] * (len(headers) - 1))
    return _layout([headers], rows, align)


def _peaks(plan: Plan) -> str:
    rows = []
    for graph in plan.graphs:
        of_graph = flows(plan, graph)
        peak = max(of_graph, key=lambda f: f.device + f.host)
        sizes = max(f.device for f in of_graph), max(f.host for f in of_graph), peak.device + peak.host
        what = f"{graph.kind}, gradients included" if graph.kind == "backward" else graph.kind
        where = "head" if peak.operator == HEAD else str(peak.operator)
        rows.append([what, *map(in_words, sizes), where if sizes[2] else ""])
    headers = ["most in flight", "device", "host", "together", "in operator"]
    return _layout([headers], rows, ("left", *["right"] * 4))


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
    headers = ["host arena at most", *({"optimizer": "Adam step"}.get(use.phase, use.phase) for use in uses)]
    return _layout([headers], rows, ("left", *["right"] * len(uses))) + _regions(plan)


def _regions(plan: Plan) -> str:
    """What is set apart for transfer buffers, in which each has its place."""
    regions, lines = plan.regions, []
    if regions.host:
        parts = f"{in_words(regions.host)} for transfers in one piece"
        if regions.chunks:
            parts += f", of which {in_words(regions.chunks)} for optimizer chunks"
        if states := living(plan).total:
            parts += f"; {in_words(states)} for states"
        lines.append(f"host arena {in_words(most(plan))}: {parts}")
    if regions.device:
        lines.append(f"device arena {in_words(regions.device)}: for tiles in one piece")
    return "\n\n" + "\n".join(lines) if lines else ""


# -- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """The unit of one table's sizes."""

    name: str
    nbytes: int

    @classmethod
    def of(cls, largest: int) -> _Unit:
        """The unit in which the largest of some sizes has at most four digits before the point."""
        for power, name in enumerate(("KiB", "MiB", "GiB")):
            if largest < 10000 * 1024 ** (power + 1) or name == "GiB":
                return cls(name, 1024 ** (power + 1))
        raise AssertionError("unreachable")

    def show(self, nbytes: int) -> str:
        """The size without its unit; nothing for 0."""
        return f"{nbytes / self.nbytes:.1f}" if nbytes else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
