"""Saved activations leave the device in forward, and come back in backward as tiles do, with a prefetch of their own.

ZeRO-Infinity, section 5.1.2, offloads activation checkpoints to host memory and leaves NVMe for the future. What is
equal on all ranks of tensor parallelism can be divided over them, too, and all-gathered when it comes back: ZeRO,
section 6.1, Pa, and Pa+cpu where it leaves as well.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import fx

from zinf_fx import ops
from zinf_fx.config import Config, Tier
from zinf_fx.passes.activations.replication import EQUAL
from zinf_fx.passes.ir.aliases import memory_node
from zinf_fx.passes.ir.framework import GraphContext, Pass, bytes_computed, is_compute, results_of
from zinf_fx.passes.ir.rewriting import emit, set_results
from zinf_fx.plan.schedule import Tile
from zinf_fx.plan.sharding import Shards

log = logging.getLogger(__name__)

LEAVES = "zinf_leaves"
"""Node metadata: whether what is saved of the node's memory leaves the device; without it, it does."""

# Bytes below which an activation stays: a transfer costs as much as one of many more bytes.
SMALLEST = 1 << 14


@dataclass(frozen=True)
class LeavingActivations:
    """Saved activations that share memory, and leave.

    Attributes:
        memory, values: the node that made it, and those that are saved.
        tier: where it goes.
        ranks: how many keep a part of it each.
    """

    memory: fx.Node
    values: tuple[fx.Node, ...]
    tier: Tier
    ranks: int


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Save a token in the forward graph for each of `leaving`, as soon as its memory is computed."""

    name = "offload_activations"

    leaving: tuple[LeavingActivations, ...]

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        tokens: dict[fx.Node, fx.Node] = {}
        tiles = dict(context.tiles)
        for saved in self.leaving:
            memory = saved.memory
            with graph.inserting_after(memory):
                token = emit(memory, ops.offload_activation, memory, list(memory.meta["val"].stride()))
            tokens |= dict.fromkeys(saved.values, token)
            tiles[token.name] = _tile(saved, context.config)
        set_results(graph, (tokens.get(result, result) for result in results_of(graph)))
        return replace(context, tiles=tiles)


@dataclass(frozen=True)
class ReloadActivations(Pass):
    """Gather in the backward graph what was offloaded, where what was saved of it is used."""

    name = "reload_activations"

    leaving: tuple[LeavingActivations, ...]

    def __call__(self, graph: fx.Graph, context: GraphContext) -> GraphContext:
        inputs = {node.target: node for node in graph.find_nodes(op="placeholder")}
        first = next(node for node in graph.nodes if node.op != "placeholder")
        tiles = dict(context.tiles)
        for saved in self.leaving:
            memory = saved.memory.meta["val"]
            placeholders = [inputs[value.name] for value in saved.values]
            token = placeholders[0]
            tiles[token.name] = _tile(saved, context.config)
            with graph.inserting_before(first):
                gather = emit(token, ops.gather, token, [memory.numel()], memory.dtype, memory.device)
                for placeholder in placeholders:
                    value = placeholder.meta["val"]
                    offset = value.storage_offset() - memory.storage_offset()
                    arguments = (gather, list(value.shape), list(value.stride()), offset)
                    view = emit(placeholder, torch.ops.aten.as_strided.default, *arguments)
                    placeholder.replace_all_uses_with(view, lambda user, gather=gather: user is not gather)
            with memory.fake_mode:
                for placeholder in placeholders:
                    placeholder.meta["val"] = torch.empty((), dtype=torch.int64)
        return replace(context, tiles=tiles)


def saved_activations(
    forward: fx.Graph, results: int, tier: Tier, ranks: int
) -> tuple[tuple[LeavingActivations, ...], int]:
    """What the forward graph computes and saves for backward, beside its first `results` outputs: what is to leave for
    `tier`, or to be divided over `ranks` (see [Note: equal values]), and bytes of the rest.

    The rest is also what the caller gets too, what is small or has holes, what is saved as another type or conjugated,
    and what has a size known at run time only, of which a warning tells.
    """
    outputs = results_of(forward)
    returned = {memory_node(node) for node in outputs[:results] if isinstance(node, fx.Node)}
    values: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in outputs[results:]:
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            values[memory_node(node)].append(node)
    leaving, dynamic, kept = [], [], 0
    for memory, nodes in values.items():
        if not is_compute(memory):
            continue
        value, nbytes = memory.meta["val"], bytes_computed(memory)
        to = tier if memory.meta.get(LEAVES, True) else "device"
        among = ranks if memory.meta.get(EQUAL) else 1
        can = memory not in returned and nbytes >= SMALLEST and _is_dense(value)
        can = can and all(_is_plain_view(node.meta["val"], value) for node in nodes)
        if can and (to != "device" or among > 1):
            leaving.append(LeavingActivations(memory, tuple(dict.fromkeys(nodes)), to, among))
        else:
            kept += nbytes
            dynamic += [memory] if nbytes >= SMALLEST and not _is_static(value) else []
    if dynamic and (tier != "device" or ranks > 1):
        log.warning(
            "%d activations stay on the device, because their sizes are known at run time only (%s has the shape %s): "
            "torch.compile(..., dynamic=False) plans for each size",
            len(dynamic),
            dynamic[0].name,
            tuple(dynamic[0].meta["val"].shape),
        )
    return tuple(leaving), kept


def _is_static(value: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order of the dimensions, as far as is known."""
    if not _is_static(value):
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_plain_view(value: torch.Tensor, memory: torch.Tensor) -> bool:
    """Whether sizes, strides and an offset tell how the value lies in the memory."""
    plain = value.dtype == memory.dtype and not value.is_conj() and not value.is_neg()
    return plain and _is_static(value) and isinstance(value.storage_offset(), int)


def _tile(saved: LeavingActivations, config: Config) -> Tile:
    value, ranks = saved.memory.meta["val"], saved.ranks
    shards = Shards.of(value.numel(), ranks, config.on_nvme)
    return Tile(
        name=f"activation:{saved.memory.name}",
        shape=(value.numel(),),
        dtype=value.dtype,
        tier=saved.tier,
        gradient_tier=None,
        activation=True,
        ranks=ranks,
        shard=shards.size if ranks > 1 else 0,
        partitioned=ranks > 1,
    )
