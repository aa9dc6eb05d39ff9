"""Frozen dataclasses to plain JSON values and back, by their fields' types. Nothing but data is read: values of other
types, unknown fields and numbers out of range are refused with the place where they stand."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from zinf_fx.config import LARGEST, Config, Placement, shortened
from zinf_fx.errors import ConfigError, PlanFileError

# Options that say where a job runs, not what it does.
LOCAL_OPTIONS = frozenset({"store", "checksum", "strict_direct", "process_group", "mesh", "collective_timeout"})
# Characters of what is wrong with an option: a hostile value may stand in it.
_LONGEST_ERROR = 400


def encode(value: object) -> Any:
    """A value as JSON has it. Fields that have their default are left out, but for a `Config`'s."""
    if isinstance(value, Config):
        return {name: encode(getattr(value, name)) for name in shared_options()}
    if isinstance(value, Placement):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if is_dataclass(value):
        return {one.name: encode(v) for one in fields(value) if (v := getattr(value, one.name)) != _default(one)}
    if isinstance(value, (tuple, list)):
        return [encode(one) for one in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"a plan has no field of type {type(value).__name__}")


def decode(kind: type, value: object, what: str) -> Any:
    """A value of type `kind` from JSON. Raises: PlanFileError naming the place, as `what.graphs[0].events[3].tile`."""
    try:
        return _reader(kind)(value)
    except _Unfit as unfit:
        raise PlanFileError(f"{what}{unfit.place}: {unfit}") from None


def shared_options() -> list[str]:
    """The names of the options that a plan file holds."""
    return [one.name for one in fields(Config) if one.init and one.name not in LOCAL_OPTIONS]


@cache
def dtypes() -> dict[str, torch.dtype]:
    """Every dtype of PyTorch's by its name."""
    return {name: value for name, value in sorted(vars(torch).items()) if isinstance(value, torch.dtype)}


class _Unfit(Exception):
    """What is wrong with a value, and, as callers add to it, where it stands."""

    place = ""

    def inside(self, step: str) -> _Unfit:
        self.place = step + self.place
        return self


_Reader = Callable[[object], Any]


@cache
def _reader(kind: Any) -> _Reader:
    """The function that makes a value of `kind`, or raises _Unfit."""
    if kind is Config:
        return _config
    if is_dataclass(kind):
        return _dataclass(kind)
    if kind is torch.dtype:
        return _dtype
    if kind in (int, str, bool):
        return _plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _list(arguments)
    if origin in (Union, types.UnionType) and type(None) in arguments:
        (other,) = (each for each in arguments if each is not type(None))
        read = _reader(other)
        return lambda value: None if value is None else read(value)
    raise TypeError(f"no plan has a field of type {kind}")


def _plain(kind: type) -> _Reader:
    name = {int: "a whole number", str: "a text", bool: "true or false"}[kind]

    def read(value: object) -> object:
        if type(value) is not kind:  # true is no number
            raise _Unfit(f"{_shown(value)} is not {name}")
        if kind is int and not -LARGEST <= value <= LARGEST:
            raise _Unfit(f"{_shown(value)} is out of range")
        if kind is str and not value.isprintable():  # it would command the terminal that it is printed on
            raise _Unfit(f"{_shown(value)} has characters that can't be printed")
        return value

    return read


def _one_of(accepted: tuple[object, ...]) -> _Reader:
    def read(value: object) -> object:
        if not isinstance(value, str) or value not in accepted:
            raise _Unfit(f"{_shown(value)} is none of {', '.join(map(str, accepted))}")
        return value

    return read


def _list(kinds: tuple[Any, ...]) -> _Reader:
    """Of a tuple's type: of any length, with an ellipsis, or of that many items."""
    repeated = len(kinds) == 2 and kinds[1] is Ellipsis
    readers = [_reader(kind) for kind in kinds if kind is not Ellipsis]

    def read(value: object) -> tuple:
        if not isinstance(value, list) or not (repeated or len(value) == len(readers)):
            raise _Unfit(f"{_shown(value)} is not a list" + ("" if repeated else f" of {len(readers)}"))
        found, each = [], readers * len(value) if repeated else readers
        for number, (one, reader) in enumerate(zip(value, each, strict=True)):
            try:
                found.append(reader(one))
            except _Unfit as unfit:
                raise unfit.inside(f"[{number}]") from None
        return tuple(found)

    return read


def _dataclass(kind: type) -> _Reader:
    hints = get_type_hints(kind)
    readers = {one.name: _reader(hints[one.name]) for one in fields(kind)}
    required = [one.name for one in fields(kind) if _default(one) is MISSING]

    def read(value: object) -> object:
        if not isinstance(value, dict):
            raise _Unfit(f"{_shown(value)} is not an object of {', '.join(readers)}")
        for name in required:
            if name not in value:
                raise _Unfit(f"'{name}' is missing")
        made = {}
        for name, one in value.items():
            if name not in readers:
                raise _Unfit(f"unknown field {_shown(name)}; accepted: {', '.join(readers)}")
            try:
                made[name] = readers[name](one)
            except _Unfit as unfit:
                raise unfit.inside(f".{name}") from None
        return kind(**made)

    return read


def _config(value: object) -> Config:
    if not isinstance(value, Mapping):
        raise _Unfit(f"{_shown(value)} is not an object of options")
    accepted = shared_options()
    if unknown := sorted(set(value) - set(accepted)):
        raise _Unfit(f"unknown option {_shown(unknown[0])}; accepted: {', '.join(accepted)}")
    if missing := [name for name in accepted if name not in value]:
        raise _Unfit(f"'{missing[0]}' is missing")
    reduce_dtype = None if value["reduce_dtype"] is None else _dtype(value["reduce_dtype"])
    try:
        config = Config.of(None, {**value, "reduce_dtype": reduce_dtype})
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise _Unfit(str(error)[:_LONGEST_ERROR]) from None
    if not isinstance(config.placement, Placement):
        raise _Unfit("the placement is not decided")
    return config


def _dtype(value: object) -> torch.dtype:
    found = dtypes().get(value) if isinstance(value, str) else None
    if found is None:
        raise _Unfit(f"{_shown(value)} is no dtype")
    return found


def _default(one: Field) -> object:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _shown(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, (dict, list)) else shortened(value)
