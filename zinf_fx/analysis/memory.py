"""Bytes that training needs: model states, activations, and what must be on the device at the least.

ZeRO-Infinity, section 3, for a Transformer trained with Adam in mixed precision.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.symbols import batch, heads, hidden, interval, layers, sequence


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each model state; of a model with several dtypes, or frozen parameters, on average."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Of all model states."""
        return sum(astuple(self))

    @property
    def values(self) -> dict[sympy.Symbol, float]:
        """For `evaluate`."""
        return {s.parameter_bytes: self.parameters, s.gradient_bytes: self.gradients, s.optimizer_bytes: self.optimizer}


# fp16 parameters and gradients; fp32 parameters, momentum and variance: K = 12 (ZeRO, section 3.1).
ZERO_STATES = StateBytes(2, 2, 12)
# The same and fp32 gradients: 20 bytes in total (ZeRO-Infinity, section 3).
INFINITY_STATES = StateBytes(2, 2, 16)


def transformer_parameters() -> sympy.Expr:
    """Parameters of a Transformer: four linear layers per block, (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd).

    Embeddings, norms and biases are left out (ZeRO-Infinity, section 3).
    """
    per_block = hidden * 3 * hidden + hidden * hidden + hidden * 4 * hidden + 4 * hidden * hidden
    return layers * per_block


def model_states() -> sympy.Expr:
    """Bytes of parameters, gradients and optimizer states (ZeRO, section 3.1: 2Ψ + 2Ψ + KΨ)."""
    return (s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes) * s.parameters


def activation_checkpoints() -> sympy.Expr:
    """Bytes of the fp16 inputs of every ci-th block (ZeRO-Infinity, equation 1)."""
    return 2 * batch * sequence * hidden * layers / interval


def partitioned_checkpoints() -> sympy.Expr:
    """Bytes of activation checkpoints per device, divided over the model-parallel devices (ZeRO, section 6.1: P_a)."""
    return activation_checkpoints() / s.tensor_ranks


def model_state_working_memory() -> sympy.Expr:
    """Bytes of the largest operator's fp16 parameter and gradient, (hd, 4hd) (ZeRO-Infinity, section 3: MSWM)."""
    return 4 * hidden * 4 * hidden


def activation_working_memory() -> sympy.Expr:
    """Bytes of the activations between two checkpoints (ZeRO-Infinity, section 3: AWM)."""
    return batch * sequence * interval * (16 * hidden + 2 * heads * sequence)


def all_activations() -> sympy.Expr:
    """Bytes of activations that are kept without checkpoints: those of every block."""
    return layers * activation_working_memory() / interval
