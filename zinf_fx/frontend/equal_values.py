"""What a captured graph and its first call tell of values that are equal on all ranks of tensor parallelism: see
[Note: equal values]."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, RanksError
from zinf_fx.passes.activations.replication import Replicas
from zinf_fx.passes.ir.collectives import collectives_of, group_of
from zinf_fx.passes.ir.fingerprint import lines_of
from zinf_fx.passes.ir.framework import GraphContext
from zinf_fx.plan.files.digest import digest_of
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.runtime.tensor.tensor_parallel import resolved

log = logging.getLogger("zinf_fx")


def mesh_of(config: Config, inputs: Iterable[object]) -> DeviceMesh | None:
    """The ranks over which saved activations are to be divided: those that divide parameters.

    Raises: ConfigError where these are of several meshes, or of several dimensions.
    """
    if not config.partition_activations:
        return None
    meshes = {one.device_mesh for one in inputs if isinstance(one, DTensor)}
    if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise ConfigError(
            f"partition_activations=True divides activations over the ranks of tensor parallelism, and parameters are "
            f"divided over {', '.join(map(str, meshes))}: give one mesh of one dimension, or leave the option out"
        )
    return meshes.pop() if meshes else None


def replicas_of(
    graph: fx.Graph, context: GraphContext, inputs: Mapping[str, object], mesh: DeviceMesh, ranks: Ranks | None
) -> Replicas:
    """Of a captured graph. `inputs`: by placeholder, what the caller gives. `ranks`: of `mesh`, whose graphs are
    compared; None: only one of them plans, and takes the others' graphs for equal."""
    of_mesh = [group for node in collectives_of(graph) if resolved(group := group_of(node)) is mesh.get_group()]
    whole = {name: one for name, one in inputs.items() if isinstance(one, DTensor)}
    divided = {name for name, one in whole.items() if not all(p.is_replicate() for p in one.placements)}
    ordinary = {name for name in context.tiles if name in inputs and name not in whole}
    lines = [digest_of(line) for line in lines_of(graph, context)]
    by_rank = [lines]
    if ranks is not None:
        with unset_fake_temporarily():  # graphs are planned where tensors are fake
            by_rank = ranks.of_all(lines, "the captured graph")
    other: Iterable[int] = (n for n, each in enumerate(zip(*by_rank, strict=False)) if len(set(each)) > 1)
    if len({len(each) for each in by_rank}) > 1:
        log.warning("the ranks of %s captured graphs of different lengths: no activation is divided over them", mesh)
        other = range(len(lines))
        of_mesh = []
    return Replicas(of_mesh[0] if of_mesh else None, frozenset(divided), frozenset(ordinary), frozenset(other))


def check_equal(ranks: Ranks, arguments: Sequence[Any]) -> None:
    """Compare what the ranks give to a call, their own parts of DTensors excepted, which are `LocalParameter`s.

    Raises: RanksError when it differs.
    """
    plain = [one for one in arguments if not isinstance(one, DTensor) and getattr(one, "whole", one) is one]
    with torch.no_grad():
        found = [
            digest_of([list(one.shape), str(one.dtype), _hash(one)] if isinstance(one, torch.Tensor) else repr(one))
            for one in plain  # numbers, too, that Dynamo has seen change
        ]
    if len(set(map(tuple, ranks.of_all(found, "inputs")))) > 1:
        raise RanksError(
            "partition_activations=True divides activations over the ranks of tensor parallelism, and what these give "
            "to the model, or ordinary parameters of theirs, differs: give all of them the same batch and values"
        )


def _hash(tensor: torch.Tensor) -> str:
    value = (tensor.full_tensor() if isinstance(tensor, StoredTensor) else tensor.detach()).cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(value.data_ptr(), value.nbytes)).hexdigest() if value.nbytes else ""
