"""The Python face of the native quantisation."""

from __future__ import annotations

from zinf_fx.native._engine import ffi, lib

FP32, BF16 = lib.ZINF_FP32, lib.ZINF_BF16
INTEGERS, E4M3, PAIRS, PLACES = lib.ZINF_INTEGERS, lib.ZINF_E4M3, lib.ZINF_PAIRS, lib.ZINF_PLACES
SCALES_FP32, SCALES_E8M0 = lib.ZINF_SCALES_FP32, lib.ZINF_SCALES_E8M0


def dequantize(
    kind: int,
    codes: int,
    codes_stride: int,
    scale_kind: int,
    scales: int,
    scales_stride: int,
    rows: int,
    columns: int,
    block: int,
    table: int,
    dtype: int,
    values: int,
    threads: int,
) -> None:
    """Write the values of rows of codes. `codes`, `scales`, `table` and `values` are addresses; the rest is as codes.h
    says. Other threads run meanwhile."""
    lib.zinf_dequantize(
        kind,
        ffi.cast("const uint8_t *", codes),
        codes_stride,
        scale_kind,
        ffi.cast("const uint8_t *", scales),
        scales_stride,
        rows,
        columns,
        block,
        ffi.cast("const float *", table),
        dtype,
        ffi.cast("void *", values),
        threads,
    )


def nearest_of_16(values: int, pairs: int, bounds: int, codes: int, threads: int) -> None:
    """Write a byte for each pair of fp32 values: of each value, how many of the 15 bounds lie below it, that of the
    first in the high half. All but `pairs` and `threads` are addresses."""
    places, limits = ffi.cast("uint8_t *", codes), ffi.cast("const float *", bounds)
    lib.zinf_quantize_4(ffi.cast("const float *", values), pairs, limits, places, threads)


def nearest_of_256(
    values: int, count: int, block: int, bounds: int, first: int, codes: int, scales: int, threads: int
) -> None:
    """Write the codes of 8 bits of fp32 values, and the scale of each block. All but `count`, `block` and `threads` are
    addresses; the rest is as codes.h says."""
    lib.zinf_quantize_8(
        ffi.cast("const float *", values),
        count,
        block,
        ffi.cast("const float *", bounds),
        ffi.cast("const uint8_t *", first),
        ffi.cast("uint8_t *", codes),
        ffi.cast("float *", scales),
        threads,
    )
