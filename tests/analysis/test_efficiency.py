"""Equations 2 to 4 of ZeRO-Infinity, and the intensities, which are derived and not written down."""

from __future__ import annotations

import sympy

from zinf_fx.analysis import efficiency
from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.memory import INFINITY_STATES, ZERO_STATES


def test_intensities_of_section_4_1():
    states = efficiency.intensity_of_parameters_and_gradients.subs(INFINITY_STATES.values)
    assert states == s.sequence * s.batch
    optimizer = efficiency.intensity_of_optimizer_states
    assert optimizer.subs(INFINITY_STATES.values) == s.sequence * s.batch / 4
    assert optimizer.subs(ZERO_STATES.values) == s.sequence * s.batch / 3
    assert efficiency.intensity_of_activation_checkpoints == 24 * s.hidden * s.interval


def test_computation_of_equation_4():
    assert efficiency.computation_of_transformer == 96 * s.batch * s.sequence * s.layers * s.hidden**2
    assert efficiency.computation == 8 * s.batch * s.sequence * s.parameters


def test_the_needed_bandwidth_is_equation_2_solved():
    (solved,) = sympy.solve(sympy.Eq(efficiency.efficiency, s.efficiency), s.bandwidth)
    assert sympy.simplify(solved - efficiency.needed_bandwidth) == 0


def test_bytes_of_section_4_1():
    states = INFINITY_STATES.values
    assert efficiency.parameters_and_gradients_moved().subs(states) == 8 * s.parameters
    assert efficiency.parameters_and_gradients_moved(recompute=False).subs(states) == 6 * s.parameters
    assert efficiency.optimizer_states_moved.subs(states) == 32 * s.parameters
