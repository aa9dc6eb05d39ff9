"""The Python face of masters that are kept in 17 bits beside their weights."""

from __future__ import annotations

from zinf_fx.native._engine import ffi, lib


def split(masters: int, weights: int, count: int, lower: int, up: int, threads: int) -> None:
    """Keep what bf16 weights don't have of their fp32 masters. All but `count` and `threads` are addresses: see
    masters.h. Other threads run meanwhile."""
    lib.zinf_split_masters(
        ffi.cast("const float *", masters),
        ffi.cast("const uint16_t *", weights),
        count,
        ffi.cast("uint16_t *", lower),
        ffi.cast("uint8_t *", up),
        threads,
    )


def join(weights: int, lower: int, up: int, count: int, masters: int, threads: int) -> None:
    """The other way."""
    lib.zinf_join_masters(
        ffi.cast("const uint16_t *", weights),
        ffi.cast("const uint16_t *", lower),
        ffi.cast("const uint8_t *", up),
        count,
        ffi.cast("float *", masters),
        threads,
    )
