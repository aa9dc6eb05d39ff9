"""The formulas agree with figures worked out by hand, statements of the papers, and each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sympy

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from papers import formulas as f
from papers.formulas import INFINITY_STATES, PARTITIONED, STATES, ZERO_STATES, evaluate, largest_model, per_device

GPT_2 = {f.layers: 48, f.hidden: 1600, f.heads: 16, f.batch: 32, f.sequence: 1024, f.interval: 1}


def test_the_model_states_of_section_3():
    """There are 12 x nl x hd² parameters, and 240 x nl x hd² bytes."""
    assert f.transformer_parameters == 12 * f.layers * f.hidden**2
    states = f.model_states.subs(f.parameters, f.transformer_parameters).subs(INFINITY_STATES.values)
    assert states == 240 * f.layers * f.hidden**2


def test_gpt_2_as_zero_has_it():
    """ZeRO, sections 3.1 and 3.2: 1.5 billion parameters have 24 GB of states."""
    parameters = evaluate(f.transformer_parameters, GPT_2)
    assert parameters == 12 * 48 * 1600 * 1600
    assert evaluate(f.model_states, {**ZERO_STATES.values, f.parameters: 1.5e9}) == 24e9
    assert evaluate(f.activation_checkpoints, GPT_2) == 2 * 32 * 1024 * 1600 * 48
    assert evaluate(f.activation_checkpoints, GPT_2 | {f.interval: 4}) == 32 * 1024 * 1600 * 24


def test_longer_sequences_take_more_working_memory():
    """ZeRO-Infinity, footnote 3: from 1024 to 2048, that of a trillion parameters grows 3 x, from 3.56 GB to 11 GB."""
    values = {f.hidden: 25 * 1024, f.heads: 256, f.batch: 4, f.interval: 1}
    short, long = (
        evaluate(f.activation_working_memory, {**values, f.sequence: length}) / 2**30 for length in (1024, 2048)
    )
    assert round(short, 2) == 3.56 and round(long) == 11 and round(long / short) == 3


def test_every_block_between_checkpoints_is_working_memory():
    values = GPT_2 | {f.interval: 6}
    assert evaluate(f.all_activations, values) == 8 * evaluate(f.activation_working_memory, values)


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
    """The stages are those of ZeRO, sections 5.1 to 5.3."""
    ours = per_device(PARTITIONED[stage]).subs({f.parameter_bytes: 2, f.gradient_bytes: 2})
    expected = sympy.sympify(formula, locals={"K": f.optimizer_bytes, "Psi": f.parameters, "N_d": f.ranks})
    assert sympy.simplify(ours - expected) == 0


def test_the_largest_model_fills_the_device():
    for stage in ("dp", "zero-1", "zero-2", "zero-3"):
        model = largest_model(PARTITIONED[stage])
        filled = per_device(PARTITIONED[stage], STATES).subs(f.parameters, model) / f.tensor_ranks
        assert sympy.simplify(filled - f.device_memory) == 0


def test_a_symbol_without_a_value_is_named():
    with pytest.raises(KeyError, match="no value for hd, nl in"):
        evaluate(f.activation_checkpoints, {f.batch: 1, f.sequence: 8, f.interval: 1})


# Communication


@pytest.mark.parametrize(("preset", "times"), [("dp", 2), ("zero-1", 2), ("zero-2", 2), ("zero-3", 3)])
def test_volumes_of_section_7(preset: str, times: int):
    volume = f.data_parallel_volume(PARTITIONED[preset])
    assert f.for_many_ranks(volume) == times * f.parameters
    # Of a ring: half of every message on two devices, nothing on one.
    assert evaluate(volume, {f.parameters: 10, f.ranks: 2}) == times * 5
    assert evaluate(volume, {f.parameters: 10, f.ranks: 1}) == 0


def test_parameters_are_gathered_once_more_for_a_recomputation():
    whole, own = PARTITIONED["zero-2"], PARTITIONED["zero-3"]
    counts = [f.gathers_of_parameters(p, recompute) for p in (whole, own) for recompute in (False, True)]
    assert counts == [1, 1, 2, 3]


def test_volumes_of_section_8():
    """A block sends 12 x seq x hd, and P_a adds an all-gather."""
    block = f.layers * f.batch * f.sequence * f.hidden
    model_parallel, added = f.model_parallel_volume, f.partitioned_checkpoints_volume
    assert f.for_many_ranks(model_parallel) == 12 * block
    assert sympy.simplify(added / model_parallel) == sympy.Rational(1, 12)  # whatever the number of devices
    assert f.offloaded_checkpoints_volume * f.tensor_ranks == 2 * block


# Efficiency


def test_intensities_of_section_4_1():
    states = f.intensity_of_parameters_and_gradients.subs(INFINITY_STATES.values)
    assert states == f.sequence * f.batch
    optimizer = f.intensity_of_optimizer_states
    assert optimizer.subs(INFINITY_STATES.values) == f.sequence * f.batch / 4
    assert optimizer.subs(ZERO_STATES.values) == f.sequence * f.batch / 3
    assert f.intensity_of_activation_checkpoints == 24 * f.hidden * f.interval


def test_computation_of_equation_4():
    assert f.computation_of_transformer == 96 * f.batch * f.sequence * f.layers * f.hidden**2
    assert f.computation == 8 * f.batch * f.sequence * f.parameters


def test_the_needed_bandwidth_is_equation_2_solved():
    (solved,) = sympy.solve(sympy.Eq(f.reached_efficiency, f.efficiency), f.bandwidth)
    assert sympy.simplify(solved - f.needed_bandwidth) == 0


def test_bytes_of_section_4_1():
    states = INFINITY_STATES.values
    assert f.parameters_and_gradients_moved().subs(states) == 8 * f.parameters
    assert f.parameters_and_gradients_moved(recompute=False).subs(states) == 6 * f.parameters
    assert f.optimizer_states_moved.subs(states) == 32 * f.parameters
