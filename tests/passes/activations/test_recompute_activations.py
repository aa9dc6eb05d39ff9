"""recompute_activations: few bytes cross from forward to backward, and the values stay those of eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, combinations, pairwise
from typing import NamedTuple

import pytest
import torch
from gate import named
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager, train
from passes.models import CASES
from torch import nn

from zinf_fx.config import Config
from zinf_fx.passes.activations.recompute import RecomputeActivations, _best_cuts, _cut_by_size, _least_peak
from zinf_fx.passes.activations.segments import Segments
from zinf_fx.passes.ir.printer import print_graph, type_text

RECOMPUTE = Config(placement="infinity-nvme", activations="recompute")


def two_layers(read: bool) -> Builder:
    """Each computes something wide; `read`: which backward reads."""
    built = Builder("joint", {"a.weight": (8, 8)})
    x, tangent = built.input(2, 8), built.input(2, 8, name="tangents_1")
    weight = built.gather("a.weight")
    stream, wides = x, []
    for _ in range(2):
        wides.append(built.call(aten.cat.default, [built.call(aten.mm.default, stream, weight)] * 4))
        stream = built.call(aten.add.Tensor, stream, built.call(aten.slice.Tensor, wides[-1], 0, 0, 2))
    loss = built.call(aten.sin.default, stream)
    gradient = built.call(aten.mul.Tensor, tangent, built.call(aten.cos.default, stream))
    for wide in reversed(wides if read else []):
        gradient = built.call(aten.mul.Tensor, gradient, built.call(aten.mean.dim, wide, [0]))
    built.returns(loss, None, gradient, backward=2)
    return built


def test_what_backward_does_not_read_is_no_reason_for_a_cut() -> None:
    cuts = [len(_best_cuts(Segments(built.graph, built.context))) for built in map(two_layers, (True, False))]
    assert cuts == [1, 0]


def test_golden() -> None:
    built = two_layers(read=True)
    built.check(
        RecomputeActivations(),
        before="""
        joint graph
        inputs
          a.weight : f32[8, 8] on nvme, gradient on host
          %0 : f32[2, 8]
          %1 : f32[2, 8]
        nodes
          %2 = gather a.weight : f32[8, 8]
          %3 = aten.mm(%0, %2) : f32[2, 8]
          %4 = aten.cat([%3, %3, %3, %3]) : f32[8, 8]
          %5 = aten.slice.Tensor(%4, 0, 0, 2) : f32[2, 8]
          %6 = aten.add.Tensor(%0, %5) : f32[2, 8]
          %7 = aten.mm(%6, %2) : f32[2, 8]
          %8 = aten.cat([%7, %7, %7, %7]) : f32[8, 8]
          %9 = aten.slice.Tensor(%8, 0, 0, 2) : f32[2, 8]
          %10 = aten.add.Tensor(%6, %9) : f32[2, 8]
          %11 = aten.sin(%10) : f32[2, 8]
          %12 = aten.cos(%10) : f32[2, 8]
          %13 = aten.mul.Tensor(%1, %12) : f32[2, 8]
          %14 = aten.mean.dim(%8, [0]) : f32[8]
          %15 = aten.mul.Tensor(%13, %14) : f32[2, 8]
          %16 = aten.mean.dim(%4, [0]) : f32[8]
          %17 = aten.mul.Tensor(%15, %16) : f32[2, 8]
        return %11
        return of backward None, %17
        """,
        after="""
        joint graph
        inputs
          a.weight : f32[8, 8] on nvme, gradient on host
          %0 : f32[2, 8]
          %1 : f32[2, 8]
        nodes
          %2 = gather a.weight : f32[8, 8]
          %3 = aten.mm(%0, %2) : f32[2, 8] [must_recompute]
          %4 = aten.cat([%3, %3, %3, %3]) : f32[8, 8] [must_recompute]
          %5 = aten.slice.Tensor(%4, 0, 0, 2) : f32[2, 8] [must_recompute]
          %6 = aten.add.Tensor(%0, %5) : f32[2, 8] [must_save]
          %7 = aten.mm(%6, %2) : f32[2, 8] [must_save]
          %8 = aten.cat([%7, %7, %7, %7]) : f32[8, 8] [must_save]
          %9 = aten.slice.Tensor(%8, 0, 0, 2) : f32[2, 8] [must_save]
          %10 = aten.add.Tensor(%6, %9) : f32[2, 8] [must_save]
          %11 = aten.sin(%10) : f32[2, 8] [must_save]
          %12 = aten.cos(%10) : f32[2, 8]
          %13 = aten.mul.Tensor(%1, %12) : f32[2, 8]
          %14 = aten.mean.dim(%8, [0]) : f32[8]
          %15 = aten.mul.Tensor(%13, %14) : f32[2, 8]
          %16 = aten.mean.dim(%4, [0]) : f32[8]
          %17 = aten.mul.Tensor(%15, %16) : f32[2, 8]
        return %11
        return of backward None, %17
        """,
    )


def test_a_deep_model_saves_the_stream_between_layers_and_the_last_layer() -> None:
    record = train(_Deep(), torch.randn(3, 4), config=replace(RECOMPUTE, pack=None))
    forward, context = record.planned["forward"]
    results = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    saved = [type_text(node.meta["val"]) for node in results[1:] if node.name not in context.tiles]
    assert saved.count("f32[3, 16]") == 2, print_graph(forward.graph, context)
    assert len(saved) == 6 + 6, "the input and five cuts, and what eager PyTorch saves of the last layer"


def test_no_cut_is_where_more_crosses_than_between_layers() -> None:
    stage = train(_Narrowing(), torch.randn(3, 4), config=replace(RECOMPUTE, pack=None)).stage("recompute_activations")
    segments = Segments(stage.before, stage.context_before)
    cuts = _best_cuts(segments)
    assert len(cuts) >= 4
    for cut in cuts:
        assert [type_text(node.meta["val"]) for node in segments.crossing[cut]] == ["f32[3, 4]"]


def test_cuts_save_the_least_that_segments_of_a_size_allow() -> None:
    draw = random.Random(0)
    for _ in range(200):
        case = drawn(draw)
        limit = draw.randint(1, case.total)
        least, peaks = None, set()
        for cuts in case.choices():
            nbytes, sizes = case.saved_and_sizes(cuts)
            if all(size <= limit or after == before + 1 for (before, after), size in sizes.items()):
                if least is None or nbytes < least:
                    least, peaks = nbytes, set()
                if nbytes == least:
                    peaks.add(nbytes + max(sizes.values()))
        chosen, peak = _cut_by_size(case.begins, case.total, case.saved, limit)
        assert peak in peaks
        assert chosen == sorted(set(chosen))


def test_no_cuts_have_a_much_lower_peak() -> None:
    draw = random.Random(1)
    for _ in range(200):
        case = drawn(draw)

        def peak(cuts: Sequence[int], case: Case = case) -> int:
            nbytes, sizes = case.saved_and_sizes(cuts)
            return nbytes + max(sizes.values())

        least = peak(_least_peak(case.begins, case.total, case.saved))
        assert 7 * least <= 8 * min(map(peak, case.choices())) + 7  # a limit is rounded down


class Case(NamedTuple):
    """Begins of segments, of as many bytes as `total`; what a cut saves, by candidate and begin of its segment."""

    begins: list[int]
    total: int
    saved: list[list[int]]

    def choices(self) -> Iterable[tuple[int, ...]]:
        """Return all sets of cuts."""
        count = len(self.saved)
        return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))

    def saved_and_sizes(self, cuts: Sequence[int]) -> tuple[int, dict[tuple[int, int], int]]:
        """Return bytes that are saved, and those of each segment, by the numbers of its begin and its end."""
        at = [0, *(number + 1 for number in cuts), len(self.begins)]
        ends = [*self.begins, self.total]
        nbytes = sum(self.saved[after - 1][before] for before, after in pairwise(at[:-1]))
        return nbytes, {(before, after): ends[after] - ends[before] for before, after in pairwise(at)}


def drawn(draw: random.Random) -> Case:
    count = draw.randint(1, 6)
    begins = [0, *accumulate(draw.randint(1, 9) for _ in range(count))]
    # What crosses candidate n was computed behind candidate m - 1: some bytes by m.
    crossing = [[draw.randint(0, 5) for _ in range(number + 1)] for number in range(count)]
    return Case(begins, begins[-1] + draw.randint(0, 9), [[sum(row[b:]) for b in range(len(row))] for row in crossing])


@pytest.mark.parametrize(
    "name", named(CASES, {"mlp", "selectively_checkpointed", "batch_norm", "changed_input", "effectful_operation"})
)
def test_trains_like_eager(name: str) -> None:
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=RECOMPUTE)


class _Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()


class _Narrowing(nn.Module):
    """Has layers with a middle in which little crosses, but more than between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
            for _ in range(16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().sum()
