"""Plain values as JSON has them, and back: nothing is pickled, and nothing is executed when they are read.

JSON has texts, numbers, truths, lists and objects whose names are texts. What else the states of schedulers, scalers,
samplers and random generators are made of stands in an object with one name, which begins with `$`. Small tensors stand
there too, as their bytes; large ones are left to whoever encodes.
"""

from __future__ import annotations

import base64
import enum
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zinf_fx.config import LARGEST, shortened
from zinf_fx.errors import CheckpointError, ZinfError
from zinf_fx.plan.codec import dtypes
from zinf_fx.quantisation import FORMATS

INLINE = 8192
"""Bytes of a tensor up to which it stands among the values."""

Keep = Callable[[torch.Tensor, str], str]
"""Keeps a tensor elsewhere, and returns under which name. The second argument names the tensor in errors."""

Find = Callable[[str], torch.Tensor]
"""Returns the tensor that was kept under a name."""

_MAPPINGS: dict[str, Callable[[dict], dict]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Iterable], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
}


def encode(given: Any, what: str, keep: Keep) -> Any:
    """Return `given` as JSON has it. `what` names it in errors.

    Raises: CheckpointError naming what in it is of another type.
    """
    value: Any = given.value if isinstance(given, enum.Enum) and isinstance(given, (int, str)) else given
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= LARGEST else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return _encode_list(value, what, keep)
    if isinstance(value, torch.Tensor):
        return encode_tensor(value, what, keep)
    if isinstance(value, dict):
        return _encode_mapping(value, what, keep)
    if kind is deque and value.maxlen is not None:
        return {"$bounded": [_encode_list(value, what, keep), value.maxlen]}
    for name, made in _SEQUENCES.items():
        if kind is made:
            in_order = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return {f"${name}": _encode_list(in_order, what, keep)}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": _encode_list((value.real, value.imag), what, keep)}
    if kind in (torch.dtype, torch.device):
        return {f"${kind.__name__}": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
        try:
            tensor = torch.from_numpy(numpy.array(value))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{what} is of numpy's dtype {value.dtype.str!r}, which can't be saved ({error}): convert it with "
                "astype() to one that PyTorch has, too, of this machine's byte order"
            ) from None
        return {"$numpy": [encode_tensor(tensor, what, keep), isinstance(value, numpy.generic)]}
    raise CheckpointError(
        f"{what} is a {kind.__module__}.{kind.__qualname__}, which can't be saved without pickling: accepted are "
        "numbers, texts, lists, tuples, dicts, sets, bytes, tensors, numpy arrays, and what has a state_dict() of these"
    )


def encode_tensor(tensor: torch.Tensor, what: str, keep: Keep) -> Any:
    """Return a tensor as JSON has it: its bytes, or where it is kept."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or tensor.is_quantized or tensor.nbytes > INLINE:
        return {"$kept": keep(tensor, what)}
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # `view` keeps the stride of one element
    text = base64.b64encode(bytes(flat.view(torch.uint8).tolist())).decode()
    return {"$tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]}


def decode(value: Any, find: Find) -> Any:
    """Return the value that `encode` made this of. Raises: CheckpointError for what `encode` doesn't make."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or not name.startswith("$"):
        return {key: decode(item, find) for key, item in value.items()}
    try:
        return _decode(name[1:], content, find)
    except ZinfError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"a value of the checkpoint, of kind {name[:60]!r}, can't be read: {error}") from error


def _dtype(name: str) -> torch.dtype:
    """Any dtype, also one of which no tensor is saved."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _decode(name: str, content: Any, find: Find) -> Any:
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, find): decode(item, find) for key, item in content})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in content)
    if name == "int":
        return int(content)
    if name == "float":
        return float(content)
    if name == "bounded":
        return deque(decode(content[0], find), content[1])
    if name in ("bytes", "bytearray"):
        content = base64.b64decode(content, validate=True)
        return content if name == "bytes" else bytearray(content)
    if name == "complex":
        return complex(*(decode(item, find) for item in content))
    if name == "dtype":
        return _dtype(content)
    if name == "device":
        return torch.device(content)
    if name == "tensor":
        return _decode_tensor(*content)
    if name == "kept":
        return find(content)
    if name == "numpy":
        array = decode(content[0], find).numpy()
        return array[()] if content[1] else array
    raise KeyError(name)


def _decode_tensor(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    content = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.clone().view(dtypes()[dtype]).view(shape)


def _encode_mapping(value: dict, what: str, keep: Keep) -> Any:
    kind = next((name for name, made in _MAPPINGS.items() if type(value) is made), "dict")
    if kind == "dict" and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{what}.{key}", keep) for key, item in value.items()}
    pairs = ((encode(key, what, keep), encode(item, f"{what}[{key!r}]", keep)) for key, item in value.items())
    return {f"${kind}": [list(pair) for pair in pairs]}


def _encode_list(values: Iterable, what: str, keep: Keep) -> list:
    return [encode(item, f"{what}[{number}]", keep) for number, item in enumerate(values)]


DEEPEST = 100
"""How deeply values may be nested: states of schedulers and samplers have a few levels."""

_Form = Callable[[Any], str | None]
"""A form says in words what is wrong with a value; None: nothing is."""


def fault_in(values: Any) -> str | None:
    """Say what is wrong with the plain values of all state entries, by their names; None: nothing is."""
    inside: list[object] = [values]
    for _ in range(DEEPEST + 1):
        if not all(math.isfinite(value) for value in inside if isinstance(value, float)):
            return "a number among its plain values is beyond all numbers"
        inside = [inner for value in inside for inner in _inside(value)]
    if any(isinstance(value, (dict, list)) for value in inside):
        return f"its plain values are nested in more than {DEEPEST} levels"
    fault = _by_name(_entry)(values)
    if fault is None and not all(name.isprintable() for name in values):
        fault = "a name has characters that can't be printed"
    return None if fault is None else f"its plain values by part: {fault}"


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _anything(value: object) -> None:
    return None


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else f"{_shown(value)} is no text"


def _truth(value: object) -> str | None:
    return None if isinstance(value, bool) else f"{_shown(value)} is neither true nor false"


def _size(value: object) -> str | None:
    return None if type(value) is int and value >= 0 else f"{_shown(value)} is no size"


def _list(form: _Form) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, list):
            return f"{_shown(value)} is no list"
        return next((wrong for item in value if (wrong := form(item)) is not None), None)

    return fault


def _by_name(form: _Form) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"{_shown(value)} has no names"
        faults = ((name, form(item)) for name, item in value.items())
        return next((f"{shortened(name)}: {wrong}" for name, wrong in faults if wrong is not None), None)

    return fault


def _fields(required: Mapping[str, _Form], optional: Mapping[str, _Form] | None = None) -> _Form:
    def fault(value: object) -> str | None:
        if not isinstance(value, dict):
            return f"{_shown(value)} has no fields"
        if missing := [name for name in required if name not in value]:
            return f"there is no field '{missing[0]}'"
        for name, form in {**required, **(optional or {})}.items():
            if name in value and (wrong := form(value[name])) is not None:
                return f"'{name}': {wrong}"
        return None

    return fault


def _format(value: Any) -> str | None:
    is_known = _list(_text)(value) is None and value[:1] and value[0] in FORMATS and value[1:2] and value[1] in dtypes()
    return None if is_known and value[2:] in ([], ["transposed"]) else f"{_shown(value)} is no format"


def _class(value: Any) -> str | None:
    return None if _list(_text)(value) is None and len(value) == 2 else f"{_shown(value)} is no class of tensors"


_TEXTS = _list(_text)
_GROUP = _fields({"params": _TEXTS, "options": _by_name(_anything)})
_OF_KIND: dict[str, _Form] = {
    "module": _fields(
        {"extra": _by_name(_anything)},
        {"quantised": _by_name(_format), "quantised_shapes": _by_name(_list(_size)), "composed": _by_name(_class)},
    ),
    "optimizer": _fields(
        {
            "class": _text,
            "groups": _list(_GROUP),
            "state": _by_name(_by_name(_anything)),
            "rest": _by_name(_anything),
        }
    ),
    "gradients": _fields({"of": _by_name(_fields({"alone": _truth}))}),
    "random": _by_name(_anything),
    "state": _fields({"state": _anything}),
    "generator": _fields({"state": _anything}),
    "value": _fields({"value": _anything}),
}


def _entry(value: object) -> str | None:
    """Check an entry, or the same entry of each rank."""
    if isinstance(value, dict) and "ranks" in value:
        return _kind(value) or _list(lambda of_rank: None if of_rank is None else _of_kind(of_rank))(value["ranks"])
    return _of_kind(value)


def _of_kind(value: Any) -> str | None:
    return _kind(value) or _OF_KIND[value["kind"]](value)


def _kind(value: object) -> str | None:
    kind = value.get("kind") if isinstance(value, dict) else None
    known = isinstance(kind, str) and kind in _OF_KIND
    return None if known else f"{_shown(kind)} is no kind of part, which are {', '.join(_OF_KIND)}"


def _shown(value: object) -> str:
    return "{...}" if isinstance(value, dict) else "[...]" if isinstance(value, list) else shortened(value)
