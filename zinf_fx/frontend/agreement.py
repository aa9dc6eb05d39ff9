"""The ranks that run one captured graph, and what they have to agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from zinf_fx import ops
from zinf_fx.config import Config
from zinf_fx.errors import BudgetError, RanksError
from zinf_fx.frontend.equal_values import check_equal, mesh_of
from zinf_fx.frontend.graph_inputs import GraphInput
from zinf_fx.passes.ir.collectives import group_of, is_collective
from zinf_fx.passes.ir.framework import GraphContext, key_of
from zinf_fx.plan.codec import encode
from zinf_fx.plan.files.digest import digest_of
from zinf_fx.plan.rates import Rates
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.ranks import ALONE, Ranks
from zinf_fx.runtime.tensor.tensor_parallel import of_first, resolved, tensor_ranks


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
            if graph_input.is_stored and graph_input.taken.storage.tiers is not None:
                divided_over = graph_input.taken.storage.share.ranks.size
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
        """Those that ranks of tensor parallelism start in this order."""
        divided = {token for token, tile in context.tiles.items() if tile.activation and tile.partitioned}
        for node in graph.nodes:
            if is_collective(node):
                self._collectives.setdefault(resolved(group_of(node)), []).append(f"{context.kind}: {node.target}")
            elif node.target is ops.allgather and key_of(node).token in divided:
                self._collectives.setdefault(self.mesh.get_group(), []).append(f"{context.kind}: activation")

    def compare(self) -> None:
        """Compare the model's own collectives and their order over the ranks that take part in them: what recomputing
        repeats may have been decided otherwise there. Those of the plan are compared when graphs run."""
        if not self.alone:
            for group, names in self._collectives.items():
                ranks = tensor_ranks(self._config, group)
                ranks.agree(f"{len(names)} of digest {digest_of(names)}", "the collectives in a graph")

    def check_first(self, arguments: Sequence[Any]) -> None:
        """Of the first call alone: what the ranks of tensor parallelism give to it must be equal."""
        if self.mesh is not None and not self.alone:
            check_equal(self.tensor_ranks, arguments)
