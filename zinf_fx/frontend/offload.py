"""The parameters of a model that exists leave for their tier."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar, Unpack, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import zinf_fx.runtime.tensor.rows  # noqa: F401  (registers the operations that read rows alone)
from zinf_fx.arguments import check_model
from zinf_fx.checkpoint.copying import replace
from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.compat import bitsandbytes
from zinf_fx.compat.safetensors import MappedFiles, place_in_file
from zinf_fx.config import Config, Options
from zinf_fx.frontend.auto_placement import placed_by_rule
from zinf_fx.frontend.packing import packs_of
from zinf_fx.frontend.parameters import (
    attributes_to_carry,
    check_disjoint,
    check_not_contradicted,
    check_rules,
    check_stage,
    check_storable,
    configs_of,
    form_of,
    is_ordinary,
    kept_in_their_format,
    options_given,
    stays,
    stored_among,
    warn_of_layouts,
    warn_of_nothing_quantised,
    warn_of_staying,
)
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.plan.sharding import Owners, shards_of
from zinf_fx.quantisation import tables_of
from zinf_fx.runtime.gradients.accumulate import add_gradient
from zinf_fx.runtime.gradients.buffers import reserve_gradients
from zinf_fx.runtime.gradients.state import local_gradient
from zinf_fx.runtime.memory.device import device_of
from zinf_fx.runtime.memory.process import trim_heap
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.local_parameter import LocalParameter, local_part, made_of, placed_as, stored_in
from zinf_fx.runtime.tensor.local_shard import LocalShard
from zinf_fx.runtime.tensor.quantised import Form, quantised_bytes
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter, carry, take_implementation
from zinf_fx.runtime.tensor.tensor_parallel import check_not_sharded, found_by_first, groups_of, with_ranks
from zinf_fx.runtime.tensor.tiers import Tiers, drain_after

M = TypeVar("M", bound=torch.nn.Module)


def offload(model: M, config: Config | None = None, **options: Unpack[Options]) -> M:
    """Move the parameters of `model` to their tier, in place, and return the model.

    Every parameter stays the same object, so optimizers and tied weights go on working. Buffers stay where they are.
    Gradients that exist move too, and hooks stay. Of many ranks, all get the parameters and buffers of the first.

    With `frozen_dtype`, frozen matrices are quantised, except tables of embeddings. Of a frozen parameter that a
    quantising library made of tensors (a traceable wrapper subclass, as torchao's are), these tensors move; of those of
    bitsandbytes, the codes, and scales stay. Other frozen ones of classes of their own stay where they are, and a
    warning says so.

    Raises: ConfigError for bad options, and for others than those that a part of the model was offloaded with;
    StoreError when the store can't hold the parameters; StoredTensorError for a parameter that can't be stored. The
    model is as before then.
    """
    check_model(model, "offload")
    given = options_given(config, options)
    config = Config.of(config, options)
    check_not_sharded(model)
    present = by_plain_name(model, model.named_parameters())
    check_rules(config, present, model)
    hint = "what is stored keeps its options, so give the same ones, or offload an ordinary model"
    check_not_contradicted(config, given, stored_among(present.items()), hint)
    subclasses = Subclasses(present)
    with_codes = {name: value for name, value in present.items() if bitsandbytes.has_codes(value)}
    warn_of_staying({name: value for name, value in present.items() if name not in subclasses.whole | with_codes})
    ordinary = {name: value for name, value in present.items() if is_ordinary(value)} | with_codes
    warn_of_layouts(ordinary)
    leaving = ordinary | subclasses.parts
    unquantised = kept_in_their_format(config, ordinary | subclasses.whole, tables_of(model.modules()))
    config = decided(config, list(leaving.values()), tables=unquantised)
    configs = configs_of(config, ordinary | subclasses.whole)
    configs |= {part: configs[whole] for part, whole in subclasses.whole_of.items()}
    with bitsandbytes.codes_kept(model):
        offload_parameters(leaving, config, unquantised, configs)
    subclasses.put_together()
    warn_of_nothing_quantised(config, present.values(), unquantised)
    for name, buffer in by_plain_name(model, model.named_buffers()).items():
        if not buffer.is_meta:
            Ranks.of(config).broadcast(local_part(buffer), f"buffer '{name}'")
    return model


@held_back
def offload_parameters(
    parameters: Mapping[str, torch.nn.Parameter],
    config: Config,
    tables: Collection[int],
    configs: Mapping[str, Config] | None = None,
) -> None:
    """Move ordinary parameters, by name, and their gradients to their tiers, keeping the objects' identity. `tables`:
    ids of those that are not to be quantised; `configs`: the options of each, where its own name doesn't say them.

    Space is reserved for all of them first, and what goes to disk has arrived there before any of them changes, so
    that all are as before if this raises. In memory, where nothing can fail then, they move one after the other; what
    stays on its device, and is in no pack, stays where it is.
    """
    for name, parameter in parameters.items():
        check_storable(parameter, f"parameter '{name}'")
    check_disjoint(parameters)
    configs = configs_of(config, parameters) if configs is None else configs
    forms = {name: form_of(parameter, configs[name], tables) for name, parameter in parameters.items()}
    tiers, owners = Tiers.of(config), Owners(Ranks.of(config).shards)
    twins = reserved_twins(parameters, forms, tiers, configs, owners)
    to_disk = any(
        tensor.base.tier == "nvme" for twin in twins for tensor in (twin, twin.grad) if isinstance(tensor, StoredTensor)
    )
    if to_disk:
        try:
            for parameter, twin in zip(parameters.values(), twins, strict=True):
                let_through()
                with_value(parameter, twin)
        except BaseException as error:
            drain_after(error, [tiers])
            raise
        tiers.drain()
    for name, twin in zip(parameters, twins, strict=True):
        twin.stored.label = f"parameter '{name}'"
    twins.reverse()
    for parameter in parameters.values():
        let_through()
        twin = twins.pop()  # gets the memory of `parameter`, and must not be kept
        replace_in_place(parameter, twin if to_disk else with_value(parameter, twin))
    twin = None
    trim_heap()


def reserved_twins(
    parameters: Mapping[str, torch.nn.Parameter],
    forms: Mapping[str, Form],
    tiers: Tiers,
    configs: Mapping[str, Config],
    owners: Owners,
) -> list[StoredTensor]:
    """For each parameter, a stored one without a value yet that is to take its place, by the options of its own. Those
    that may move together, which have the same options, are side by side."""
    allocations: dict[str, tuple[Allocation, int]] = {}
    packs = packs_of(parameters, forms, configs)
    for names in packs:
        dtype, device, config = forms[names[0]].dtype, device_of(parameters[names[0]].device), configs[names[0]]
        counts = [_held(forms[name], config, Ranks.of(config)) for name in names]
        allocation = Allocation(tiers, config.own_placement.parameters, counts, dtype, device)
        allocations |= {name: (allocation, member) for member, name in enumerate(names)}
    twins = {
        name: _reserved_twin(parameter, forms[name], tiers, configs[name], owners, allocations.get(name))
        for name, parameter in parameters.items()
    }
    for names in (*packs, *([name] for name in parameters if name not in allocations)):
        reserve_gradients([twins[name] for name in names])
    return list(twins.values())


def _held(form: Form, config: Config, ranks: Ranks) -> int:
    """How many elements of a parameter that no rank owns this rank is to hold."""
    if config.stage < 3:
        return form.numel
    return shards_of(form.shape, form.dtype, ranks.shards, config).held_by(ranks.shard)


def _reserved_twin(
    parameter: torch.nn.Parameter,
    form: Form,
    tiers: Tiers,
    config: Config,
    owners: Owners,
    at: tuple[Allocation, int] | None,
) -> StoredTensor:
    """A stored parameter without a value yet, to take the place of `parameter`, or of the local tensor of a DTensor.
    `at`: where it is to live."""
    placement, ranks = config.own_placement, Ranks.of(config)
    requires_grad, gradient, divided_over = parameter.requires_grad, parameter.grad, groups_of(parameter)
    part = local_part(parameter)
    form = form if form.quantised is not None else Form.of(part)
    numel, dtype, device = form.numel, form.dtype, device_of(part.device)
    shards = shards_of(form.shape, dtype, ranks.shards, config, owners.next(form.nbytes))
    stays = form.quantised is None and placement.parameters == "device" and ranks.shards == 1
    with torch.inference_mode(False):  # a model may be evaluated before it is trained
        if at is None and stays and (memory := _memory_on_device(part)) is not None:
            at = Allocation(tiers, "device", [numel], dtype, device, on_device=memory), 0
        shard = LocalShard(shards, ranks, placement.stage == 3)
        at = at or (Allocation(tiers, placement.parameters, [shard.held], dtype, device), 0)
        storage = TensorStorage(config, shard, *at)
        storage.shard.part_of = divided_over
        twin = StoredTensor.of(storage, part.shape, part.device, requires_grad, form.quantised)
        if gradient is not None:
            # Of many ranks, each has its own: the next backward pass reduces it with what that adds.
            twin.grad = local_gradient(twin, gradient.dtype)
        return as_parameter(twin)


def _memory_on_device(parameter: torch.Tensor) -> torch.Tensor | None:
    """The elements of a parameter that is not in host memory, 1-D, where they are, if nothing else is there, and nobody
    else has them: whoever has a detached parameter, a state dict or a graph goes on with the old value."""
    alone = parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
    if device_of(parameter.device).in_host_memory or not alone or parameter.is_inference() or _is_shared(parameter):
        return None
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)  # has a version counter of its own
    return flat.set_(parameter.untyped_storage(), 0, (parameter.numel(),), (1,))


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether somebody besides this object has a tensor's elements: another tensor, or a graph of autograd."""
    storage = tensor.untyped_storage()  # an object that has them, too
    return _use_count(tensor) > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


def _use_count(tensor: torch.Tensor) -> int:
    return tensor._use_count()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stubs lack it)


def with_value(parameter: torch.nn.Parameter, twin: StoredTensor, loaded: MappedFiles | None = None) -> StoredTensor:
    """`twin`, with the value and gradient of `parameter` in it or on their way. The value is the first rank's; one that
    was `loaded`, from files that are mapped, is each rank's, where all have it at one place in one file, of which each
    reads its own part alone."""
    value, ranks = local_part(parameter.detach()), twin.stored.shard.ranks
    if bitsandbytes.has_codes(parameter):
        value = value.as_subclass(torch.Tensor)
    what = f"a parameter of shape {tuple(parameter.shape)}"
    places = ranks.of_all(place_in_file(value), what) if loaded is not None and ranks.size > 1 else [None]
    if places[0] is None or len(set(places)) > 1:
        if ranks.rank and place_in_file(value) is not None:
            value = torch.empty_like(value)  # a mapped file's memory would keep what is written to it
        ranks.broadcast(value, what)
    if (quantised := twin.quantised) is not None:
        value = quantised_bytes(value, quantised.format)
    replace(twin.stored, value, after_piece=None if loaded is None else loaded.trim)
    gradient = parameter.grad
    if isinstance(twin.grad, StoredTensor) and gradient is not None:
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            gradient = placed_as(parameter, gradient)
        twin.grad.stored.set(gradient)
    return twin


def replace_in_place(parameter: torch.nn.Parameter, twin: StoredTensor) -> None:
    """Give the object `parameter` the implementation, class and attributes of `twin`, which nothing else may use.

    This is what `torch.utils.swap_tensors` does, less its refusal of tensors to which weak references exist: Dynamo's
    guards hold some, and they are what makes it compile again for the parameter's new type. Graphs that autograd
    recorded before go on with the old value; the gradients that they bring are accumulated as any others.

    A DTensor gets `twin` for its local tensor: see [Note: DTensor parameters].
    """
    if isinstance(parameter, DTensor):
        gradient, twin.grad = twin.grad, None
        leaf = LocalParameter.of_whole(parameter, twin.requires_grad_(False))
        leaf.grad = gradient
        leaf.expect_gradient()
        return
    if parameter.requires_grad and parameter.is_leaf and _use_count(parameter) > 1:
        accumulate = torch.autograd.graph.get_gradient_edge(parameter).node
        accumulate.register_prehook(
            held_back(lambda gradients: add_gradient(cast("StoredTensor", parameter), gradients[0]))
        )
    attributes = attributes_to_carry(parameter)
    take_implementation(parameter, twin)
    carry(parameter, attributes, of=parameter)


def decided(config: Config, parameters: Sequence[torch.Tensor] | None, tables: Collection[int] = ()) -> Config:
    """`config` with its ranks, and its placement by the rule alone, decided from the parameters (all of them; None: not
    yet known). `tables`: ids of parameters that are not to be quantised. Ranks take what the first one finds.

    Raises: ConfigError for ranks that can't train these parameters, or can't do so in this placement.
    """
    if parameters:
        config = with_ranks(config, parameters)
    if config.placement == "auto":
        by_rule = partial(placed_by_rule, config, parameters, tables)
        placement = found_by_first(config, parameters or (), by_rule, "the placement")
        config = Config.of(config, {"placement": placement})
    check_stage(config)
    return config


class Subclasses:
    """Frozen parameters of tensor subclasses, as those of torchao, which say what tensors they are made of
    (`__tensor_flatten__`). These tensors are stored.

    What the class does with its tensors, it does with stored ones: their operations gather, and in a graph that is
    captured, the gathers are nodes as any.

    Attributes:
        whole: these parameters, by name.
        parts: by name, the tensors as frozen parameters: they share their memory until they move.
        whole_of: by the name of each part, that of its parameter, by which it is placed.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.whole = {
            name: parameter
            for name, parameter in parameters.items()
            if stays(parameter) and made_of(parameter) and not stored_in(parameter)
        }
        self.parts: dict[str, torch.nn.Parameter] = {}
        self.whole_of: dict[str, str] = {}
        for name, parameter in self.whole.items():
            self._take_apart(name, parameter)
            self.whole_of |= dict.fromkeys(self.parts.keys() - self.whole_of.keys(), name)

    def _take_apart(self, name: str, tensor: torch.Tensor) -> None:
        for attribute, part in made_of(tensor).items():
            part_name = f"{name}.{attribute}"
            if made_of(part):
                self._take_apart(part_name, part)
            else:
                self.parts[part_name] = torch.nn.Parameter(part.detach(), requires_grad=False)

    def put_together(self) -> None:
        """Make the parameters, which stay the same objects, of what their parts are now."""
        for name, parameter in self.whole.items():
            _replace_subclass(parameter, self._of_parts(name, parameter))

    def _of_parts(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        inner = {}
        for attribute, part in made_of(tensor).items():
            part_name = f"{name}.{attribute}"
            inner[attribute] = self._of_parts(part_name, part) if made_of(part) else self.parts[part_name]
        assert is_traceable_wrapper_subclass(tensor)
        context = tensor.__tensor_flatten__()[1]
        return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


@held_back
def _replace_subclass(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    """Give the object `parameter` the implementation and attributes of `twin`, of its own class: as `replace_in_place`,
    where weak references exist."""
    torch._C._swap_tensor_impl(parameter, twin)
    vars(parameter).update(vars(twin))
    parameter._is_param = True
