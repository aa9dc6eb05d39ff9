"""The Python face of the native arithmetic of codes (codes.h) and of split masters (masters.h)."""

from __future__ import annotations

from collections.abc import Callable

from zinf_fx.native._engine import ffi, lib

FP32, BF16 = lib.ZINF_FP32, lib.ZINF_BF16
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
