"""Bytes that training needs: model states, activations, and what must be on the device at the least.

ZeRO-Infinity, section 3, for a Transformer trained with Adam in mixed precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.symbols import batch, heads, hidden, interval, layers, sequence


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each model state; of a model with several dtypes, or frozen parameters, on average.
    `reread`: of the parameters, what an update reads."""

    parameters: float
    gradients: float
    optimizer: float
    reread: float = 0.0

    @property
    def total(self) -> float:
        """Of all model states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def values(self) -> dict[sympy.Symbol, float]:
        """For `evaluate`."""
        return {
            s.parameter_bytes: self.parameters,
            s.gradient_bytes: self.gradients,
            s.optimizer_bytes: self.optimizer,
            s.reread_bytes: self.reread,
        }


# fp16 parameters and gradients; fp32 parameters, momentum and variance: K = 12 (ZeRO, section 3.1).
ZERO_STATES = StateBytes(2, 2, 12)
# The same and fp32 gradients: 20 bytes in total (ZeRO-Infinity, section 3).
INFINITY_STATES = StateBytes(2, 2, 16)

transformer_parameters = layers * (hidden * 3 * hidden + hidden * hidden + hidden * 4 * hidden + 4 * hidden * hidden)
"""Parameters of a Transformer: four linear layers per block, (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd).

Embeddings, norms and biases are left out (ZeRO-Infinity, section 3).
"""

model_states = (s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes) * s.parameters
"""Bytes of parameters, gradients and optimizer states (ZeRO, section 3.1: 2Ψ + 2Ψ + KΨ)."""

activation_checkpoints = 2 * batch * sequence * hidden * layers / interval
"""Bytes of the fp16 inputs of every ci-th block (ZeRO-Infinity, equation 1)."""

partitioned_checkpoints = activation_checkpoints / s.tensor_ranks
"""Bytes of activation checkpoints per device, divided over the model-parallel devices (ZeRO, section 6.1: P_a)."""

model_state_working_memory = 4 * hidden * 4 * hidden
"""Bytes of the largest operator's fp16 parameter and gradient, (hd, 4hd) (ZeRO-Infinity, section 3: MSWM)."""

activation_working_memory = batch * sequence * interval * (16 * hidden + 2 * heads * sequence)
"""Bytes of the activations between two checkpoints (ZeRO-Infinity, section 3: AWM)."""

all_activations = layers * activation_working_memory / interval
"""Bytes of activations that are kept without checkpoints: those of every block."""
