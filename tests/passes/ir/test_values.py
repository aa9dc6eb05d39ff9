"""Bytes of values that operators compute with, and hand on."""

from __future__ import annotations

from passes.building import Builder, aten

from zinf_fx.passes.ir.values import handed_on, values_by_operator
from zinf_fx.passes.lowering.regions import Regions
from zinf_fx.passes.lowering.sink_gathers import SinkGathers


def test_values_are_there_from_where_they_are_computed_to_their_last_use() -> None:
    """Each value has 4 x 4 elements in fp32. A view keeps what it is of; what is returned, and an input, don't
    count."""
    built = Builder("forward", {"a": (4, 4), "b": (4, 4)})
    x = built.input(4, 4)
    hidden = built.call(aten.mm.default, x, built.gather("a"))
    wide = built.call(aten.cat.default, [hidden, hidden, hidden])  # [12, 4]
    halved = built.call(aten.relu.default, hidden)
    seen = built.call(aten.t.default, halved)
    saved = built.call(aten.sum.default, wide)
    product = built.call(aten.mm.default, seen, built.gather("b"))
    built.returns(built.call(aten.add.Tensor, product, saved), saved)
    graph = built.graph
    Regions()(graph, SinkGathers()(graph, built.context))
    nbytes = 4 * 4 * 4
    assert values_by_operator(graph) == {0: nbytes + 3 * nbytes + nbytes, 1: nbytes + nbytes}
    assert handed_on(graph, 2, ()) == [nbytes, 0]
    assert handed_on(graph, 2, {halved}) == [0, 0]
