"""State entries: what a training consists of, each under its name, as tensors and plain values."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zinf_fx import cuda
from zinf_fx.checkpoint.copying import TensorShard
from zinf_fx.checkpoint.manifest import SavedTensor
from zinf_fx.checkpoint.models import by_plain_name, plain_names, unwrapped
from zinf_fx.checkpoint.values import decode, encode
from zinf_fx.errors import CheckpointError, OptimizerError
from zinf_fx.native.engine import crc32c_at
from zinf_fx.optim.formats import Companion, companion_of, kind_of
from zinf_fx.optim.partial_step import TornStep
from zinf_fx.optim.streamed import Streamed
from zinf_fx.plan.codec import dtypes
from zinf_fx.runtime.exclusive import RUNNING
from zinf_fx.runtime.gradients.accumulate import new_gradient
from zinf_fx.runtime.gradients.state import GradientState, state_of
from zinf_fx.runtime.tensor.local_parameter import local_part, made_of, stored_in, stored_parameter
from zinf_fx.runtime.tensor.quantised import Quantised
from zinf_fx.runtime.tensor.storage import new_scales, new_states
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

_SHOWN = 6


class StateEntry(Protocol):
    """A model, an optimizer, or anything else that is saved under a name of its own.

    Attributes:
        kind: its kind, in the manifest.
    """

    kind: str

    def collect(self, collected: Collected) -> dict[str, Any]:
        """Add all tensors to `collected`. Returns the plain values, as JSON has them. Raises: CheckpointError."""
        ...

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        """Find where what was saved belongs, and note what doesn't fit. Nothing is changed yet.

        Raises: CheckpointError for values that can't be read.
        """


class Collected:
    """The tensors that a rank of `ranks` is to save.

    Attributes:
        tensors: the shards by name, in the order in which they come.
        same: other names of tensors, each with the name that the tensor has above.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.tensors: dict[str, TensorShard] = {}
        self.same: dict[str, str] = {}
        self._names: dict[tuple, str] = {}

    def add(self, tensor: torch.Tensor, name: str) -> str:
        """Save a tensor under a name, which is returned. Raises: CheckpointError for a tensor that can't be."""
        if not name.isprintable():
            raise CheckpointError(f"{name!r} can't be saved: its name has characters that can't be printed; rename it")
        if name in self.tensors or name in self.same:
            raise CheckpointError(f"two tensors to save have the name '{name}': rename one")
        shard = TensorShard.of(tensor, name)
        first = self._names.setdefault(shard.identity, name)
        if first == name:
            self.tensors[name] = shard
        else:
            self.same[name] = first
        return name

    def keep(self, tensor: torch.Tensor, name: str) -> str:
        """Save a tensor that stands among plain values, under a name of this rank where ranks may have other values."""
        if self.ranks > 1 and type(tensor) is torch.Tensor:
            flat = tensor.detach().cpu().contiguous()
            name = f"{name}@{crc32c_at(flat.data_ptr(), flat.nbytes):08x}"
        return self.add(tensor, name)


class Matching:
    """Where the tensors of a checkpoint belong, what is done before and after they are read, and what doesn't fit.

    Attributes:
        left_out: prefixes of the names of parameters whose models are left out.
        rank, ranks: this rank and how many there are; `ranks_then`: how many saved the checkpoint.
        targets: saved tensors that are to be read, each with the shard that they are read into.
        begin, end: functions to call before and after the tensors are read; what can fail is called before.
        differences: how the checkpoint and what is to be loaded differ, in words, besides their tensors.
        wanted: names of tensors that were asked for; `prefixes`: all saved names that begin so must be asked for.
    """

    def __init__(
        self, saved: Mapping[str, SavedTensor], left_out: Iterable[str], rank: int, ranks: int, ranks_then: int
    ) -> None:
        """`left_out`: names of entries."""
        self.left_out = tuple(f"{name}/" for name in left_out)
        self.rank, self.ranks, self.ranks_then = rank, ranks, ranks_then
        self.targets: list[tuple[SavedTensor, TensorShard]] = []
        self.begin: list[Callable[[], None]] = []
        self.end: list[Callable[[], object]] = []
        self.differences: list[str] = []
        self._of_tensors: list[str] = []
        self.wanted: set[str] = set()
        self.prefixes: list[str] = []
        self._saved = saved
        self._taken: dict[tuple, tuple[str, str]] = {}

    def saved(self, name: str) -> SavedTensor:
        """Return the tensor of this name. Raises: CheckpointError if the checkpoint has none."""
        if name not in self._saved:
            raise CheckpointError(f"the checkpoint names a tensor '{name}' that it doesn't have: it is damaged")
        return self._saved[name]

    def pass_over(self, names: Set[str]) -> None:
        """Let nobody have the saved tensors of these names, nor those that one rank alone saved under them."""
        self.wanted |= {name for name in self._saved if name in names or name.rpartition("@")[0] in names}

    def all_differences(self, wanted: Collection[str]) -> list[str]:
        """Return all differences: those of tensors, which others follow from, first. `wanted`: names that any rank
        wants."""
        of_entries = (name for name in self._saved if name.startswith(tuple(self.prefixes)))
        unexpected = (f"'{name}' is in the checkpoint alone" for name in of_entries if name not in wanted)
        return [*self._of_tensors, *unexpected, *self.differences]

    def in_memory(self, name: str) -> torch.Tensor:
        """Return an ordinary tensor into which the saved one of this name is read."""
        saved = self.saved(name)
        if name in self.wanted:
            raise CheckpointError(f"the checkpoint names the tensor '{name}' twice: it is damaged")
        tensor = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        self.target(name, tensor)
        return tensor

    def target(self, name: str, tensor: torch.Tensor) -> None:
        """Let the saved tensor `name` be read into `tensor`, if it fits."""
        self.wanted.add(name)
        if name not in self._saved:
            self._of_tensors.append(f"'{name}' is not in the checkpoint")
            return
        saved, shard = self._saved[name], TensorShard.of(tensor, name)
        if saved.shape != shard.shape:
            self._of_tensors.append(f"'{name}' has shape {shard.shape}, and {saved.shape} in the checkpoint")
        elif saved.dtype != shard.dtype:
            self._of_tensors.append(f"'{name}' has dtype {shard.dtype}, and {saved.dtype} in the checkpoint")
        else:
            first_name, source = self._taken.setdefault(shard.identity, (name, saved.name))
            if first_name == name:
                self.targets.append((saved, shard))
            elif source != saved.name:
                self._of_tensors.append(f"'{name}' and '{first_name}' are one tensor, and two in the checkpoint")

    def compare(self, what: str, mine: Iterable[str], saved: Iterable[str]) -> None:
        """Note which names are on one side only."""
        mine, saved = dict.fromkeys(mine), dict.fromkeys(saved)
        self.differences += [f"{what} '{name}' is not in the checkpoint" for name in mine if name not in saved]
        self.differences += [f"{what} '{name}' is in the checkpoint alone" for name in saved if name not in mine]


def listed(differences: list[str]) -> str:
    """Say the first of some differences in words."""
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more


FORMATS = "quantised"
"""The plain value that says, by the names of quantised tensors, how their bytes become values."""

SHAPES = "quantised_shapes"
"""The plain value with the shapes of these values, which their bytes don't say."""

COMPOSED = "composed"
"""The plain value that says, by the names of tensors that were saved as those that they are made of, their class and
what else that says of them."""


class ModuleEntry:
    """A model, whose members have the names that they have without what wraps it."""

    kind = "module"

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name = name
        self.module = unwrapped(module)

    def collect(self, collected: Collected) -> dict[str, Any]:
        tensors, extra, composed = self._state()
        for name, tensor in tensors.items():
            collected.add(tensor, f"{self.name}/{name}")
        values = {n: encode(value, f"{self.name}/{n}", collected.keep) for n, value in extra.items()}
        formats = {name: how for name, tensor in tensors.items() if (how := format_of(tensor)) is not None}
        shapes = {name: list(tensors[name].shape) for name in formats}
        return {"extra": values, FORMATS: formats, SHAPES: shapes, COMPOSED: composed}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        tensors, extra, composed = self._state()
        for name, tensor in tensors.items():
            mine, saved = format_of(tensor), values.get(FORMATS, {}).get(name)
            if mine != saved:
                matching.differences.append(
                    f"'{self.name}/{name}' is {_words(mine)}, and {_words(saved)} in the checkpoint"
                )
            matching.target(f"{self.name}/{name}", tensor)
        theirs = values.get(COMPOSED, {})
        for name in composed | theirs:
            if (mine := composed.get(name)) != (saved := theirs.get(name)):
                matching.differences.append(
                    f"'{self.name}/{name}' is {_class_words(mine)}, and {_class_words(saved)} in the checkpoint"
                )
        matching.prefixes.append(f"{self.name}/")
        matching.compare(f"extra state of {self.name}:", extra, values["extra"])
        if extra:
            state = {name: decode(value, matching.in_memory) for name, value in values["extra"].items()}
            matching.end.append(lambda: self._load_extra(state))

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, list[str]]]:
        """Divide `state_dict()` into tensors, extra state, and the classes of tensors that are made of others, by name.
        Such a tensor is replaced by those that it is made of; those of a base that can't change are left out."""
        state = by_plain_name(self.module, self.module.state_dict().items())
        tensors: dict[str, torch.Tensor] = {}
        composed: dict[str, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _take_apart(value, name, tensors, composed)
        extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        return {name: tensor for name, tensor in tensors.items() if not is_read_only(tensor)}, extra, composed

    def _load_extra(self, state: Mapping[str, Any]) -> None:
        names = plain_names(self.module, self.module.state_dict())
        self.module.load_state_dict({n: state[own] for n, own in names.items() if own in state}, strict=False)


def _take_apart(
    tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor], composed: dict[str, list[str]]
) -> None:
    """Add a tensor to `tensors`, or those that it is made of, and its class to `composed`."""
    if not (inner := made_of(tensor)):
        tensors[name] = tensor
        return
    assert is_traceable_wrapper_subclass(tensor)
    composed[name] = [f"{type(tensor).__module__}.{type(tensor).__qualname__}", repr(tensor.__tensor_flatten__()[1])]
    for attribute, tensor in inner.items():
        _take_apart(tensor, f"{name}.{attribute}", tensors, composed)


def _class_words(what: list[str] | None) -> str:
    return "an ordinary tensor" if what is None else f"a {what[0]} with {what[1]}"


def format_of(tensor: torch.Tensor) -> list[str] | None:
    """Return the format and dtype of a quantised tensor, and whether it is transposed, as JSON has them."""
    quantised = tensor.quantised if isinstance(tensor, StoredTensor) else None
    if quantised is None:
        return None
    how = [quantised.format, str(quantised.dtype).removeprefix("torch.")]
    return [*how, "transposed"] if quantised.transposed else how


def of_format(how: Sequence[str]) -> Quantised:
    """Read what `format_of` returned."""
    form, dtype, *transposed = how
    return Quantised(form, dtypes()[dtype], bool(transposed))


def _words(how: list[str] | None) -> str:
    return "not quantised" if how is None else f"quantised as {how[0]}, of {', '.join(how[1:])}"


def is_read_only(tensor: torch.Tensor) -> bool:
    """Whether a tensor is read in place from files of somebody else."""
    return isinstance(tensor, StoredTensor) and tensor.stored.bytes.allocation.is_read_only


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of a model; the first, where it has several."""
    module = unwrapped(module)
    return {parameter: name for name, parameter in by_plain_name(module, module.named_parameters()).items()}


LOADED_IN_PART = TornStep("a checkpoint was loaded in part", (), (), ())


class OptimizerEntry:
    """An optimizer of `zinf_fx.optim` or of PyTorch. Parameters have the names that models give them, others their
    number in the optimizer."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self.name = name
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):  # accelerate wraps it
            optimizer = inner
        self.optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._names = [names.get(parameter, f"#{number}") for number, parameter in enumerate(self._parameters)]
        self._kept_options: list[dict[str, Any]] | None = None

    def keep_options(self) -> None:
        """Save the options of the groups as they are now, whatever a scheduler does meanwhile."""
        self._kept_options = [copy.deepcopy(_options(group)) for group in self.optimizer.param_groups]

    def collect(self, collected: Collected) -> dict[str, Any]:
        state_dict = self.optimizer.state_dict()
        groups = []
        for number, group in enumerate(state_dict["param_groups"]):
            options = _options(group) if self._kept_options is None else self._kept_options[number]
            encoded = encode(options, f"{self.name}.param_groups[{number}]", collected.keep)
            groups.append({"params": [self._names[index] for index in group["params"]], "options": encoded})
        state = {}
        for index, states in state_dict["state"].items():
            what = f"{self.name}/{self._names[index]}"
            state[self._names[index]] = {k: encode(v, f"{what}.{k}", collected.keep) for k, v in states.items()}
        rest = {name: value for name, value in state_dict.items() if name not in ("state", "param_groups")}
        rest = encode(rest, self.name, collected.keep)
        return {"class": self._class, "groups": groups, "state": state, "rest": rest}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        if values["class"] != self._class:
            matching.differences.append(f"{self.name} is a {self._class}, and {values['class']} in the checkpoint")
            return
        groups = self._groups(values["groups"], matching)
        if groups is None:
            return
        matching.prefixes.append(f"{self.name}/")
        options_of = {number: group for group in groups for number in group["params"]}
        numbers = {name: number for number, name in enumerate(self._names)}
        state: dict[int, dict[str, Any]] = {}
        for name, entry in values["state"].items():
            if (number := numbers.get(name)) is None:
                matching.differences.append(f"{self.name} has no parameter '{name}', and states of it are saved")
                continue
            try:
                state[number] = self._entry(self._parameters[number], entry, options_of[number], matching)
            except OptimizerError as error:
                matching.differences.append(f"{self.name} can't have states of '{name}': {error}")
        rest = decode(values["rest"], matching.in_memory)
        matching.begin.append(partial(self._load, {**rest, "state": state, "param_groups": groups}))

    def _groups(self, saved: Sequence[Mapping[str, Any]], matching: Matching) -> list[dict[str, Any]] | None:
        """Return the groups as a state dict has them, with saved options; None where other groups were saved."""
        mine = self.optimizer.param_groups
        if len(mine) != len(saved):
            matching.differences.append(f"{self.name} has {len(mine)} groups, and {len(saved)} in the checkpoint")
            return None
        groups, first = [], 0
        for number, (group, saved_group) in enumerate(zip(mine, saved, strict=True)):
            params = range(first, first + len(group["params"]))
            names, first = [self._names[index] for index in params], params.stop
            matching.compare(f"parameter in group {number} of {self.name}:", names, saved_group["params"])
            if set(names) == set(saved_group["params"]):
                groups.append({**decode(saved_group["options"], matching.in_memory), "params": list(params)})
        return groups if len(groups) == len(mine) else None

    @property
    def _class(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _entry(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], group: dict[str, Any], matching: Matching
    ) -> dict[str, Any]:
        """Return the state of a parameter, with tensors into which the saved ones are read. What this optimizer keeps
        in another form is read into tensors of the saved form, and converted when everything is there."""
        stored = stored_parameter(parameter)
        optimizer = self.optimizer if stored is not None and isinstance(self.optimizer, Streamed) else None
        present: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        spaces = present if stored is None or optimizer is None else optimizer.reserved(stored, group)
        to_convert: dict[str, StoredTensor] = {}  # in the saved form

        def find(key: str, full_name: str) -> torch.Tensor:
            saved, space = matching.saved(full_name), spaces.get(key)
            kind = kind_of(key, entry)
            is_beside_one = kind is not None and key in map(companion_of, to_convert)
            in_another_form = optimizer is not None and (is_beside_one or _is_in_another_form(space, saved))
            if stored is not None and in_another_form:
                to_convert[key] = _in_form(stored, saved, kind)
                matching.target(full_name, stored.shown(to_convert[key]))
                return to_convert[key]
            if not isinstance(space, torch.Tensor) or not (optimizer is not None or _alike(space, saved)):
                space = _like(parameter, saved)
            matching.target(full_name, space)
            return space

        states_first = sorted(entry, key=lambda key: kind_of(key, entry) is not None)
        state = {key: decode(entry[key], partial(find, key)) for key in states_first}
        if stored is not None and to_convert:
            matching.end.append(partial(self._convert, stored, to_convert))
        mine = {name for key in to_convert for name in (key, companion_of(key))} & spaces.keys()
        return {key: value for key, value in state.items() if key not in to_convert} | {
            key: spaces[key] for key in mine
        }

    def _convert(self, parameter: StoredTensor, to_convert: dict[str, StoredTensor]) -> None:
        assert isinstance(self.optimizer, Streamed)
        try:
            self.optimizer.take_entries({parameter: to_convert})
        finally:
            self.optimizer.torn = LOADED_IN_PART

    def _load(self, state_dict: dict[str, Any]) -> None:
        try:
            self.optimizer.load_state_dict(state_dict)
        finally:
            if isinstance(self.optimizer, Streamed):
                self.optimizer.torn = LOADED_IN_PART  # it takes itself for whole then
        for number, entry in state_dict["state"].items():
            shown = self.optimizer.state[self._parameters[number]]
            for name, value in entry.items():
                mine = shown.get(name)
                if not isinstance(value, torch.Tensor) or not isinstance(mine, torch.Tensor) or mine is value:
                    continue
                # A copy, which will not be read into, or cast: torch gives states the parameter's dtype.
                if mine.device == value.device or mine.dtype != value.dtype:
                    shown[name] = value.to(mine.device)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _alike(space: torch.Tensor, saved: SavedTensor) -> bool:
    return (tuple(space.shape), space.dtype) == (saved.shape, saved.dtype)


def _is_in_another_form(space: object, saved: SavedTensor) -> bool:
    return isinstance(space, torch.Tensor) and tuple(space.shape) == saved.shape and space.dtype != saved.dtype


def _in_form(parameter: StoredTensor, saved: SavedTensor, kind: Companion | None) -> StoredTensor:
    """Return a tensor without values yet, for a saved state of a parameter or for its companion of a kind."""
    storage = parameter.stored
    if kind is None:
        (space,) = new_states([storage], saved.dtype)
    else:
        (space,) = new_scales([storage], kind.dtype, kind.elements)
    return StoredTensor.of(space, parameter.shape if kind is None else saved.shape, parameter.device)


def _like(parameter: torch.Tensor, saved: SavedTensor) -> torch.Tensor:
    """Return a tensor without values yet for a saved state of a parameter: of its shape, where such states live."""
    stored = stored_parameter(parameter)
    if tuple(parameter.shape) != saved.shape:
        return torch.empty(saved.shape, dtype=saved.dtype, device=parameter.device)
    if stored is None:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    return stored.shown(StoredTensor.of(new_states([stored.stored], saved.dtype)[0], stored.shape, stored.device))


class GradientsEntry:
    """The `grad` of each parameter of all models that has one, unless backward consumed it."""

    kind = "gradients"
    name = "gradients"

    def __init__(self, names: Mapping[torch.Tensor, str]) -> None:
        """`names`: the parameters' names."""
        self._names = names

    @property
    def is_filled(self) -> bool:
        """Whether there is any gradient."""
        return any(_gradient_of(parameter) is not None for parameter in self._names)

    def collect(self, collected: Collected) -> dict[str, Any]:
        of: dict[str, dict[str, bool]] = {}
        for parameter, name in self._names.items():
            if (gradient := _gradient_of(parameter)) is not None:
                of[name] = {"alone": _is_alone(gradient)}
                collected.add(gradient, self._full_name(name, collected.rank if _is_alone(gradient) else None))
        return {"of": of}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        parameters = {name: parameter for parameter, name in self._names.items()}
        gradients: dict[str, torch.Tensor] = {}
        passed_over: set[str] = set()
        for name, how in values["of"].items():
            if name.startswith(matching.left_out):
                passed_over.add(self._full_name(name, None))
                continue
            if name not in parameters:
                matching.differences.append(f"the gradient of '{name}' is in the checkpoint alone")
                continue
            if how["alone"] and matching.ranks != matching.ranks_then:
                passed_over.add(self._full_name(name, None))
                matching.differences.append(
                    f"the gradient of '{name}' was accumulated on each of {matching.ranks_then} ranks alone, under "
                    f"no_sync, and {matching.ranks} are here: load with as many, or save after a backward pass outside"
                )
                continue
            full_name = self._full_name(name, matching.rank if how["alone"] else None)
            dtype = matching.saved(full_name).dtype
            gradients[name] = _space(parameters[name], dtype, reduced=not how["alone"])
            matching.target(full_name, gradients[name])
        matching.pass_over(passed_over)
        matching.prefixes.append(f"{self.name}/")
        for name, parameter in parameters.items():
            matching.begin.append(partial(_set, parameter, gradients.get(name)))

    def _full_name(self, name: str, rank: int | None) -> str:
        return f"{self.name}/{name}" + ("" if rank is None else f"@{rank}")


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient, unless backward consumed it."""
    local = None if parameter.grad is None else local_part(parameter.grad)
    return None if state_of(local) is GradientState.CONSUMED else parameter.grad


def _is_alone(gradient: torch.Tensor) -> bool:
    return state_of(local_part(gradient)) is GradientState.LOCAL


def _space(parameter: torch.Tensor, dtype: torch.dtype, *, reduced: bool) -> torch.Tensor:
    stored = stored_parameter(parameter)
    if stored is not None:
        return stored.shown(new_gradient(stored, dtype, reduced=reduced))
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _set(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    stored = stored_parameter(parameter)
    if stored is not None:
        stored.grad = local_part(gradient) if isinstance(gradient, DTensor) else gradient
    else:
        parameter.grad = gradient


class RandomEntry:
    """PyTorch's generators, of the CPU and of each CUDA device in use, Python's, and NumPy's where it is imported."""

    kind = "random"
    name = "random"

    def collect(self, collected: Collected) -> dict[str, Any]:
        states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if on_devices := cuda.random_states():
            states["cuda"] = on_devices
        if (numpy := sys.modules.get("numpy")) is not None:
            states["numpy"] = numpy.random.get_state(legacy=True)
        return {name: encode(state, f"{self.name}.{name}", collected.keep) for name, state in states.items()}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        states = {name: decode(state, matching.in_memory) for name, state in values.items() if name != "kind"}
        matching.end += [partial(_setters()[name], state) for name, state in states.items() if name in _setters()]


def _setters() -> dict[str, Callable[[Any], None]]:
    """Return the functions that set the states of the generators that are here."""
    setters: dict[str, Callable[[Any], None]] = {"torch": torch.set_rng_state, "python": random.setstate}
    if cuda.is_available():
        setters["cuda"] = cuda.set_random_states
    if (numpy := sys.modules.get("numpy")) is not None:
        setters["numpy"] = numpy.random.set_state
    return setters


@runtime_checkable
class Stateful(Protocol):
    """A protocol like that of torch.distributed.checkpoint: what can be saved and loaded by a dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that is to be saved."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take what `state_dict` returned."""


class StatefulEntry:
    """An object with `state_dict` and `load_state_dict` of plain values and tensors, or a random generator."""

    def __init__(self, name: str, owner: Stateful | torch.Generator) -> None:
        self.name = name
        if isinstance(owner, torch.Generator):
            self.kind, self._get, self._set = "generator", owner.get_state, owner.set_state
        else:
            self.kind, self._get, self._set = "state", owner.state_dict, owner.load_state_dict

    def collect(self, collected: Collected) -> dict[str, Any]:
        return {"state": encode(self._get(), self.name, collected.keep)}

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        matching.end.append(partial(self._set, decode(values["state"], matching.in_memory)))


class ValueEntry:
    """A plain value, which is given back when it is loaded."""

    kind = "value"

    def __init__(self, name: str, value: object) -> None:
        self.name, self._value = name, value

    def collect(self, collected: Collected) -> dict[str, Any]:
        return {"value": encode(self._value, self.name, collected.keep)}


LARGEST = 16 << 20
"""Bytes of tensors in memory that a snapshot copies, at most."""


class TooLargeError(Exception):
    """An entry has more in memory than a snapshot copies."""


class EntrySnapshot(Collected):
    """An entry with the values and the tensors in memory that it had at construction. Elements of stored tensors, which
    only steps change, are read when it is collected.

    Attributes:
        entry: the entry itself.
    """

    def __init__(self, entry: StateEntry | ValueEntry) -> None:
        """Raises: TooLargeError; CheckpointError as `collect`."""
        super().__init__()
        self.entry, self.kind = entry, entry.kind
        self._copies: dict[str, torch.Tensor] = {}  # and stored tensors themselves
        self._nbytes = 0
        self._values = entry.collect(self)

    def add(self, tensor: torch.Tensor, name: str) -> str:
        """Copy a tensor that is in memory."""
        super().add(tensor, name)
        if name in self.same:
            self._copies[name] = self._copies[self.same[name]]
        elif isinstance(local_part(tensor), StoredTensor):
            self._copies[name] = tensor
        else:
            self._nbytes += tensor.nbytes
            if self._nbytes > LARGEST:
                raise TooLargeError
            self._copies[name] = tensor.detach().clone()
        return name

    def collect(self, collected: Collected) -> dict[str, Any]:
        """Collect what the entry was at construction."""
        for name, tensor in self._copies.items():
            collected.add(tensor, name)
        return self._values


StateEntries = Mapping[str, StateEntry | ValueEntry | EntrySnapshot]

MODEL, OPTIMIZER = "model", "optimizer"
_OURS = (GradientsEntry.name, RandomEntry.name)


def state_entries(model: torch.nn.Module, optimizer: Optimizer | None, extra: Mapping[str, object]) -> StateEntries:
    """Return a training's state entries by their names. Raises: CheckpointError for what is no model or optimizer."""
    _check(model, optimizer, extra)
    named = {MODEL: model, **({} if optimizer is None else {OPTIMIZER: optimizer}), **extra}
    names: dict[torch.Tensor, str] = {}
    for name, owner in named.items():
        if isinstance(owner, torch.nn.Module):
            prefix = "" if name == MODEL else f"{name}/"
            names = {p: prefix + its_name for p, its_name in parameter_names(owner).items()} | names
    entries = {name: _entry(name, owner, names) for name, owner in named.items()}
    return entries | {GradientsEntry.name: GradientsEntry(names), RandomEntry.name: RandomEntry()}


def _entry(name: str, owner: object, names: Mapping[torch.Tensor, str]) -> StateEntry | ValueEntry:
    if isinstance(owner, torch.nn.Module):
        return ModuleEntry(name, owner)
    if isinstance(owner, Optimizer):
        return OptimizerEntry(name, owner, names)
    return StatefulEntry(name, owner) if isinstance(owner, (Stateful, torch.Generator)) else ValueEntry(name, owner)


def _check(model: object, optimizer: object, extra: Mapping[str, object]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise CheckpointError(
            f"the optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or None; others go by names "
            "of their own, as in save_checkpoint(directory, model, first, second=second)"
        )
    for name in extra:
        if name in _OURS or "/" in name:
            raise CheckpointError(f"'{name}' is no name for what else is saved: choose another one")


def streamed_in(entries: StateEntries) -> list[Streamed]:
    """Return the optimizers of `zinf_fx.optim`."""
    optimizers = [entry.optimizer for entry in entries.values() if isinstance(entry, OptimizerEntry)]
    return [optimizer for optimizer in optimizers if isinstance(optimizer, Streamed)]


def modules_in(entries: StateEntries) -> list[torch.nn.Module]:
    """Return the models, beginning with the one that is called so."""
    present = [entry.entry if isinstance(entry, EntrySnapshot) else entry for entry in entries.values()]
    return [entry.module for entry in present if isinstance(entry, ModuleEntry)]


def unwritten_in(entries: StateEntries) -> set[int]:
    """Return the keys of the storages of frozen parameters, which no step rewrites."""
    frozen = (p for module in modules_in(entries) for p in module.parameters() if not p.requires_grad)
    return {stored.stored.key for parameter in frozen for stored in stored_in(parameter)}


@contextmanager
def between_steps(entries: StateEntries, *, whole: bool) -> Iterator[None]:
    """Open a block in which nothing else changes the training. With `whole`, no step may have ended in part.

    Raises: OptimizerError after a torn step, or in the middle of one that began in backward; StoreError.
    """
    with ExitStack() as rooms:
        rooms.enter_context(RUNNING.turn())
        for optimizer in streamed_in(entries):
            if whole:
                rooms.enter_context(optimizer.between_steps())
            elif optimizer.torn is None:
                optimizer.finish()
        yield
