"""The Python face of the native arithmetic of codes (codes.h), split masters (masters.h) and updates (update.h)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zinf_fx.native._engine import ffi, lib

FP32, BF16, FP16 = lib.ZINF_FP32, lib.ZINF_BF16, lib.ZINF_FP16
CODES, SPLIT = lib.ZINF_CODES, lib.ZINF_SPLIT
ADAM, SGD = lib.ZINF_ADAM, lib.ZINF_SGD
INSTRUCTIONS = {"plain": lib.ZINF_PLAIN, "avx2": lib.ZINF_AVX2, "avx512": lib.ZINF_AVX512}
"""The sets of instructions that updates are compiled for, the best last."""
INTEGERS, E4M3, PAIRS, PLACES = lib.ZINF_INTEGERS, lib.ZINF_E4M3, lib.ZINF_PAIRS, lib.ZINF_PLACES
SCALES_FP32, SCALES_E8M0 = lib.ZINF_SCALES_FP32, lib.ZINF_SCALES_E8M0


def _with_addresses(function: Callable[..., None]) -> Callable[..., None]:
    """A function of the library that takes addresses, which are numbers, for pointers. Other threads run meanwhile."""
    kinds = [kind if kind.kind == "pointer" else None for kind in ffi.typeof(function).args]

    def call(*given: int) -> None:
        function(
            *[
                argument if kind is None else ffi.cast(kind, argument)
                for kind, argument in zip(kinds, given, strict=True)
            ]
        )

    return call


dequantize = _with_addresses(lib.zinf_dequantize)
nearest_of_16 = _with_addresses(lib.zinf_quantize_4)
nearest_of_256 = _with_addresses(lib.zinf_quantize_8)
split_masters = _with_addresses(lib.zinf_split_masters)
join_masters = _with_addresses(lib.zinf_join_masters)


def best_instructions() -> int:
    """The best set of instructions that this processor has."""
    return lib.zinf_instructions()


def update(options: Mapping[str, float], operands: Any, instructions: int, threads: int) -> None:
    """Update `new_operands`. `options`: a `struct zinf_options`. Other threads run meanwhile."""
    lib.zinf_update(ffi.new("struct zinf_options *", dict(options)), operands, len(operands), instructions, threads)


def new_operands(operands: Sequence[Mapping[str, object]]) -> Any:
    """An array of `struct zinf_operands`, which holds nothing that they point to."""
    return ffi.new("struct zinf_operands[]", [dict(fields) for fields in operands])


def kept(kind: int, values: int = 0, companion: int = 0) -> dict[str, object]:
    """A `struct zinf_kept`. Arrays are given by their addresses."""
    pointers = {"values": ffi.cast("void *", values), "companion": ffi.cast("void *", companion)}
    return {"kind": kind, "is_new": 0, "map": ffi.NULL, **pointers}


def new_map(values: int, places: int) -> Any:
    """A `struct zinf_map`, of arrays that are given by their addresses."""
    pointers = {"values": ffi.cast("float *", values), "places": ffi.cast("uint32_t *", places)}
    return ffi.new("struct zinf_map *", pointers)
