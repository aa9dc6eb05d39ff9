"""Bytes of states and activations against figures worked out by hand, and the symbols' checks."""

from __future__ import annotations

import pytest
import sympy

from zinf_fx.analysis import memory
from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.memory import INFINITY_STATES, ZERO_STATES
from zinf_fx.analysis.partitioning import PARTITIONED, STATES, largest_model, on_tier, per_device
from zinf_fx.analysis.symbols import evaluate
from zinf_fx.config import PRESETS
from zinf_fx.placement import TIERS

GPT_2 = {s.layers: 48, s.hidden: 1600, s.heads: 16, s.batch: 32, s.sequence: 1024, s.interval: 1}


def test_the_model_states_of_section_3():
    """12 x nl x hd² parameters, 240 x nl x hd² bytes."""
    assert memory.transformer_parameters == 12 * s.layers * s.hidden**2
    states = memory.model_states.subs(s.parameters, memory.transformer_parameters).subs(INFINITY_STATES.values)
    assert states == 240 * s.layers * s.hidden**2


def test_gpt_2_as_zero_has_it():
    """ZeRO, sections 3.1 and 3.2: 1.5 billion parameters, 24 GB of states."""
    parameters = evaluate(memory.transformer_parameters, GPT_2)
    assert parameters == 12 * 48 * 1600 * 1600
    assert evaluate(memory.model_states, {**ZERO_STATES.values, s.parameters: 1.5e9}) == 24e9
    assert evaluate(memory.activation_checkpoints, GPT_2) == 2 * 32 * 1024 * 1600 * 48
    assert evaluate(memory.activation_checkpoints, GPT_2 | {s.interval: 4}) == 32 * 1024 * 1600 * 24


def test_longer_sequences_take_more_working_memory():
    """ZeRO-Infinity, footnote 3: from 1024 to 2048, that of a trillion parameters grows 3 x, from 3.56 GB to 11 GB."""
    values = {s.hidden: 25 * 1024, s.heads: 256, s.batch: 4, s.interval: 1}
    short, long = (
        evaluate(memory.activation_working_memory, {**values, s.sequence: length}) / 2**30 for length in (1024, 2048)
    )
    assert round(short, 2) == 3.56 and round(long) == 11 and round(long / short) == 3


def test_every_block_between_checkpoints_is_working_memory():
    values = GPT_2 | {s.interval: 6}
    assert evaluate(memory.all_activations, values) == 8 * evaluate(memory.activation_working_memory, values)


@pytest.mark.parametrize(
    ("stage", "formula"),
    [
        ("dp", "(4 + K)*Psi"),
        ("zero-1", "4*Psi + K*Psi/N_d"),
        ("zero-2", "2*Psi + (2 + K)*Psi/N_d"),
        ("zero-3", "(4 + K)*Psi/N_d"),
    ],
)
def test_the_stages_of_zero(stage: str, formula: str):
    """ZeRO, sections 5.1 to 5.3."""
    ours = per_device(PARTITIONED[stage]).subs({s.parameter_bytes: 2, s.gradient_bytes: 2})
    expected = sympy.sympify(formula, locals={"K": s.optimizer_bytes, "Psi": s.parameters, "N_d": s.ranks})
    assert sympy.simplify(ours - expected) == 0


def test_a_preset_places_every_state_on_one_tier():
    for preset, partitioned in PARTITIONED.items():
        assert preset in PRESETS
        total = sum(on_tier(preset, tier) for tier in TIERS)
        assert sympy.simplify(total - per_device(partitioned)) == 0
    assert on_tier("infinity-nvme", "device") == 0
    assert on_tier("zero-offload", "device") == s.parameter_bytes * s.parameters


def test_the_largest_model_fills_the_device():
    for stage in ("dp", "zero-1", "zero-2", "zero-3"):
        model = largest_model(PARTITIONED[stage])
        filled = per_device(PARTITIONED[stage], STATES).subs(s.parameters, model) / s.tensor_ranks
        assert sympy.simplify(filled - s.device_memory) == 0


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(KeyError, match="no value for hd, nl in"):
        evaluate(memory.activation_checkpoints, {s.batch: 1, s.sequence: 8, s.interval: 1})
