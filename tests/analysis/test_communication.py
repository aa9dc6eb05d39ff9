"""What devices exchange: the ring's share, and what the papers count for many devices."""

from __future__ import annotations

import pytest
import sympy

from zinf_fx.analysis import communication
from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.partitioning import PARTITIONED
from zinf_fx.analysis.symbols import evaluate


@pytest.mark.parametrize(("preset", "times"), [("dp", 2), ("zero-1", 2), ("zero-2", 2), ("zero-3", 3)])
def test_volumes_of_section_7(preset: str, times: int):
    volume = communication.data_parallel_volume(PARTITIONED[preset])
    assert communication.for_many_ranks(volume) == times * s.parameters
    # Of a ring: half of every message on two devices, nothing on one.
    assert evaluate(volume, {s.parameters: 10, s.ranks: 2}) == times * 5
    assert evaluate(volume, {s.parameters: 10, s.ranks: 1}) == 0


def test_parameters_are_gathered_once_more_for_a_recomputation():
    whole, own = PARTITIONED["zero-2"], PARTITIONED["zero-3"]
    counts = [communication.gathers_of_parameters(p, recompute) for p in (whole, own) for recompute in (False, True)]
    assert counts == [1, 1, 2, 3]


def test_volumes_of_section_8():
    """12 x seq x hd per block, and an all-gather more for P_a."""
    block = s.layers * s.batch * s.sequence * s.hidden
    model_parallel, added = communication.model_parallel_volume, communication.partitioned_checkpoints_volume
    assert communication.for_many_ranks(model_parallel) == 12 * block
    assert sympy.simplify(added / model_parallel) == sympy.Rational(1, 12)  # whatever the number of devices
    assert communication.offloaded_checkpoints_volume * s.tensor_ranks == 2 * block
