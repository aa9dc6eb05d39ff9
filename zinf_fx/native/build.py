"""Builds the native engine with nothing but a C compiler and the kernel's headers."""

from __future__ import annotations

from pathlib import Path

from cffi import FFI

HERE = Path("zinf_fx/native")  # setuptools wants paths relative to setup.py
SOURCES = ("engine.c", "requests.c", "io_thread.c", "faults.c", "provider_aio.c", "provider_threads.c")
HEADERS = ("engine.h", "state.h", "faults.h", "provider.h")


def declarations() -> str:
    """The part of engine.h that Python sees: its declarations exist once."""
    text = (Path(__file__).resolve().parent / "engine.h").read_text()
    begin = text.index("*/", text.index("/* cdef begin")) + 2
    return text[begin : text.index("/* cdef end")].replace("(-1)", "-1")


builder = FFI()
builder.cdef(declarations())
builder.set_source(
    "zinf_fx.native._engine",
    '#include "engine.h"',
    sources=[str(HERE / name) for name in SOURCES],
    depends=[str(HERE / name) for name in HEADERS],
    include_dirs=[str(HERE)],
    libraries=["dl", "pthread"],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra"],
)

if __name__ == "__main__":
    builder.compile(verbose=True)
