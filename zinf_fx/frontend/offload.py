"""Parameters leave for their tier: of a model that exists, or of one that is being built."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from zinf_fx.arguments import check_model
from zinf_fx.checkpoint.copying import replace
from zinf_fx.checkpoint.models import by_plain_name
from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, StoredTensorError
from zinf_fx.frontend.auto_placement import placed_by_rule
from zinf_fx.frontend.built_names import BuiltNames
from zinf_fx.frontend.composed import Composed
from zinf_fx.frontend.converting import Converting
from zinf_fx.frontend.each_placement import (
    check_not_contradicted,
    check_rules,
    check_stage,
    configs_of,
    left_as_they_are,
    options_given,
    stored_among,
)
from zinf_fx.frontend.packing import bring_together, packs_of
from zinf_fx.frontend.quantising import form_of, note_nothing_quantised
from zinf_fx.frontend.staying import is_ordinary, note_layouts, note_staying, stays
from zinf_fx.interrupts import held_back
from zinf_fx.placement import PlacementRules
from zinf_fx.plan.packs import starts_of
from zinf_fx.plan.sharding import Owners, shards_of
from zinf_fx.quantisation import can_be_quantised, is_table, tables_of
from zinf_fx.runtime.gradients.accumulate import add_gradient
from zinf_fx.runtime.gradients.spaces import reserve_gradients
from zinf_fx.runtime.memory.device import check_device, device_of
from zinf_fx.runtime.memory.heap import pass_through, trim_heap
from zinf_fx.runtime.memory.mapped import MappedFiles, place_in_file
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.annotated import annotate, annotations_of, codes_kept, has_annotated_codes, keep_layout
from zinf_fx.runtime.tensor.home import Home
from zinf_fx.runtime.tensor.local_parameter import LocalParameter, local_part, placed_as, stored_parameter
from zinf_fx.runtime.tensor.quantised import Form, quantised_bytes
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter, take_implementation
from zinf_fx.runtime.tensor.tensor_parallel import (
    check_distributed,
    check_not_sharded,
    check_ranks,
    found_by_first,
    groups_of,
    with_ranks,
)
from zinf_fx.runtime.tensor.tiers import Tiers, drain_after

T = TypeVar("T")

# Bytes of mapped files that may have been read before their memory is given back to the system.
_MAPPED_AT_ONCE = 64 << 20

# transformers' `from_pretrained` looks for it in the environment at each call. Unless it is set, threads read and
# convert a whole checkpoint ahead of the modules that take its tensors over.
_LOADS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def offload(model: torch.nn.Module, config: Config | None = None, **fields: object) -> torch.nn.Module:
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
    given = options_given(config, fields)
    config = Config.of(config, fields)
    check_not_sharded(model)
    present = by_plain_name(model, model.named_parameters())
    check_rules(config, present, model)
    hint = "what is stored keeps its options, so give the same ones, or offload an ordinary model"
    check_not_contradicted(config, given, stored_among(present.items()), hint)
    composed = Composed(present)
    annotated = {name: parameter for name, parameter in present.items() if has_annotated_codes(parameter)}
    note_staying({name: one for name, one in present.items() if name not in composed.whole | annotated})
    ordinary = {name: parameter for name, parameter in present.items() if is_ordinary(parameter)} | annotated
    note_layouts(ordinary)
    parameters = ordinary | composed.parts
    tables = left_as_they_are(config, ordinary | composed.whole, tables_of(model.modules()))
    config = decided(config, list(parameters.values()), tables=tables)
    configs = configs_of(config, ordinary | composed.whole)
    configs |= {part: configs[whole] for part, whole in composed.whole_of.items()}
    with codes_kept(model):
        offload_parameters(parameters, config, tables, configs)
    composed.put_together()
    note_nothing_quantised(config, present.values(), tables)
    for name, buffer in by_plain_name(model, model.named_buffers()).items():
        if not buffer.is_meta:
            Ranks.of(config).broadcast(local_part(buffer), f"buffer '{name}'")
    return model


@contextmanager
def offloading(config: Config | None = None, **fields: object) -> Iterator[None]:
    """Partitioned construction: parameters of models built in this block leave as each submodule is built.

    A module's parameters leave when another module registers one, or a parent takes the module over; what is left
    leaves at the end of the block, where small ones of one kind are brought together. What initialises them later
    writes to the store. So the model is never whole in memory, and its initial values are those of an ordinary
    construction with the same seed. Parameters on the meta device, and lazy ones, stay as they are.

    In the block, the environment has HF_DEACTIVATE_ASYNC_LOAD=1 unless it has that variable already: with it,
    transformers reads one tensor of a checkpoint after the other, instead of all of them ahead in threads.
    """
    config = decided(Config.of(config, fields), None)
    if isinstance(config.placement, PlacementRules):
        raise ConfigError(
            "placement has rules for single parameters, and those of a model that is being built have no names yet: "
            "give a tier for all, or build the model outside of offloading() and call offload() then"
        )
    tiers, owners = Tiers.of(config), Owners(config, Ranks.of(config).shards)
    if config.placement.parameters == "nvme":
        _ = tiers.store  # a directory that can't be used shows before anything is built
    present: list[weakref.ref[torch.nn.Parameter]] = []  # those of `current` that have not left
    modules: list[weakref.ref[torch.nn.Module]] = []
    keys: set[int] = set()  # of the storages made in this block
    staying: dict[int, weakref.ref[torch.nn.Parameter]] = {}
    tables: dict[int, weakref.ref[torch.nn.Parameter]] = {}
    current: weakref.ref[torch.nn.Module] | None = None
    names = BuiltNames()
    mapped = MappedFiles(_MAPPED_AT_ONCE, config.stores[0])

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        nonlocal current
        if current is None or current() is not module:
            leave()
            current = weakref.ref(module)
            modules.append(current)
        if parameter is None:
            return
        if is_table(module) and stored_parameter(parameter) is None:
            tables[id(parameter)] = weakref.ref(parameter)
        if has_annotated_codes(parameter):
            keep_layout(module)
        before = module._parameters.get(name)
        if before is not None and before.is_meta:  # its value comes from a checkpoint, and is final
            store(parameter, names.of(module, name))
            mapped.trim()
        else:
            present.append(weakref.ref(parameter))

    def take_over(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        names.add(parent, name, module)
        for parameter in module.parameters() if module is not None else ():
            store(parameter)
        present[:] = [ref for ref in present if ref() is not None and stored_parameter(ref()) is None]

    def leave() -> None:
        while present:
            if (parameter := present.pop()()) is not None:
                store(parameter)

    def store(parameter: torch.nn.Parameter, loaded_as: str | None = None) -> None:
        if stored_parameter(parameter) is not None or is_lazy(parameter) or parameter.is_meta:
            return
        if stays(parameter) and not has_annotated_codes(parameter):
            staying[id(parameter)] = weakref.ref(parameter)  # it is met again in each module around its own
            return
        check_storable(parameter, f"a parameter of shape {tuple(parameter.shape)}")
        check_ranks(config, [parameter])
        table = tables.pop(id(parameter), None)  # converting a module refuses parameters that anybody holds weakly
        is_looked_up = table is not None and table() is parameter
        own = config
        if config.frozen_dtype is not None and can_be_quantised(parameter) and not is_looked_up:
            own = names.config_of(config, loaded_as, parameter.shape)
            if own.frozen_dtype is not None:
                parameter.requires_grad_(False)
        form = form_of(parameter, own, {id(parameter)} if is_looked_up else ())
        twins = _all_reserved({"": parameter}, {"": form}, tiers, {"": own}, owners)
        # The twin gets the memory of `parameter`, and must not be kept.
        replace_in_place(parameter, _written(parameter, twins.pop(), mapped if loaded_as else None))
        pass_through(parameter.nbytes)
        if isinstance(parameter, StoredTensor):  # not a DTensor, whose local tensor isn't moved
            keys.add(parameter.storage.key)

    handles = [
        register_module_parameter_registration_hook(register),
        register_module_module_registration_hook(take_over),
    ]
    before = os.environ.get(_LOADS_IN_TURN)
    try:
        os.environ.setdefault(_LOADS_IN_TURN, "1")
        with Converting(mapped) if config.placement.parameters == "nvme" else nullcontext():
            yield
        leave()
        tiers.drain()
        bring_together(_stored_in(_living(modules), keys))
        names.check(config, _living(modules))
        note_nothing_quantised(config, _stored_in(_living(modules), keys))
        stay = _living(staying.values())
        note_staying({f"number {n} of shape {tuple(one.shape)}": one for n, one in enumerate(stay, start=1)})
    finally:
        if before is None:
            os.environ.pop(_LOADS_IN_TURN, None)
        for handle in handles:
            handle.remove()


def _living(several: Iterable[weakref.ref[T]]) -> list[T]:
    return [one for one in (ref() for ref in several) if one is not None]


def _stored_in(modules: Iterable[torch.nn.Module], keys: Collection[int]) -> list[StoredTensor]:
    """Of the parameters that modules have of their own, those in storages of these keys."""
    several = {id(one): one for module in modules for one in module._parameters.values()}
    return [one for one in several.values() if isinstance(one, StoredTensor) and one.storage.key in keys]


def offload_parameters(
    parameters: Mapping[str, torch.nn.Parameter],
    config: Config,
    tables: Collection[int],
    configs: Mapping[str, Config] | None = None,
) -> None:
    """Move ordinary parameters, by name, and their gradients to their tiers, keeping the objects' identity. `tables`:
    ids of those that are looked up by rows; `configs`: the options of each, where its own name doesn't say them.

    Space is reserved for all of them first, and what goes to disk has arrived there before any of them changes, so
    that all are as before if this raises. In memory, where nothing can fail then, they move one after the other; what
    stays on its device, and is in no pack, stays where it is.
    """
    for name, parameter in parameters.items():
        check_storable(parameter, f"parameter '{name}'")
    _check_disjoint(parameters)
    configs = configs_of(config, parameters) if configs is None else configs
    forms = {name: form_of(parameter, configs[name], tables) for name, parameter in parameters.items()}
    tiers, owners = Tiers.of(config), Owners(config, Ranks.of(config).shards)
    twins = _all_reserved(parameters, forms, tiers, configs, owners)
    to_disk = any(t.base.tier == "nvme" for twin in twins for t in (twin, twin.grad) if t is not None)
    if to_disk:
        try:
            for parameter, twin in zip(parameters.values(), twins, strict=True):
                _written(parameter, twin)
        except BaseException as error:
            drain_after(error, [tiers])
            raise
        tiers.drain()
    for name, twin in zip(parameters, twins, strict=True):
        twin.storage.label = f"parameter '{name}'"
    twins.reverse()
    for parameter in parameters.values():
        twin = twins.pop()  # gets the memory of `parameter`, and must not be kept
        replace_in_place(parameter, twin if to_disk else _written(parameter, twin))
    twin = None
    trim_heap()


def _all_reserved(
    parameters: Mapping[str, torch.nn.Parameter],
    forms: Mapping[str, Form],
    tiers: Tiers,
    configs: Mapping[str, Config],
    owners: Owners,
) -> list[StoredTensor]:
    """Of each parameter, what `_reserved` gives, by the options of its own: those side by side that may move together,
    which have the same."""
    homes: dict[str, tuple[Home, int]] = {}
    packs = packs_of(parameters, forms, configs)
    for names in packs:
        dtype, device, config = forms[names[0]].dtype, device_of(parameters[names[0]].device), configs[names[0]]
        *starts, end = starts_of((_held_of(forms[name], config, Ranks.of(config)) for name in names), dtype)
        home = Home(tiers, config.placement.parameters, end, dtype, device)
        homes |= {name: (home, start) for name, start in zip(names, starts, strict=True)}
    twins = {n: _reserved(one, forms[n], tiers, configs[n], owners, homes.get(n)) for n, one in parameters.items()}
    for names in (*packs, *([name] for name in parameters if name not in homes)):
        reserve_gradients([twins[name] for name in names])
    return list(twins.values())


def _held_of(form: Form, config: Config, ranks: Ranks) -> int:
    """How many elements of a parameter that no rank owns this rank is to hold."""
    if config.placement.stage < 3:
        return form.numel
    return shards_of(form.shape, form.dtype, ranks.shards, config).held_by(ranks.shard)


def _reserved(
    parameter: torch.nn.Parameter,
    form: Form,
    tiers: Tiers,
    config: Config,
    owners: Owners,
    at: tuple[Home, int] | None,
) -> StoredTensor:
    """A stored parameter without a value yet, to take the place of `parameter`, or of the local tensor of a DTensor.
    `at`: where it is to live."""
    placement, ranks = config.placement, Ranks.of(config)
    requires_grad, gradient, divided_over = parameter.requires_grad, parameter.grad, groups_of(parameter)
    parameter = local_part(parameter)
    form = form if form.quantised is not None else Form.of(parameter)
    numel, dtype, device = form.numel, form.dtype, device_of(parameter.device)
    shards = shards_of(form.shape, dtype, ranks.shards, config, owners.next(form.nbytes))
    stays = form.quantised is None and config.placement.parameters == "device" and ranks.shards == 1
    with torch.inference_mode(False):  # a model may be evaluated before it is trained
        if at is None and stays and (memory := _memory_on_device(parameter)) is not None:
            at = Home(tiers, "device", numel, dtype, device, on_device=memory), 0
        storage = TensorStorage(
            tiers, placement.parameters, config, numel, dtype, device, ranks, placement.stage == 3, shards, at
        )
        storage.share.part_of = divided_over
        twin = StoredTensor.of(storage, parameter.shape, parameter.device, requires_grad, form.quantised)
        if gradient is not None:
            # Of many ranks, each has its own: the next backward pass reduces it with what that adds.
            present = storage.for_gradient(gradient.dtype, partitioned=ranks.size == 1)
            present.share.unreduced = ranks.size > 1
            twin.grad = StoredTensor.of(present, parameter.shape, parameter.device)
        return as_parameter(twin)


def _memory_on_device(parameter: torch.Tensor) -> torch.Tensor | None:
    """The elements of a parameter that is not in host memory, 1-D, where they are, if nothing else is there, and nobody
    else has them: whoever has a detached parameter, a state dict or a graph goes on with the old value."""
    alone = parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
    if device_of(parameter.device).in_host_memory or not alone or parameter.is_inference() or _is_shared(parameter):
        return None
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)  # has a version counter of its own
    return flat.set_(parameter.untyped_storage(), 0, (parameter.numel(),))


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether somebody besides this object has a tensor's elements: another tensor, or a graph of autograd."""
    storage = tensor.untyped_storage()  # an object that has them, too
    return tensor._use_count() > 1 or torch._C._storage_Use_Count(storage._cdata) > 2


def _written(parameter: torch.nn.Parameter, twin: StoredTensor, loaded: MappedFiles | None = None) -> StoredTensor:
    """`twin`, with the value and gradient of `parameter` in it or on their way. The value is the first rank's; one that
    was `loaded`, from files that are mapped, is each rank's, where all have it at one place in one file, of which each
    reads its own part alone."""
    value, ranks = local_part(parameter.detach()), twin.storage.share.ranks
    if has_annotated_codes(parameter):
        value = value.as_subclass(torch.Tensor)
    what = f"a parameter of shape {tuple(parameter.shape)}"
    places = ranks.of_all(place_in_file(value), what) if loaded is not None and ranks.size > 1 else [None]
    if places[0] is None or len(set(places)) > 1:
        if ranks.rank and place_in_file(value) is not None:
            value = torch.empty_like(value)  # a mapped file's memory would keep what is written to it
        ranks.broadcast(value, what)
    if (quantised := twin.quantised) is not None:
        value = quantised_bytes(value, quantised.format)
    replace(twin.storage, value, after_piece=None if loaded is None else loaded.trim)
    if twin.grad is not None:
        gradient = parameter.grad
        twin.grad.storage.set(placed_as(parameter, gradient) if isinstance(gradient, DTensor) else gradient)
    return twin


@held_back
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
    if parameter.requires_grad and parameter.is_leaf and parameter._use_count() > 1:
        accumulate = torch.autograd.graph.get_gradient_edge(parameter).node
        accumulate.register_prehook(lambda gradients: add_gradient(parameter, gradients[0]))
    annotations = annotations_of(parameter)
    take_implementation(parameter, twin)
    annotate(parameter, annotations, of=parameter)


def check_storable(parameter: torch.Tensor, what: str) -> None:
    """Raises: StoredTensorError for a parameter that can't be moved to a tier."""
    if is_lazy(parameter):
        raise StoredTensorError(f"{what} is not initialised yet: run the model once before offloading it")
    if parameter.is_meta:
        raise StoredTensorError(f"{what} is on the meta device and has no values: materialise it first (to_empty)")
    check_device(parameter.device, what)
    if parameter.layout != torch.strided:
        raise StoredTensorError(f"{what} has layout {parameter.layout}: only strided tensors can be stored")
    if isinstance(parameter, DTensor):
        check_distributed(parameter, what)
    elif type(parameter) is not torch.nn.Parameter and not has_annotated_codes(parameter):
        raise StoredTensorError(
            f"{what} is a {type(parameter).__name__} that is trained: only plain nn.Parameter can be stored. Freeze it "
            "with requires_grad_(False), and it stays on its device"
        )
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        raise StoredTensorError(
            f"{what} has a gradient of layout {parameter.grad.layout}: only strided ones can be stored; clear it first"
        )


def _check_disjoint(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises: StoredTensorError for two parameters in the same memory, which would part."""
    by_address: dict[int, str] = {}
    for name, parameter in parameters.items():
        parameter = local_part(parameter)
        other = by_address.setdefault(parameter.data_ptr(), name) if parameter.numel() else name
        if other != name:
            raise StoredTensorError(
                f"parameters '{other}' and '{name}' are different parameters in the same memory, and would no longer "
                "be tied: tie them by assigning the one parameter to both modules"
            )


def decided(config: Config, parameters: list[torch.Tensor] | None, tables: Collection[int] = ()) -> Config:
    """`config` with its ranks, and its placement by the rule alone, decided from the parameters (all of them; None: not
    yet known). `tables`: ids of parameters that are looked up by rows. Ranks take what the first one finds.

    Raises: ConfigError for ranks that can't train these parameters, or can't do so in this placement.
    """
    if parameters:
        config = with_ranks(config, parameters)
    if config.placement == "auto":
        by_rule = partial(placed_by_rule, config, parameters, tables)
        found = found_by_first(config, parameters or (), by_rule, "the placement")
        config = Config.of(config, {"placement": found})
    check_stage(config)
    return config
