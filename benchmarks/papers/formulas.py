"""The formulas of the papers: memory, communication, and the bandwidth that an efficiency takes, in sympy.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC '20).
ZeRO-Infinity: Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning"
(SC '21).

Formulas are written in the papers' symbols alone, and become numbers by `evaluate`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import sympy

from zinf_fx.config import PRESETS


def _whole(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, positive=True)


def _amount(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True)


# The model (ZeRO-Infinity, section 3).
layers = _whole("nl")
hidden = _whole("hd")
heads = _whole("attn_heads")
sequence = _whole("seq")
interval = _whole("ci")
"""Transformer blocks from one activation checkpoint to the next."""
batch = _amount("bsz")
"""Sequences per device. An average over devices, so not always whole: ZeRO-Infinity's table 1 has 1.25."""
parameters = _whole("Psi")

# The cluster (ZeRO, figure 1 and section 1; ZeRO-Infinity, section 4).
ranks = _whole("N_d")
"""Degree of data parallelism."""
tensor_ranks = _whole("N_m")
"""Degree of model parallelism."""
device_memory = _amount("M")
"""Bytes of one device."""
peak = _amount("peak_tp")
"""FLOP per second that one device achieves when it waits for no transfer."""
bandwidth = _amount("bw")
"""Bytes per second that one device sees."""
intensity = _amount("ait")
"""FLOP per byte moved."""
efficiency = _amount("e")
"""Time of compute over time of the step, between 0 and 1."""

# The states (ZeRO, section 3.1). Bytes per parameter: 2, 2 and K for mixed precision.
parameter_bytes = _whole("b_p")
gradient_bytes = _whole("b_g")
optimizer_bytes = _whole("K")


def evaluate(expression: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    """Return the number that an expression is for these values: an int where it is exactly one.

    Raises: KeyError naming the symbols that have no value.
    """
    expression = sympy.sympify(expression)
    known = {symbol: sympy.sympify(values[symbol]) for symbol in expression.free_symbols & values.keys()}
    result = expression.xreplace(known)  # `subs` would simplify after each symbol
    if result.free_symbols:
        raise KeyError(f"no value for {', '.join(sorted(map(str, result.free_symbols)))} in {expression}")
    return int(result) if result.is_integer else float(result)


# -- memory: bytes of model states, of activations, and on the device at the least (ZeRO-Infinity, section 3) ----------


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each model state."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the bytes of all model states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def values(self) -> dict[sympy.Symbol, float]:
        """For `evaluate`."""
        return {
            parameter_bytes: self.parameters,
            gradient_bytes: self.gradients,
            optimizer_bytes: self.optimizer,
        }


# fp16 parameters and gradients; fp32 parameters, momentum and variance: K = 12 (ZeRO, section 3.1).
ZERO_STATES = StateBytes(2, 2, 12)
# The same and fp32 gradients: 20 bytes in total (ZeRO-Infinity, section 3).
INFINITY_STATES = StateBytes(2, 2, 16)

transformer_parameters = layers * (hidden * 3 * hidden + hidden * hidden + hidden * 4 * hidden + 4 * hidden * hidden)
"""Parameters of a Transformer: four linear layers per block, (hd, 3hd), (hd, hd), (hd, 4hd) and (4hd, hd).

Embeddings, norms and biases are left out (ZeRO-Infinity, section 3).
"""

model_states = (parameter_bytes + gradient_bytes + optimizer_bytes) * parameters
"""Bytes of parameters, gradients and optimizer states (ZeRO, section 3.1: 2Ψ + 2Ψ + KΨ)."""

activation_checkpoints = 2 * batch * sequence * hidden * layers / interval
"""Bytes of the fp16 inputs of every ci-th block (ZeRO-Infinity, equation 1)."""

partitioned_checkpoints = activation_checkpoints / tensor_ranks
"""Bytes of activation checkpoints per device, divided over the model-parallel devices (ZeRO, section 6.1: P_a)."""

model_state_working_memory = 4 * hidden * 4 * hidden
"""Bytes of the largest operator's fp16 parameter and gradient, (hd, 4hd) (ZeRO-Infinity, section 3: MSWM)."""

activation_working_memory = batch * sequence * interval * (16 * hidden + 2 * heads * sequence)
"""Bytes of the activations between two checkpoints (ZeRO-Infinity, section 3: AWM)."""

all_activations = layers * activation_working_memory / interval
"""Bytes of activations that are kept without checkpoints: those of every block."""


# -- partitions: what one device has of states that are divided over devices (ZeRO, section 5) -------------------------

State = Literal["parameters", "gradients", "optimizer"]
STATES: tuple[State, ...] = ("parameters", "gradients", "optimizer")

_BY_STAGE: tuple[State, ...] = ("optimizer", "gradients", "parameters")
PARTITIONED: dict[str, frozenset[State]] = {
    preset: frozenset(_BY_STAGE[: PRESETS[preset].stage]) for preset in ("dp", "zero-1", "zero-2", "zero-3")
}
"""The states that are divided over the data-parallel devices: P_os, P_os+g, P_os+g+p (ZeRO, section 5)."""

_BYTES = {"parameters": parameter_bytes, "gradients": gradient_bytes, "optimizer": optimizer_bytes}


def per_device(partitioned: Collection[State], states: Collection[State] = STATES) -> sympy.Expr:
    """Return the bytes of `states` that one device is responsible for.

    All states: 4Ψ + KΨ/N_d for P_os, 2Ψ + (2+K)Ψ/N_d for P_os+g, (4+K)Ψ/N_d for P_os+g+p (ZeRO, sections 5.1 to 5.3).
    """
    nbytes = [_BYTES[state] * parameters / (ranks if state in partitioned else 1) for state in states]
    return sympy.Add(*nbytes)


def largest_model(partitioned: Collection[State]) -> sympy.Expr:
    """Return the parameters of the largest model whose states fit in device memory.

    Model parallelism divides the states before they are divided over data-parallel devices (ZeRO, table 2).
    """
    per_parameter = per_device(partitioned) / parameters
    return sympy.simplify(tensor_ranks * device_memory / per_parameter)


# -- communication: elements sent to and from each device in a step (ZeRO, sections 7 and 8) ---------------------------

# A ring over N devices moves (N-1)/N of a message per collective. The paper counts the whole message, which is the
# limit for many devices: `for_many_ranks` of the volumes here gives its figures.


def all_gather(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """Each device receives the parts of all others."""
    return message * (among - 1) / among


def reduce_scatter(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """Each device receives what the others add to its part: as much as in an all-gather."""
    return all_gather(message, among)


def all_reduce(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """Return the volume of a reduce-scatter and an all-gather (ZeRO, section 7.1)."""
    return reduce_scatter(message, among) + all_gather(message, among)


def for_many_ranks(volume: sympy.Expr) -> sympy.Expr:
    """Return what a volume tends to as devices are added, the message itself being the same."""
    for among in (ranks, tensor_ranks):
        volume = sympy.limit(volume, among, sympy.oo)
    return volume


def gathers_of_parameters(partitioned: Collection[State], recompute: bool = False) -> int:
    """Return how often a step all-gathers every parameter.

    Partitioned parameters are gathered for forward and for backward (ZeRO, section 7.2.2), and once more when backward
    computes activations again (ZeRO-Infinity, section 4.1). Else, once where each device updates its own partition
    (7.2.1), and never in plain data parallelism, where all devices update everything.
    """
    if "parameters" in partitioned:
        return 3 if recompute else 2
    return 1 if "optimizer" in partitioned else 0


def data_parallel_volume(partitioned: Collection[State]) -> sympy.Expr:
    """Elements per device and step: 2Ψ for data parallelism, P_os and P_os+g, 3Ψ for P_os+g+p (ZeRO, section 7)."""
    gathers = gathers_of_parameters(partitioned)
    reduction = reduce_scatter(parameters) if gathers else all_reduce(parameters)
    return reduction + gathers * all_gather(parameters)


model_parallel_volume = 6 * layers * all_reduce(batch * sequence * hidden, tensor_ranks)
"""Elements that Megatron-LM's model parallelism exchanges per device and step (ZeRO, section 8).

Two all-reduces of a block's activations in forward, two in the recomputation and two in backward. The paper
leaves out the batch in its total of 12 x seq x hd per block, which it names in the size of a message.
"""

partitioned_checkpoints_volume = layers * all_gather(batch * sequence * hidden, tensor_ranks)
"""Elements that P_a adds: an all-gather of each block's checkpoint before its recomputation (ZeRO, section 8)."""

offloaded_checkpoints_volume = 2 * layers * batch * sequence * hidden / tensor_ranks
"""Elements that P_a+cpu moves to host memory and back: this device's part of each checkpoint (ZeRO, section 8).

Twice what P_a stores.
"""


# -- efficiency: the bandwidth that it takes, for each state (ZeRO-Infinity, section 4) --------------------------------

reached_efficiency = intensity * bandwidth / (intensity * bandwidth + peak)
"""Compute time over compute and communication time, when they don't overlap (equation 2)."""

needed_bandwidth = peak * efficiency / (intensity * (1 - efficiency))
"""Bytes per second for an efficiency: equation 2, solved for the bandwidth."""

computation = 2 * 4 * batch * sequence * parameters
"""FLOP per device and step (equation 3): a multiplication and an addition per parameter and token in forward, twice
that in backward, and once more because backward computes activations again."""

computation_of_transformer = computation.subs(parameters, transformer_parameters)
"""Equation 4: equation 3 for 12 x nl x hd² parameters."""


def parameters_and_gradients_moved(recompute: bool = True) -> sympy.Expr:
    """Bytes: parameters are loaded for forward, for backward and for the recomputation; gradients are stored once.

    2 x 4 x parameters in fp16 (section 4.1).
    """
    return ((3 if recompute else 2) * parameter_bytes + gradient_bytes) * parameters


optimizer_states_moved = 2 * optimizer_bytes * parameters
"""Bytes: optimizer states are read and written once, 2 x 16 x parameters (section 4.1)."""

activation_checkpoints_moved = 2 * activation_checkpoints
"""Bytes: checkpoints are stored in forward and loaded in backward (section 4.1)."""

intensity_of_parameters_and_gradients = sympy.simplify(computation / parameters_and_gradients_moved())
"""FLOP per byte: seq x bsz in fp16 (section 4.1)."""

intensity_of_optimizer_states = sympy.simplify(computation / optimizer_states_moved)
"""FLOP per byte: seq x bsz / 4 with 16 bytes of states (section 4.1)."""

intensity_of_activation_checkpoints = sympy.simplify(computation_of_transformer / activation_checkpoints_moved)
"""FLOP per byte: 24 x hd x ci (section 4.1)."""
