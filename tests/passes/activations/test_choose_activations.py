"""choose_activations: what costs least goes first, until the rest fits."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gate import slow
from passes.building import Builder, aten
from passes.capturing import assert_trains_like_eager
from passes.models import CASES
from torch import fx

from zinf_fx.config import Config
from zinf_fx.passes.activations import choose as choose_activations
from zinf_fx.passes.activations import offload as offload_activations
from zinf_fx.passes.activations.choose import ChooseActivations, PricedSegment, cheapest, seconds_of
from zinf_fx.passes.activations.offload import LEAVES
from zinf_fx.plan.rates import Rates

RATES = Rates(flops=1e9, memory=1e9, read=1e6, write=1e6, disk_read=1e6, disk_write=1e6, unified=False)
BYTES = 1 << 20
NEVER = 1e9


def part(count: int, seconds: float, name: str, nbytes: int = BYTES) -> PricedSegment:
    """Return a segment that saves `count` activations, and begins with one checkpoint of an eighth of that size."""
    graph = fx.Graph()
    node = lambda what: graph.placeholder(f"{name}_{what}")  # noqa: E731
    return PricedSegment({node(i): nbytes for i in range(count)}, {node("checkpoint"): nbytes // 8}, seconds)


def kept(parts: Sequence[PricedSegment], recomputed: set[int], leaving: set[fx.Node]) -> int:
    """Return bytes that stay, with the largest segment that is computed again, and what comes back together."""
    sizes: dict[fx.Node, int] = {}
    for number, segment in enumerate(parts):
        sizes |= segment.checkpoint if number in recomputed else segment.saved
    again = max((parts[number].nbytes for number in recomputed), default=0)
    coming = choose_activations._TOGETHER * max((sizes[node] for node in leaving), default=0)
    return sum(size for node, size in sizes.items() if node not in leaving) + again + coming


def test_what_fits_is_kept() -> None:
    parts = [part(2, 1.0, "a"), part(2, 1.0, "b")]
    assert cheapest(parts, 4 * BYTES, RATES, idle=0.0, and_last=False) == (set(), set())


def test_the_cheapest_segment_is_recomputed_first() -> None:
    parts = [part(4, 5.0, "a"), part(4, 1.0, "b"), part(4, 3.0, "c"), part(1, 0.1, "last")]
    recomputed, leaving = cheapest(parts, 13 * BYTES - 1, RATES, idle=0.0, and_last=False)
    assert 1 in recomputed and not leaving


def test_the_last_segment_is_recomputed_where_all_micro_batches_would_save_it() -> None:
    parts = [part(4, 5.0, "a"), part(4, 1.0, "last")]
    room = 8 * BYTES - 1
    assert cheapest(parts, room, RATES, idle=0.0, and_last=False)[0] == {0}
    assert cheapest(parts, room, RATES, idle=0.0, and_last=True)[0] == {0, 1}


def test_an_idle_disk_takes_what_was_computed_first() -> None:
    parts = [part(6, NEVER, "a"), part(6, NEVER, "b")]
    recomputed, leaving = cheapest(parts, 8 * BYTES, RATES, idle=NEVER, and_last=False)
    assert not recomputed
    assert leaving == set(parts[0].saved) | set(list(parts[1].saved)[:2])
    assert kept(parts, recomputed, leaving) <= 8 * BYTES


def test_a_busy_disk_takes_only_what_is_dearer_to_compute() -> None:
    transfer = BYTES * (1 / RATES.read + 1 / RATES.write)
    # Of two alike, one computed again at a time takes less room than both.
    cheap, dear = (
        [part(8, 8 * transfer * price, name) for name in ("a", "b")] + [part(1, 1.0, "last")] for price in (0.9, 1.1)
    )
    room = 10 * BYTES
    assert cheapest(cheap, room, RATES, idle=0.0, and_last=False) == ({0, 1}, set())
    recomputed, leaving = cheapest(dear, room, RATES, idle=0.0, and_last=False)
    assert not recomputed and leaving


def test_checkpoints_leave_too_when_nothing_else_helps() -> None:
    parts = [part(1, 1e-9, str(n), 64 * BYTES) for n in range(16)]
    recomputed, leaving = cheapest(parts, 64 * BYTES, RATES, idle=0.0, and_last=False)
    assert recomputed == set(range(15))
    assert any(node in leaving for segment in parts for node in segment.checkpoint)


def test_the_last_segment_is_never_recomputed() -> None:
    recomputed, leaving = cheapest([part(2, 1e-9, "only")], 1, RATES, idle=0.0, and_last=False)
    assert not recomputed and len(leaving) == 2


@pytest.mark.parametrize("seed", range(30))
def test_no_choice_of_segments_is_better_by_more_than_one(seed: int) -> None:
    """Without a tier to go to, the choice is a knapsack of segments; it is compared with all their subsets."""
    draw = random.Random(seed)
    parts = [part(draw.randint(1, 4), draw.uniform(0.1, 2.0), f"p{n}", 1000 * draw.randint(1, 9)) for n in range(8)]
    room = draw.randint(10_000, sum(segment.nbytes for segment in parts))
    recomputed, leaving = cheapest(parts, room, RATES, idle=0.0, and_last=False)
    assert not leaving, "all of them are too small to leave"
    subsets = (set(s) for count in range(8) for s in itertools.combinations(range(7), count))
    fitting = [s for s in subsets if kept(parts, s, set()) <= room]
    cost = lambda chosen: sum(parts[n].seconds for n in chosen)  # noqa: E731
    if fitting and kept(parts, recomputed, set()) <= room:
        largest = max(segment.seconds for segment in parts)
        # The room that a segment takes when it is computed again is not part of the relaxation: allow for one more.
        assert cost(recomputed) <= min(map(cost, fitting)) + 2 * largest
    elif fitting:
        pytest.fail("what would fit was not found")


def test_seconds_of_matrix_products_and_of_the_rest() -> None:
    built = Builder("joint")
    a, b = built.input(64, 32), built.input(32, 16, name="primals_y")
    product = built.call(aten.mm.default, a, b)
    assert seconds_of(product, RATES) == pytest.approx(2 * 64 * 32 * 16 / RATES.flops)
    assert seconds_of(built.call(aten.relu.default, product), RATES) == pytest.approx(2 * 64 * 16 * 4 / RATES.memory)
    assert seconds_of(built.call(aten.t.default, product), RATES) == 0


# Without room everything is computed again or leaves, as test_recompute_activations and test_offload_activations do to
# models; with a little, some segments stay.
CHOSEN = ("attention", "batch_norm")
ROOMS = [
    slow("mlp", 0),
    *((name, 2_000) for name in CHOSEN),
    slow("mlp", 2_000),
    *(slow(name, 2_000) for name in ("tied_far_apart", "checkpointed_dropout")),
    *(slow(name, 0) for name in CASES if name != "mlp"),
]


@pytest.mark.parametrize(("name", "room"), ROOMS)
def test_trains_like_eager(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_activations, "SMALLEST", 1)
    monkeypatch.setattr(offload_activations, "SMALLEST", 1)
    monkeypatch.setattr("zinf_fx.passes.pipeline._room_for_activations", lambda context, limit: room)
    model, inputs = CASES[name]()
    assert_trains_like_eager(model, *inputs, config=Config(placement="nvme", activations="auto"))


def test_golden() -> None:
    """Of two segments, the first leaves: the disk is idle while the second, whose products are dear, is computed."""
    built = Builder("joint", {"a.weight": (8, 8)})
    x, tangent = built.input(512, 8), built.input(512, 8, name="tangents_1")
    wide = built.call(aten.sin.default, built.call(aten.mm.default, x, built.gather("a.weight")))
    loss = built.call(aten.cos.default, wide)
    gradient = built.call(aten.mul.Tensor, tangent, built.call(aten.sin.default, wide))
    built.returns(loss, None, gradient, backward=2)
    built.run(ChooseActivations(0, replace(RATES, read=1e12, write=1e12)))
    assert [node.name for node in built.graph.nodes if node.meta[LEAVES]] == [wide.name]
    assert "[must_recompute]" not in built.text and built.text.count("[must_save]") == 3
    assert math.prod(wide.meta["val"].shape) * 4 == 1 << 14
