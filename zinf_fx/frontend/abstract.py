"""Stored parameters without bytes: what a model is planned with when its values are not there, or must not change."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from zinf_fx.config import Config
from zinf_fx.errors import StoredTensorError
from zinf_fx.frontend.each_placement import configs_of, placed
from zinf_fx.frontend.graph_inputs import input_names
from zinf_fx.frontend.offload import check_storable
from zinf_fx.frontend.quantising import form_of, tables_in
from zinf_fx.frontend.staying import is_ordinary, stays
from zinf_fx.runtime.tensor.annotated import annotate, annotations_of
from zinf_fx.runtime.tensor.local_parameter import LocalParameter, distributed_as, local_part, stored_parameter
from zinf_fx.runtime.tensor.quantised import Form
from zinf_fx.runtime.tensor.storage import AbstractStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter


def abstract_parameter(
    parameter: torch.nn.Parameter, what: str, config: Config, tables: Collection[int] = ()
) -> torch.Tensor:
    """The parameter as it would be once it is offloaded by these options, which are its own; or as it is, if it is
    stored already.

    One that offloading leaves in memory is itself. `what` names it in errors; `tables`: ids of those that are looked up
    by rows.

    Raises: StoredTensorError for one that can't be stored.
    """
    if stays(parameter):
        return parameter
    stored = stored_parameter(parameter)
    tier = config.placement.parameters if stored is None else stored.base.tier
    if stored is not None:
        config = placed(config, stored.base.config.placement)
    elif not parameter.is_meta:
        check_storable(parameter, what)
    elif type(parameter) is not torch.nn.Parameter and not isinstance(parameter, DTensor):
        raise StoredTensorError(f"{what} is a {type(parameter).__name__}: only plain nn.Parameter can be stored")
    part = local_part(parameter)
    if stored is not None:
        form = Form(stored.base.shape, stored.base.dtype, stored.quantised)
    else:
        form = form_of(parameter, config, tables)
        form = form if form.quantised is not None else Form.of(part)
    storage = AbstractStorage(tier, config, form.numel, form.dtype)
    storage.stands_for = None if stored is None else stored.storage
    device = torch.device("cpu") if part.is_meta else part.device
    twin = StoredTensor.of(storage, part.shape, device, quantised=form.quantised)
    if isinstance(parameter, DTensor):
        whole = distributed_as(parameter, twin).requires_grad_(parameter.requires_grad)
        LocalParameter.of_whole(whole, twin)
        return as_parameter(whole)
    annotate(twin, annotations_of(parameter), of=parameter)
    twin.requires_grad_(parameter.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # which decide where the gradient goes
        setattr(twin, hooks, getattr(parameter, hooks))
    return as_parameter(twin)


def abstract_inputs(module: fx.GraphModule, inputs: Sequence[object], config: Config) -> list[object]:
    """The inputs of Dynamo's graph `module`, with ordinary parameters as they would be once they are offloaded.

    Raises: StoredTensorError for one that can't be stored, of which meta tensors are.
    """
    abstract, names, tables = list(inputs), input_names(module), tables_in(module, inputs)
    configs = configs_of(config, {name: one for name, one in zip(names, inputs, strict=True) if is_ordinary(one)})
    for number, (one, name) in enumerate(zip(inputs, names, strict=True)):
        if is_ordinary(one):
            check_storable(one, f"parameter '{name}'")
            abstract[number] = abstract_parameter(one, f"parameter '{name}'", configs[name], tables)
    return abstract
