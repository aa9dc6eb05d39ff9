"""Bytes in words, and what sizes are multiples of."""

from __future__ import annotations

PAGE = 4096
"""Bytes: the store moves whole pages, each with its checksum, and host buffers are whole pages."""

HUGE_PAGE = 2 << 20
"""Bytes: what the processor finds with one entry of its table, where memory is aligned to it."""

WINDOW_ALIGNMENT = 4096
"""Elements: windows, and as far as they can the tiles and the optimizer's chunks, begin at multiples of so many. Their
byte offsets suit direct I/O for every dtype, and vectorised kernels cut a tensor where they would without windows."""

BLOCK = 256
"""Elements of an optimizer's state that share a scale, where it is kept in 8 bits: see `optim.formats`."""

BITS = 8
"""In a byte: elements that share one, where a bit of each is kept (see `optim.formats`)."""

PIECE = 16 << 20
"""Bytes of a tensor that are in memory at a time, where it is moved piece by piece."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple that is at least so many."""
    return -(-count // multiple) * multiple


def blocks(nbytes: int) -> int:
    """So many bytes, in whole pages: what they take in the store and in host buffers."""
    return round_up(nbytes, PAGE)


def pieces_of(elements: range, itemsize: int, nbytes: int = PIECE) -> list[range]:
    """Consecutive elements of so many bytes each, in parts of `nbytes` at most that windows may be over."""
    per_part = max(nbytes // itemsize // WINDOW_ALIGNMENT, 1) * WINDOW_ALIGNMENT
    return [elements[start : start + per_part] for start in range(0, len(elements), per_part)]


def in_words(nbytes: int) -> str:
    """`1536` -> "1.5 KiB"."""
    power = _power_of(nbytes)
    return f"{nbytes / 1024**power:,.1f} {_UNITS[power]}" if power else f"{nbytes} B"


def at_least(nbytes: int) -> str:
    """As options take it, with one decimal, rounded up: what is said to be needed is enough. `1537` -> "1.6KiB"."""
    power = _power_of(nbytes)
    tenths = -(-10 * nbytes // 1024**power)
    if tenths == 10 * 1024 and power < len(_UNITS) - 1:
        return f"1{_UNITS[power + 1]}"
    return _of_tenths(tenths, power)


def at_most(nbytes: int) -> str:
    """As options take it, with one decimal, rounded down: a budget that is below what `at_least` says is needed looks
    so. `1537` -> "1.5KiB"."""
    power = _power_of(nbytes)
    return _of_tenths(10 * nbytes // 1024**power, power)


def _power_of(nbytes: int) -> int:
    """The power of 1024 that is the unit: the largest one of which there is a whole one."""
    return next((p for p in reversed(range(len(_UNITS))) if nbytes >= 1024**p), 0)


def _of_tenths(tenths: int, power: int) -> str:
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth}{_UNITS[power]}" if tenth else f"{whole}{_UNITS[power]}"
