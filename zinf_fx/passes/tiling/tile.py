"""Memory-centric tiling: a parameter that is too large becomes a sequence of tiles (ZeRO-Infinity, section 5.1.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import fx

from zinf_fx import ops
from zinf_fx.passes.ir.framework import GraphContext, Pass, TileKey, gathers_in, operand, results_of, start_argument
from zinf_fx.passes.ir.gradient_parts import gradient_outputs
from zinf_fx.passes.ir.rewriting import emit, erase_unused, set_results
from zinf_fx.passes.tiling.weight_gradients import aten, check_term, is_sum, rows_of_term, terms_of, untransposed
from zinf_fx.passes.tiling.weight_uses import Rows, Untileable, tile_use, uses_of
from zinf_fx.plan.schedule import Tile
from zinf_fx.sizes import WINDOW_ALIGNMENT, round_up


@dataclass(frozen=True)
class TileParameters(Pass):
    """Divide each parameter of more than `limit` bytes into ranges of rows, and what is computed with it.

    Forward, the gradients of inputs and the gradient of the parameter itself are all computed range by range: a linear
    layer along its output dimension, an embedding by rows. The results of the ranges are put together (bitwise what
    they were) or, where the rows are what a product sums over, added in order. A parameter of which any use can't be
    divided stays whole, and `context.undivided` says why.
    """

    name = "tile"
    provides = ("tiled",)
    changes_numerics = True

    limit: int

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        gathers = gathers_in(graph)
        for token, tile in context.tiles.items():
            tiles = divided(tile, self.limit)
            if len(tiles) == 1:
                continue
            try:
                if token in context.written:
                    raise Untileable("forward writes to it")
                _DividedParameter(graph, context, gathers[token], tiles).run()
            except Untileable as reason:
                context = replace(context, undivided={**context.undivided, token: str(reason)})
            else:
                context = replace(context, divided={**context.divided, token: tiles})
        return context


def divided(tile: Tile, limit: int) -> tuple[Tile, ...]:
    """The tiles of at most `limit` bytes, or of one row, of a parameter: as even as alignment lets them be."""
    if tile.nbytes <= limit or len(tile.shape) < 2 or not all(isinstance(size, int) for size in tile.shape):
        return (tile,)
    total, elements = tile.shape[0], math.prod(tile.shape[1:])
    if tile.ranks > 1:
        return _in_segments(tile, limit)
    most = max(limit // (elements * tile.dtype.itemsize), 1)
    step = WINDOW_ALIGNMENT // math.gcd(WINDOW_ALIGNMENT, elements)
    step = step if step <= most else 1
    most = most // step * step
    rows_of_tile = round_up(-(-total // -(-total // most)), step)
    rows = [(start, min(start + rows_of_tile, total)) for start in range(0, total, rows_of_tile)]
    return tuple(replace(tile, shape=(end - start, *tile.shape[1:]), rows=(start, end)) for start, end in rows)


def _in_segments(tile: Tile, limit: int) -> tuple[Tile, ...]:
    """The tiles of a parameter that is divided over ranks: of whole segments (see [Note: segments])."""
    total, per_row = math.prod(tile.shape), math.prod(tile.shape[1:])
    if not tile.segment:
        return (tile,)
    elements = max(limit // (tile.segment * tile.dtype.itemsize), 1) * tile.segment
    tiles: list[Tile] = []
    left = tile.shard
    for start in range(0, total, elements):
        end = min(start + elements, total)
        shard = -(-(end - start) // tile.ranks) if tile.owned or end < total else left
        left -= shard
        rows = (start // per_row, end // per_row)
        tiles.append(replace(tile, shape=(rows[1] - rows[0], *tile.shape[1:]), rows=rows, shard=shard))
    return tuple(tiles) if len(tiles) > 1 else (tile,)


class _DividedParameter:
    """The division of one parameter."""

    def __init__(self, graph: fx.Graph, context: GraphContext, gathers: list[fx.Node], tiles: tuple[Tile, ...]) -> None:
        self._graph, self._context, self._gathers = graph, context, gathers
        self._token, self._tiles = operand(gathers[0]), tiles
        self._shape = context.tiles[self._token.name].shape
        bounds = [tile.rows for tile in tiles if tile.rows is not None]
        self._ranges = [Rows(start, end, last=end == bounds[-1][1]) for start, end in bounds]
        # By what is multiplied with the parameter, the last node of each range: there its gradient is due.
        self._ends: dict[fx.Node, list[list[fx.Node]]] = {}

    def run(self) -> None:
        """Raises: Untileable, before anything is changed."""
        uses = [use for gather in self._gathers for use in uses_of(gather)]
        if len({use.node for use in uses}) < len(uses):
            raise Untileable("one operation computes with it twice")
        token = self._token.name
        gradients = gradient_outputs(self._graph, self._context)
        mine = {p: g for p, g in gradients.items() if self._context.gradients[p] == token}
        for gradient in mine.values():
            for term in terms_of(gradient):
                check_term(term)
        for use in uses:
            beside = untransposed(use.other_operand)
            ends = tile_use(use, self._ranges, self._gather)
            self._ends.setdefault(beside, []).append(ends)
        for gather in self._gathers:
            _erase_chain(self._graph, gather)
        for position in mine:
            self._divide_gradient(position)

    def _gather(self, rows: Rows, like: fx.Node) -> fx.Node:
        rest, dtype, device = self._shape[1:], *self._gathers[0].args[2:4]
        start = start_argument(TileKey(self._token.name, rows.start * math.prod(rest)))
        return emit(like, ops.gather, self._token, [rows.end - rows.start, *rest], dtype, device, **start)

    def _divide_gradient(self, position: int) -> None:
        output = self._graph.output_node()
        results = results_of(self._graph)
        index = len(results) - self._context.backward_outputs + position
        gradient = results[index]
        results[index] = self._assemble(gradient, output)
        set_results(self._graph, results)
        erase_unused(gradient)

    def _assemble(self, gradient: fx.Node, output: fx.Node) -> fx.Node:
        """The gradient, put together from its ranges: a concatenation for each term, and their sum."""
        assembled: list[fx.Node] = []
        pending = [(gradient, False)]
        while pending:
            node, is_last = pending.pop()  # whether the last two that are assembled are those that it is the sum of
            if is_sum(node) and not is_last:
                pending += [(node, True), *((argument, False) for argument in reversed(node.args))]
                continue
            made = (
                (aten.add.Tensor, assembled.pop(-2), assembled.pop())
                if is_last
                else (aten.cat.default, self._parts(node))
            )
            with self._graph.inserting_before(output):
                assembled.append(emit(node, *made))
        return assembled[0]

    def _parts(self, term: fx.Node) -> list[fx.Node]:
        """The ranges of a term."""
        parts: list[fx.Node] = []
        for number in range(len(self._ranges)):
            parts.append(self._part(term, number, parts[-1:]))
        return parts

    def _part(self, term: fx.Node, number: int, before: list[fx.Node]) -> fx.Node:
        """One range of a term, computed as soon as its inputs are there, and after what uses the same range."""
        inputs = check_term(term)
        of_uses = (ends for value in inputs for ends in self._ends.get(untransposed(value), ()))
        latest = max((*inputs, *before, *(ends[number] for ends in of_uses)))  # nodes compare by position
        if latest.op == "placeholder":
            latest = max(self._graph.find_nodes(op="placeholder"))
        with self._graph.inserting_before(latest.next):
            return rows_of_term(term, self._ranges[number])


def _erase_chain(graph: fx.Graph, node: fx.Node) -> None:
    """Remove a gather that is no longer used, with the transpositions and casts of it."""
    for user in list(node.users):
        _erase_chain(graph, user)
    graph.erase_node(node)
