"""Builds the native engine with nothing but a C compiler and the kernel's headers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cffi import FFI

HERE = Path("zinf_fx/native")  # setuptools wants paths relative to setup.py
FOLDER = Path(__file__).resolve().parent
SOURCES, HEADERS = ([path.name for path in sorted(FOLDER.glob(f"[!_]*.{kind}"))] for kind in "ch")
SEEN_BY_PYTHON = ("codes.h", "update.h", "masters.h", "folding.h", "checksum.h", "engine.h")


def declarations(headers: Iterable[Path] = tuple(FOLDER / name for name in SEEN_BY_PYTHON)) -> str:
    """The parts of the headers that Python sees: declarations exist once."""
    parts = []
    for header in headers:
        text = header.read_text()
        begin = text.index("*/", text.index("/* cdef begin")) + 2
        parts.append(text[begin : text.index("/* cdef end")])
    return "".join(parts)


builder = FFI()
builder.cdef(declarations())
builder.set_source(
    "zinf_fx.native._engine",
    "".join(f'#include "{header}"\n' for header in SEEN_BY_PYTHON),
    sources=[str(HERE / name) for name in SOURCES],
    depends=[str(HERE / name) for name in HEADERS],
    include_dirs=[str(HERE)],
    libraries=["dl", "m", "pthread"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    builder.compile(verbose=True)
