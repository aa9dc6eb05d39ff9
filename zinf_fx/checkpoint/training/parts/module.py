"""Models: parameters, persistent buffers, and what their modules give as `get_extra_state`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinf_fx.checkpoint.naming import by_plain_name, plain_names, unwrapped
from zinf_fx.checkpoint.training.parts.part import Collected, Matching
from zinf_fx.checkpoint.training.values import decode, encode
from zinf_fx.plan.codec import dtypes
from zinf_fx.runtime.tensor.local_parameter import made_of
from zinf_fx.runtime.tensor.quantised import Quantised
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor

FORMATS = "quantised"
"""Of the plain values, by the names of quantised tensors, how their bytes become values."""

SHAPES = "quantised_shapes"
"""Of the plain values, by the same names, the shapes of these values, which their bytes don't say."""

COMPOSED = "composed"
"""Of the plain values, by the names of tensors that were saved as those that they are made of, of what class they are,
and what else that says of them."""


class ModulePart:
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
            found = {name: decode(one, matching.in_memory) for name, one in values["extra"].items()}
            matching.end.append(lambda: self._load_extra(found))

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, list[str]]]:
        """What `state_dict()` gives: tensors, but those of a base that can't change, and extra state. In the place of
        tensors that are made of several come these, by their names behind it; what such are comes by their names."""
        state = by_plain_name(self.module, self.module.state_dict().items())
        tensors: dict[str, torch.Tensor] = {}
        composed: dict[str, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _take_apart(value, name, tensors, composed)
        extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        return {name: tensor for name, tensor in tensors.items() if not is_read_only(tensor)}, extra, composed

    def _load_extra(self, found: Mapping[str, Any]) -> None:
        names = plain_names(self.module, self.module.state_dict())
        self.module.load_state_dict({n: found[own] for n, own in names.items() if own in found}, strict=False)


def _take_apart(
    tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor], composed: dict[str, list[str]]
) -> None:
    """Add a tensor, or those that it is made of and what it is, by its name."""
    if not (parts := made_of(tensor)):
        tensors[name] = tensor
        return
    composed[name] = [f"{type(tensor).__module__}.{type(tensor).__qualname__}", repr(tensor.__tensor_flatten__()[1])]
    for attribute, part in parts.items():
        _take_apart(part, f"{name}.{attribute}", tensors, composed)


def _class_words(what: list[str] | None) -> str:
    return "an ordinary tensor" if what is None else f"a {what[0]} with {what[1]}"


def format_of(tensor: torch.Tensor) -> list[str] | None:
    """The format and dtype of a quantised tensor, and whether it is transposed, as JSON has them."""
    quantised = tensor.quantised if isinstance(tensor, StoredTensor) else None
    if quantised is None:
        return None
    how = [quantised.format, str(quantised.dtype).removeprefix("torch.")]
    return [*how, "transposed"] if quantised.transposed else how


def of_format(how: Sequence[str]) -> Quantised:
    """What `format_of` says, read again."""
    form, dtype, *transposed = how
    return Quantised(form, dtypes()[dtype], bool(transposed))


def _words(how: list[str] | None) -> str:
    return "not quantised" if how is None else f"quantised as {how[0]}, of {', '.join(how[1:])}"


def is_read_only(tensor: torch.Tensor) -> bool:
    """Whether a tensor is read in place from files of somebody else."""
    return isinstance(tensor, StoredTensor) and tensor.storage.is_read_only


def parameter_names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    """The name of each parameter of a model; the first, where it has several."""
    module = unwrapped(module)
    return {one: name for name, one in by_plain_name(module, module.named_parameters()).items()}
