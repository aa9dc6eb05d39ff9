"""Which parameters are stored in a quantised format, and what is stored of each."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.quantisation import can_be_quantised
from zinf_fx.runtime.tensor.local_parameter import local_part, stored_in
from zinf_fx.runtime.tensor.quantised import Form

_LOOKUPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag, torch.embedding)


def tables_in(module: fx.GraphModule, inputs: Iterable[object]) -> set[int]:
    """The ids of the inputs of Dynamo's graph that it looks up by rows."""
    looked_up = {node.args[1] for node in module.graph.nodes if node.target in _LOOKUPS and len(node.args) > 1}
    placeholders = module.graph.find_nodes(op="placeholder")
    return {id(one) for node, one in zip(placeholders, inputs, strict=True) if node in looked_up}


def form_of(parameter: torch.Tensor, config: Config, tables: Collection[int] = ()) -> Form:
    """What is stored of a parameter, or of this rank's part of one. `tables`: ids of those that are looked up by rows,
    and others that stay as they are. Of patterns, the first format is meant, for whoever asks only how many bytes.

    Raises: ConfigError for one that would be quantised, and that tensor parallelism divides.
    """
    name = config.frozen_dtype
    if isinstance(name, tuple):
        name = next((form for _, form in name if form is not None), None)
    if name is None or parameter.requires_grad or id(parameter) in tables or not can_be_quantised(parameter):
        return Form.of(parameter)
    if isinstance(parameter, DTensor):
        raise ConfigError(
            f"frozen_dtype='{name}' and a parameter of shape {tuple(parameter.shape)} that tensor parallelism divides: "
            "such are stored as they are, so leave frozen_dtype out"
        )
    return Form.of(parameter, name)


def note_nothing_quantised(config: Config, parameters: Iterable[torch.Tensor], tables: Collection[int] = ()) -> None:
    """Warn where a format was asked for, and none of a model's parameters is stored in any. `tables`: ids of those that
    stay as they are."""
    formats = config.frozen_dtype if isinstance(config.frozen_dtype, tuple) else [("*", config.frozen_dtype)]
    wanted = [form for _, form in formats if form is not None]
    parameters = list(parameters)
    if not wanted or not parameters or any(_is_quantised(one) for one in parameters):
        return
    matrices = [one for one in parameters if id(one) not in tables and can_be_quantised(local_part(one))]
    trained = sum(one.requires_grad for one in matrices)
    if trained:
        why = f"the {trained} matrices that could be train: freeze the base first, as by model.requires_grad_(False)"
    else:
        why = "none is a frozen matrix of floating-point values with rows of at least 64, and no table of embeddings"
    warnings.warn(
        f"frozen_dtype='{wanted[0]}' has no effect: of {len(parameters)} parameters, none is stored in it: {why}",
        stacklevel=3,
    )


def _is_quantised(parameter: torch.Tensor) -> bool:
    return any(one.quantised is not None for one in stored_in(parameter))
