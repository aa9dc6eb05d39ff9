"""What the ranks that run one captured graph have to agree on."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import BudgetError, ConfigError, RanksError
from zinf_fx.frontend.graph_inputs import GraphInput
from zinf_fx.passes.activations.replication import Replicas
from zinf_fx.passes.ir.collectives import collectives_of, group_of, is_collective
from zinf_fx.passes.ir.fingerprint import lines_of
from zinf_fx.passes.ir.framework import GraphContext, key_of
from zinf_fx.plan.codec import encode
from zinf_fx.plan.files.digest import digest_of
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import of_first, resolved, tensor_ranks

log = logging.getLogger("zinf_fx")


class Agreement:
    """What the ranks that run a graph do alike.

    Attributes:
        alone: whether this rank plans by itself, for `groups` that may not be there.
        groups: the ranks that the graph is planned for.
        mesh: those over which saved activations are divided; None: over none.
        tensor_ranks: the same, as they communicate.
    """

    def __init__(self, config: Config, groups: Groups | None, inputs: Sequence[GraphInput]) -> None:
        """`groups`: to plan for, alone; None: those that train the model."""
        self._config = config
        self.alone = groups is not None
        self._ranks = Ranks.of(config) if groups is None else ALONE
        self.groups = self._ranks.groups if groups is None else groups
        self.mesh = mesh_of(config, [graph_input.given for graph_input in inputs])
        self.tensor_ranks = ALONE
        if self.mesh is not None and not self.alone:
            self.tensor_ranks = tensor_ranks(config, self.mesh.get_group())
        self._collectives: dict[Any, list[str]] = {}  # of the planned graphs, by group

    def check_together(self, inputs: Sequence[GraphInput]) -> None:
        """Raises: RanksError when other ranks are to run the graph than the parameters were divided over."""
        for graph_input in () if self.alone else inputs:
            if graph_input.is_stored and graph_input.taken.stored.bytes.allocation.is_reserved:
                divided_over = graph_input.taken.stored.shard.ranks.size
                if divided_over != self._ranks.size:
                    raise RanksError(
                        f"the model was offloaded for {divided_over} rank(s), and {self._ranks.size} are to run it: "
                        "initialise torch.distributed before offload(), and keep it until training ends"
                    )

    def rates_of_first(self, inputs: Sequence[GraphInput], measure: Callable[[], Rates]) -> Rates:
        """The rates that the first of the ranks measured, where choices depend on them."""
        if self._config.activations != "auto" or self.alone:
            return measure()
        given = [graph_input.given for graph_input in inputs]
        return self._ranks.decided_once(
            f"rates {digest_of(encode(self._config))}",
            lambda: of_first(self._config, given, measure(), "measured rates"),
        )

    def with_room(self, context: GraphContext, plan: Callable[[], int]) -> GraphContext:
        """The context of a joint graph, with what the budget leaves for the activations of every rank, whose batches
        may have other sizes: the most that one has in the first graph of these parameters, which all compile together.

        `plan`: plans the graph as this rank would, and returns the bytes of its activations. That plan is no other
        one's start: what it leaves for tiles is more than is left once activations have their room.

        Raises: BudgetError, on all ranks, where that fails on one.
        """
        if self.alone or self._ranks.size == 1 or context.config.device_memory is None:
            return context
        parameters = sorted(json.dumps(encode(tile)) for tile in context.tiles.values())
        key = f"activations {digest_of([encode(context.config), parameters])}"
        return replace(context, kept=self._ranks.decided_once(key, lambda: self._most_of_any_rank(plan)))

    def _most_of_any_rank(self, plan: Callable[[], int]) -> int:
        planned: int | str
        try:
            planned = plan()
        except BudgetError as error:
            planned = str(error)
        with unset_fake_temporarily():  # graphs are planned where tensors are fake
            by_rank = self._ranks.of_all(planned, "the bytes of activations")
        for rank, nbytes_or_error in enumerate(by_rank):
            if isinstance(nbytes_or_error, str):
                raise BudgetError(nbytes_or_error if rank == self._ranks.rank else f"rank {rank}: {nbytes_or_error}")
        return max(by_rank)

    def note_collectives(self, graph: fx.Graph, context: GraphContext) -> None:
        """Note the collectives that ranks of tensor parallelism start, in this order."""
        divided = {token for token, tile in context.tiles.items() if tile.activation and tile.partitioned}
        for node in graph.nodes:
            if is_collective(node):
                self._collectives.setdefault(resolved(group_of(node)), []).append(f"{context.kind}: {node.target}")
            elif self.mesh is not None and node.target is ops.allgather and key_of(node).token in divided:
                self._collectives.setdefault(self.mesh.get_group(), []).append(f"{context.kind}: activation")

    def compare(self) -> None:
        """Compare the model's own collectives and their order over the ranks that take part in them: what recomputing
        repeats may have been decided otherwise there. Those of the plan are compared when graphs run."""
        if not self.alone:
            for group, names in self._collectives.items():
                ranks = tensor_ranks(self._config, group)
                ranks.agree(f"{len(names)} of digest {digest_of(names)}", "the collectives in a graph")

    def check_first(self, arguments: Sequence[Any]) -> None:
        """Check the first call: what the ranks of tensor parallelism give to it must be equal."""
        if self.mesh is not None and not self.alone:
            check_equal(self.tensor_ranks, arguments)


def mesh_of(config: Config, inputs: Iterable[object]) -> DeviceMesh | None:
    """The ranks over which saved activations are to be divided: those that divide parameters.

    Raises: ConfigError where these are of several meshes, or of several dimensions.
    """
    if not config.partition_activations:
        return None
    meshes = {value.device_mesh for value in inputs if isinstance(value, DTensor)}
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise ConfigError(
            f"partition_activations=True divides activations over the ranks of tensor parallelism, and parameters are "
            f"divided over {', '.join(map(str, meshes))}: give one mesh of one dimension, or leave the option out"
        )
    return meshes.pop() if meshes else None


def replicas_of(
    graph: fx.Graph, context: GraphContext, inputs: Mapping[str, object], mesh: DeviceMesh, ranks: Ranks | None
) -> Replicas:
    """What a captured graph tells of values that are equal on all ranks of tensor parallelism: see
    [Note: equal values].

    `inputs`: by placeholder, what the caller gives. `ranks`: of `mesh`, whose graphs are compared; None: only one of
    them plans, and takes the others' graphs for equal.
    """
    of_mesh = [group for node in collectives_of(graph) if resolved(group := group_of(node)) is mesh.get_group()]
    whole = {name: value for name, value in inputs.items() if isinstance(value, DTensor)}
    divided = {name for name, value in whole.items() if not all(p.is_replicate() for p in value.placements)}
    ordinary = {name for name in context.tiles if name in inputs and name not in whole}
    lines = [digest_of(line) for line in lines_of(graph, context)]
    by_rank = [lines]
    if ranks is not None:
        with unset_fake_temporarily():  # graphs are planned where tensors are fake
            by_rank = ranks.of_all(lines, "the captured graph")
    differing: Iterable[int] = (n for n, line in enumerate(zip(*by_rank, strict=False)) if len(set(line)) > 1)
    if len(set(map(len, by_rank))) > 1:
        log.warning("the ranks of %s captured graphs of different lengths: no activation is divided over them", mesh)
        differing = range(len(lines))
        of_mesh = []
    return Replicas(of_mesh[0] if of_mesh else None, frozenset(divided), frozenset(ordinary), frozenset(differing))


def check_equal(ranks: Ranks, arguments: Sequence[Any]) -> None:
    """Compare what the ranks give to a call, their own parts of DTensors excepted, which are `LocalParameter`s.

    Raises: RanksError when it differs.
    """
    plain = [value for value in arguments if not isinstance(value, DTensor) and getattr(value, "whole", value) is value]
    with torch.no_grad():
        digests = [
            digest_of(
                [list(value.shape), str(value.dtype), _hash(value)] if isinstance(value, torch.Tensor) else repr(value)
            )
            for value in plain  # numbers, too, that Dynamo has seen change
        ]
    if len(set(map(tuple, ranks.of_all(digests, "inputs")))) > 1:
        raise RanksError(
            "partition_activations=True divides activations over the ranks of tensor parallelism, and what these give "
            "to the model, or ordinary parameters of theirs, differs: give all of them the same batch and values"
        )


def _hash(tensor: torch.Tensor) -> str:
    value = (tensor.full_tensor() if isinstance(tensor, StoredTensor) else tensor.detach()).cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(value.data_ptr(), value.nbytes)).hexdigest() if value.nbytes else ""
