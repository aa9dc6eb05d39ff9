"""The Python face of the native quantisation: memory, divided among threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from zinf_fx.native._engine import ffi, lib

FP32, BF16 = lib.ZINF_FP32, lib.ZINF_BF16
INTEGERS, E4M3, PAIRS, PLACES = lib.ZINF_INTEGERS, lib.ZINF_E4M3, lib.ZINF_PAIRS, lib.ZINF_PLACES
SCALES_FP32, SCALES_E8M0 = lib.ZINF_SCALES_FP32, lib.ZINF_SCALES_E8M0

# Values that are worth a thread of their own: about 0.05 ms of work, where handing it over takes 0.02.
_WORTH_A_THREAD = 1 << 17

_threads: ThreadPoolExecutor | None = None


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
    says. Other threads run meanwhile; so many share the rows, if there are enough."""
    itemsize = 4 if dtype == FP32 else 2
    shares = max(min(threads, rows, rows * columns // _WORTH_A_THREAD), 1)
    starts = [rows * share // shares for share in range(shares + 1)]

    def work(share: int) -> None:
        start, stop = starts[share], starts[share + 1]
        lib.zinf_dequantize(
            kind,
            ffi.cast("const uint8_t *", codes + start * codes_stride),
            codes_stride,
            scale_kind,
            ffi.cast("const uint8_t *", scales + start * scales_stride),
            scales_stride,
            stop - start,
            columns,
            block,
            ffi.cast("const float *", table),
            dtype,
            ffi.cast("void *", values + start * columns * itemsize),
        )

    _on_threads(work, shares)


def nearest_of_16(values: int, pairs: int, bounds: int, codes: int, threads: int) -> None:
    """Write a byte for each pair of fp32 values: of each value, how many of the 15 bounds lie below it, that of the
    first in the high half. All but `pairs` are addresses."""
    shares = max(min(threads, 2 * pairs // _WORTH_A_THREAD), 1)
    starts = [pairs * share // shares for share in range(shares + 1)]

    def work(share: int) -> None:
        start, stop = starts[share], starts[share + 1]
        lib.zinf_quantize_4(
            ffi.cast("const float *", values + start * 8),
            stop - start,
            ffi.cast("const float *", bounds),
            ffi.cast("uint8_t *", codes + start),
        )

    _on_threads(work, shares)


def nearest_of_256(
    values: int, count: int, block: int, bounds: int, first: int, codes: int, scales: int, threads: int
) -> None:
    """Write the codes of 8 bits of fp32 values, and the scale of each block. All but `count`, `block` and `threads` are
    addresses; the rest is as codes.h says."""
    blocks = -(-count // block)
    shares = max(min(threads, blocks, count // _WORTH_A_THREAD), 1)
    starts = [blocks * share // shares for share in range(shares + 1)]

    def work(share: int) -> None:
        start, stop = starts[share] * block, min(starts[share + 1] * block, count)
        lib.zinf_quantize_8(
            ffi.cast("const float *", values + start * 4),
            stop - start,
            block,
            ffi.cast("const float *", bounds),
            ffi.cast("const uint8_t *", first),
            ffi.cast("uint8_t *", codes + start),
            ffi.cast("float *", scales + starts[share] * 4),
        )

    _on_threads(work, shares)


def _on_threads(work: Callable[[int], None], shares: int) -> None:
    """Do all shares, the first one here."""
    global _threads
    others = []
    if shares > 1:
        _threads = _threads or ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="zinf-dequantize")
        others = [_threads.submit(work, share) for share in range(1, shares)]
    work(0)
    for other in others:
        other.result()


def _after_fork() -> None:
    """A child has none of the threads."""
    global _threads
    _threads = None


os.register_at_fork(after_in_child=_after_fork)
