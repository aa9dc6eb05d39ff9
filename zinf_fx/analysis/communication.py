"""What devices exchange in a step, in elements sent to and from each (ZeRO, sections 7 and 8).

A ring over N devices moves (N-1)/N of a message per collective. The paper counts the whole message, which is the limit
for many devices: `for_many_ranks` of the volumes here gives its figures.
"""

from __future__ import annotations

from collections.abc import Collection

import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.partitioning import State
from zinf_fx.analysis.symbols import batch, hidden, layers, ranks, sequence, tensor_ranks


def all_gather(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """Each device receives the parts of all others."""
    return message * (among - 1) / among


def reduce_scatter(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """Each device receives what the others add to its part: as much as in an all-gather."""
    return all_gather(message, among)


def all_reduce(message: sympy.Expr, among: sympy.Symbol = ranks) -> sympy.Expr:
    """A reduce-scatter, then an all-gather (ZeRO, section 7.1)."""
    return reduce_scatter(message, among) + all_gather(message, among)


def for_many_ranks(volume: sympy.Expr) -> sympy.Expr:
    """What a volume tends to as devices are added, the message itself being the same."""
    for among in (ranks, tensor_ranks):
        volume = sympy.limit(volume, among, sympy.oo)
    return volume


def gathers_of_parameters(partitioned: Collection[State], recompute: bool = False) -> int:
    """How often a step all-gathers every parameter.

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
    reduction = reduce_scatter(s.parameters) if gathers else all_reduce(s.parameters)
    return reduction + gathers * all_gather(s.parameters)


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
