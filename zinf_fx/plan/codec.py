"""Frozen dataclasses to plain values of JSON or TOML and back, by their fields' types. Nothing but data is read: values
of other types, unknown fields and numbers out of range are refused, with where they stand, what was found there and
what is accepted.

msgspec would read a trillion parameters' plan in 5 ms in place of 70, of the 430 that loading it takes. But its errors
have neither what was found nor what is accepted, and `$.peak[...]` for where; it ignores unknown fields of dataclasses;
and it knows neither `Config`'s rules, nor texts that must not reach a terminal, nor a field given twice.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from zinf_fx.config import LARGEST, Config, option_names, shortened
from zinf_fx.errors import ConfigError, PlanFileError, ZinfError
from zinf_fx.placement import Placement, PlacementRules

# Options that say where a job runs, not what it does.
LOCAL_OPTIONS = frozenset(
    {"store", "checksum", "strict_direct", "update_threads", "process_group", "mesh", "collective_timeout"}
)
# Characters of what is wrong with an option: a hostile value may stand in it.
_LONGEST_ERROR = 400


def encode(value: object) -> Any:
    """A value as JSON has it. Fields that have their default are left out, but for a `Config`'s."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [item if type(item) in (int, str) else encode(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Config):
        return {name: encode(getattr(value, name)) for name in shared_options()}
    if isinstance(value, (Placement, PlacementRules)):
        return {name: encode(getattr(value, name)) for name in defaults(type(value))}
    if is_dataclass(value):
        fields_set = {}
        for name, default in defaults(type(value)).items():
            field_value = getattr(value, name)
            if field_value != default:
                fields_set[name] = field_value if type(field_value) in (int, str) else encode(field_value)  # most are
        return fields_set
    raise TypeError(f"a plan has no field of type {type(value).__name__}")


def decode(kind: type, value: object, what: str, refusal: type[ZinfError] = PlanFileError) -> Any:
    """A value of type `kind` from JSON or TOML. A field's type may be `Annotated` with the least number that it has, or
    with a function that makes its value of what was read and of its name.

    Raises: `refusal` naming the place, as `what: graphs[0].events[3].tile='x' is not a whole number`.
    """
    try:
        return _reader(kind)(value)
    except _Unfit as unfit:
        raise refusal(f"{what}: {f'{unfit.place}{unfit}'.lstrip('.: ')}") from None


def shared_options() -> list[str]:
    """The names of the options that a plan file holds."""
    return [name for name in option_names() if name not in LOCAL_OPTIONS]


@cache
def defaults(kind: type) -> dict[str, object]:
    """The fields of a dataclass, with their defaults; MISSING where there is none."""
    made = {member.name: member.default_factory for member in fields(kind) if member.default_factory is not MISSING}
    return {member.name: made[member.name]() if member.name in made else member.default for member in fields(kind)}


@cache
def dtypes() -> dict[str, torch.dtype]:
    """The dtypes of PyTorch's by their names, but for those whose values need more than their elements, or that no
    operation takes."""
    names = (name for name in sorted(vars(torch)) if not name.startswith(("qint", "quint", "bits")))
    return {name: value for name in names if isinstance(value := getattr(torch, name), torch.dtype)}


class _Unfit(Exception):
    """Says what is wrong with a value. Callers add where the value stands, which is read first."""

    place = ""

    def inside(self, step: str | int) -> _Unfit:
        self.place = (f"[{step}]" if isinstance(step, int) else f".{step}") + self.place
        return self


_Reader = Callable[[Any], Any]


@cache
def _reader(kind: Any) -> _Reader:
    """The function that makes a value of `kind`, or raises _Unfit."""
    if kind is Config:
        readers = dict.fromkeys(shared_options(), lambda value: value)
        return _object(readers | {"reduce_dtype": _reader(torch.dtype | None)}, readers, _config)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        required = [name for name, default in defaults(kind).items() if default is MISSING]
        return _object({name: _reader(hints[name]) for name in defaults(kind)}, required, kind)
    if kind is torch.dtype:
        return _dtype
    if kind in (int, str, bool):
        return _plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _checked(arguments[1]) if callable(arguments[1]) else _plain(*arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _list(arguments)
    if origin is dict:
        names, values = arguments
        return _object(dict.fromkeys(get_args(names), _reader(values)), (), dict, least=1)
    if origin in (Union, types.UnionType) and type(None) in arguments:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        read = _reader(inner)
        return lambda value: None if value is None else read(value)
    raise TypeError(f"no field that is read is of type {kind}")


def _plain(kind: type, least: int = -LARGEST) -> _Reader:
    name = {int: "a whole number", str: "a text", bool: "true or false"}[kind]

    def read(value: Any) -> object:
        if type(value) is not kind:  # true is no number
            raise _Unfit(f"={_shown(value)} is not {name}")
        if kind is int and value < least:
            raise _Unfit(f"={_shown(value)} is less than {least}")
        if kind is int and value > LARGEST:
            raise _Unfit(f"={_shown(value)} is out of range")
        if kind is str and not value.isprintable():  # it would command the terminal that it is printed on
            raise _Unfit(f"={_shown(value)} has characters that can't be printed")
        return value

    return read


def _checked(check: Callable[[object, str], object]) -> _Reader:
    def read(value: object) -> object:
        try:
            return check(value, "")
        except ConfigError as error:
            raise _Unfit(str(error)) from None

    return read


def _one_of(accepted: tuple[object, ...]) -> _Reader:
    def read(value: object) -> object:
        if not isinstance(value, str) or value not in accepted:
            raise _Unfit(f"={_shown(value)} is none of {', '.join(map(str, accepted))}")
        return value

    return read


def _list(kinds: tuple[Any, ...]) -> _Reader:
    """The reader of a tuple's type: of any length, with an ellipsis, or of that many items."""
    repeated = len(kinds) == 2 and kinds[1] is Ellipsis
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(value: object) -> tuple:
        if not isinstance(value, list) or not (repeated or len(value) == len(readers)):
            raise _Unfit(f"={_shown(value)} is not a list" + ("" if repeated else f" of {len(readers)}"))
        made: list[object] = []
        try:
            for item, read_item in zip(value, readers * len(value) if repeated else readers, strict=True):
                made.append(read_item(item))
        except _Unfit as unfit:
            raise unfit.inside(len(made)) from None
        return tuple(made)

    return read


def _object(readers: Mapping[str, _Reader], required: Collection[str], make: Callable, least: int = 0) -> _Reader:
    """The reader of named fields, of which there are `least` at least."""

    def read(value: object) -> object:
        if not isinstance(value, dict) or len(value) < least:
            raise _Unfit(f"={_shown(value)} is not a table of {', '.join(readers)}")
        made = {}
        for name, field_value in value.items():
            if name not in readers:
                raise _Unfit(f": unknown field {_shown(name)}; accepted: {', '.join(readers)}")
            try:
                made[name] = readers[name](field_value)
            except _Unfit as unfit:
                raise unfit.inside(name) from None
        for name in required:
            if name not in made:
                raise _Unfit(f": '{name}' is missing; needed: {', '.join(required)}")
        return make(**made)

    return read


def _config(**options: object) -> Config:
    try:
        config = Config.of(None, options)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise _Unfit(f": {error}"[:_LONGEST_ERROR]) from None
    for name in ("placement", "micro_batches"):
        if getattr(config, name) == "auto":
            raise _Unfit(f": {name} is not decided")
    return config


def _dtype(value: object) -> torch.dtype:
    dtype = dtypes().get(value) if isinstance(value, str) else None
    if dtype is None:
        raise _Unfit(f"={_shown(value)} is no dtype")
    return dtype


def _shown(value: object) -> str:
    return "{...}" if isinstance(value, dict) else "[...]" if isinstance(value, list) else shortened(value)
