"""How much bandwidth a wanted efficiency takes, for each state (ZeRO-Infinity, section 4)."""

from __future__ import annotations

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.memory import activation_checkpoints, transformer_parameters
from zinf_fx.analysis.symbols import bandwidth, batch, intensity, peak, sequence

efficiency = intensity * bandwidth / (intensity * bandwidth + peak)
"""Compute time over compute and communication time, when they don't overlap (equation 2)."""

needed_bandwidth = peak * s.efficiency / (intensity * (1 - s.efficiency))
"""Bytes per second for an efficiency: equation 2, solved for the bandwidth."""

computation = 2 * 4 * batch * sequence * s.parameters
"""FLOP per device and step (equation 3): a multiplication and an addition per parameter and token in forward, twice
that in backward, and once more because backward computes activations again."""

computation_of_transformer = computation.subs(s.parameters, transformer_parameters)
"""Equation 4: equation 3 for 12 x nl x hd² parameters."""


def parameters_and_gradients_moved(recompute: bool = True) -> sympy.Expr:
    """Bytes: parameters are loaded for forward, for backward and for the recomputation; gradients are stored once.

    2 x 4 x parameters in fp16 (section 4.1).
    """
    return ((3 if recompute else 2) * s.parameter_bytes + s.gradient_bytes) * s.parameters


optimizer_states_moved = 2 * s.optimizer_bytes * s.parameters
"""Bytes: optimizer states are read and written once, 2 x 16 x parameters (section 4.1)."""

activation_checkpoints_moved = 2 * activation_checkpoints
"""Bytes: checkpoints are stored in forward and loaded in backward (section 4.1)."""

intensity_of_parameters_and_gradients = sympy.simplify(computation / parameters_and_gradients_moved())
"""FLOP per byte: seq x bsz in fp16 (section 4.1)."""

intensity_of_optimizer_states = sympy.simplify(computation / optimizer_states_moved)
"""FLOP per byte: seq x bsz / 4 with 16 bytes of states (section 4.1)."""

intensity_of_activation_checkpoints = sympy.simplify(computation_of_transformer / activation_checkpoints_moved)
"""FLOP per byte: 24 x hd x ci (section 4.1)."""
