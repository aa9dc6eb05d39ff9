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
from collections.abc import Callable, Iterable
from typing import Any

import torch

from zinf_fx.config import LARGEST
from zinf_fx.errors import CheckpointError, ZinfError
from zinf_fx.plan.codec import dtypes

INLINE = 8192
"""Bytes of a tensor up to which it stands among the values."""

Keep = Callable[[torch.Tensor, str], str]
"""Keeps a tensor elsewhere, and says under which name. It gets what the tensor is, too."""

Find = Callable[[str], torch.Tensor]
"""The tensor that was kept under a name."""

_MAPPINGS: dict[str, Callable[[dict], dict]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_SEQUENCES: dict[str, Callable[[Iterable], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
}


def encode(value: object, what: str, keep: Keep) -> Any:
    """`value` as JSON has it. `what`: it is, for errors.

    Raises: CheckpointError naming what in it is of another type.
    """
    if isinstance(value, enum.Enum) and isinstance(value, (int, str)):
        value = value.value
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= LARGEST else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return _several(value, what, keep)
    if isinstance(value, torch.Tensor):
        return encode_tensor(value, what, keep)
    if isinstance(value, dict):
        return _encode_mapping(value, what, keep)
    if kind is deque and value.maxlen is not None:
        return {"$bounded": [_several(value, what, keep), value.maxlen]}
    for name, made in _SEQUENCES.items():
        if kind is made:
            in_order = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return {f"${name}": _several(in_order, what, keep)}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        return {"$complex": _several((value.real, value.imag), what, keep)}
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
    """A tensor as JSON has it: its bytes, or where it is kept."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or tensor.nbytes > INLINE:
        return {"$kept": keep(tensor, what)}
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # `view` keeps the stride of one element
    text = base64.b64encode(bytes(flat.view(torch.uint8).tolist())).decode()
    return {"$tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), text]}


def decode(value: Any, find: Find) -> Any:
    """The value that `encode` made this of. Raises: CheckpointError for what `encode` doesn't make."""
    if isinstance(value, list):
        return [decode(one, find) for one in value]
    if not isinstance(value, dict):
        return value
    name, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or not name.startswith("$"):
        return {key: decode(one, find) for key, one in value.items()}
    try:
        return _decode(name[1:], content, find)
    except ZinfError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RuntimeError) as error:
        raise CheckpointError(f"a value of the checkpoint, of kind {name[:60]!r}, can't be read: {error}") from error


def _decode(name: str, content: Any, find: Find) -> Any:
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key, find): decode(one, find) for key, one in content})
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(one, find) for one in content)
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
        return complex(*(decode(one, find) for one in content))
    if name == "dtype":
        return dtypes()[content]
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
        return {key: encode(one, f"{what}.{key}", keep) for key, one in value.items()}
    pairs = ((encode(key, what, keep), encode(one, f"{what}[{key!r}]", keep)) for key, one in value.items())
    return {f"${kind}": [list(pair) for pair in pairs]}


def _several(values: Iterable, what: str, keep: Keep) -> list:
    return [encode(one, f"{what}[{number}]", keep) for number, one in enumerate(values)]
