"""The Python face of masters that are kept in 17 bits beside their weights."""

from __future__ import annotations

from zinf_fx.native._engine import ffi, lib
from zinf_fx.native.threads import on_threads, starts_of
from zinf_fx.sizes import BITS


def split(masters: int, weights: int, count: int, lower: int, up: int, threads: int) -> None:
    """Keep what bf16 weights don't have of their fp32 masters. All but `count` and `threads` are addresses: see
    masters.h. Other threads run meanwhile; so many share the elements, if there are enough."""

    def work(first_byte: int, behind: int) -> None:
        start = first_byte * BITS
        lib.zinf_split_masters(
            ffi.cast("const float *", masters + start * 4),
            ffi.cast("const uint16_t *", weights + start * 2),
            min(behind * BITS, count) - start,
            ffi.cast("uint16_t *", lower + start * 2),
            ffi.cast("uint8_t *", up + first_byte),
        )

    on_threads(work, starts_of(-(-count // BITS), count, threads))


def join(weights: int, lower: int, up: int, count: int, masters: int, threads: int) -> None:
    """The other way."""

    def work(first_byte: int, behind: int) -> None:
        start = first_byte * BITS
        lib.zinf_join_masters(
            ffi.cast("const uint16_t *", weights + start * 2),
            ffi.cast("const uint16_t *", lower + start * 2),
            ffi.cast("const uint8_t *", up + first_byte),
            min(behind * BITS, count) - start,
            ffi.cast("float *", masters + start * 4),
        )

    on_threads(work, starts_of(-(-count // BITS), count, threads))
