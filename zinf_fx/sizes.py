"""Bytes in words."""

from __future__ import annotations


def in_words(nbytes: int) -> str:
    """`1536` -> "1.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
