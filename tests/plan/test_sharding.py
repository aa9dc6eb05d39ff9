"""How elements are divided over ranks: every one is some rank's, and tiles are consecutive in every shard."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_fx import Config
from zinf_fx.plan.sharding import Groups, Owners, shards_of
from zinf_fx.sizes import BITS, BLOCK


@given(
    st.tuples(st.integers(0, 300), st.integers(0, 70)),
    st.integers(1, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 20_000)),
    st.booleans(),
)
def test_every_element_is_in_one_shard(
    shape: tuple[int, int], ranks: int, on_nvme: bool, limit: int | None, owned: bool
):
    partition = "owner" if owned else "shards"
    config = Config(tile=limit, placement="nvme" if on_nvme else "host", partition=partition)
    shards = shards_of(shape, torch.float32, ranks, config, ranks - 1)
    assert ranks == 1 or shards.owner == (ranks - 1 if owned else None)
    elements: list[int] = []
    for rank in range(ranks):
        positions = []
        for part in shards.of_rank(rank):
            elements += part
            positions += [shards.position(rank, part.start), shards.position(rank, part.start) + len(part)]
        assert positions == sorted(positions) and positions[-1] <= shards.held_by(rank)
    assert sorted(elements) == list(range(shape[0] * shape[1]))
    for segment, following in pairwise(shards.segments):
        assert segment.padded == segment.count and segment.count % max(shape[1], 1) == 0  # whole rows, without padding
        assert (segment.start + segment.count, segment.held + segment.shard) == (following.start, following.held)
    assert shards.padded == sum(map(shards.held_by, range(ranks))) >= shards.numel
    for block in (BITS, BLOCK):  # of optimizer states, what has one companion
        blocks = shards.in_blocks(block)
        for rank in range(ranks):
            pairs = list(zip(filter(None, shards.of_rank(rank)), filter(None, blocks.of_rank(rank)), strict=True))
            assert [range(own.start // block, -(-own.stop // block)) for own, _ in pairs] == [own for _, own in pairs]
            assert all(own.start % block == 0 for own, _ in pairs)


def test_segments_are_of_the_size_asked_for():
    shards = shards_of((1024, 64), torch.float32, 4, Config(tile=64 * 4 * 256, placement="host"))
    assert [segment.count // 64 for segment in shards.segments] == [256, 256, 256, 256]
    assert shards.of_rank(1)[2] == range(64 * 512 + 4096, 64 * 512 + 8192)
    assert [segment.start // 64 for segment in shards.within(64 * 256, 64 * 512)] == [256, 512]
    with pytest.raises(AssertionError):
        shards.within(64, 64 * 256)


def test_the_segments_of_a_tile_are_found_without_a_look_at_all():
    """A pass of a model in tiles asks for those of each tile."""

    class Unlooked(tuple):
        def __iter__(self):
            raise AssertionError("all segments are looked at")

    shards = shards_of((1024, 64), torch.float32, 4, Config(tile=64 * 4 * 256, placement="host"))
    size, segments = shards.size, shards.segments
    shards.__dict__["segments"] = Unlooked(segments)
    assert shards.within(64 * 256, 64 * 512) == segments[1:3] and shards.size == size
    empty = shards_of((0, 64), torch.float32, 4, Config(placement="host"))
    assert empty.within(0, 0) == empty.segments


def test_owners_have_about_as_much_each():
    owners = Owners(3)
    assert [owners.next(nbytes) for nbytes in (4, 1, 2, 2, 1, 4)] == [0, 1, 2, 1, 2, 1]


def test_without_partitioning_every_rank_is_a_group():
    assert Groups.of(8, 2, 3) == Groups(2, 4) and Groups.of(8, 2, 0) == Groups(8, 1)
