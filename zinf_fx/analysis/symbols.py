"""The papers' symbols. Formulas are written in these alone, and become numbers by `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping

import sympy


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

# What one device sees of each link, in bytes per second, while all devices use theirs (ZeRO-Infinity, figure 2b).
link_bandwidth = _amount("bw_gg")
upload_bandwidth = _amount("bw_up")
download_bandwidth = _amount("bw_down")
read_bandwidth = _amount("bw_read")
write_bandwidth = _amount("bw_write")
update_bandwidth = _amount("bw_update")
"""Of the memory that optimizer states are updated in."""

# What one device does in a step, where it isn't derived from the model's dimensions.
work = _amount("F")
"""FLOP."""
checkpoint_bytes = sympy.Symbol("A", nonnegative=True)
"""Activation checkpoints."""

# The states (ZeRO, section 3.1). Bytes per parameter: 2, 2 and K for mixed precision.
parameter_bytes = _whole("b_p")
gradient_bytes = _whole("b_g")
optimizer_bytes = _whole("K")
reread_bytes = sympy.Symbol("b_r", nonnegative=True)
"""Of the weights, what an update reads: all of those that are their own masters, or a part of them; else none."""


def evaluate(expression: sympy.Expr, values: Mapping[sympy.Symbol, float]) -> float:
    """The number that an expression is for these values: an int where it is exactly one.

    Raises: KeyError naming the symbols that have no value.
    """
    expression = sympy.sympify(expression)
    known = {symbol: sympy.sympify(values[symbol]) for symbol in expression.free_symbols & values.keys()}
    result = expression.xreplace(known)  # `subs` would simplify after each symbol
    if result.free_symbols:
        raise KeyError(f"no value for {', '.join(sorted(map(str, result.free_symbols)))} in {expression}")
    return int(result) if result.is_integer else float(result)
