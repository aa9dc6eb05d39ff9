"""Faults of transfers, and of setting an engine up, for engines that are opened after this is imported."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cffi import FFI

from zinf_fx.native import _engine
from zinf_fx.native.build import FOLDER, declarations
from zinf_fx.native.engine import Engine
from zinf_fx.runtime.disk.store import Store

HEADER, SOURCE = (Path(__file__).parent / "native" / f"faults.{kind}" for kind in "hc")

ffi = FFI()
ffi.cdef("typedef struct zinf_engine zinf_engine;" + declarations([HEADER]))


def _providers_that_fail() -> FFI.CData:
    """They are built against the engine that is loaded already, and so change the table of that one."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "faults.so"
        options = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{FOLDER}"]
        subprocess.run(["cc", *options, SOURCE, _engine.__file__, "-o", built], check=True)
        loaded = ffi.dlopen(str(built))
    loaded.zinf_faults_install()
    return loaded


lib = _providers_that_fail()


@dataclass(frozen=True)
class Fault:
    """What is to go wrong; see `zinf_fault` in faults.h. It hits blocks nth .. nth + count - 1, counted from 1.

    Attributes:
        stage: "submission" or "completion".
        operation: "read", "write" or "any".
        errno: the error that the submission or the completion reports; 0 for none.
        length: bytes that are submitted, or that the completion reports, so that the transfer is short.
        delay: seconds by which the submission is made, or the completion seen, late.
    """

    stage: str
    nth: int = 1
    count: int = 1
    operation: str = "any"
    errno: int = 0
    length: int = 0
    delay: float = 0.0


OPERATIONS = {"read": _engine.lib.ZINF_READ, "write": _engine.lib.ZINF_WRITE, "any": lib.ZINF_ANY}


def inject(target: Engine | Store, fault: Fault) -> None:
    """Arm a fault in an engine, or in every engine of a store. At most 16 are armed at a time."""
    raw = {
        "stage": getattr(lib, f"ZINF_{fault.stage.upper()}"),
        "operation": OPERATIONS[fault.operation],
        "nth": fault.nth,
        "count": fault.count,
        "error": fault.errno,
        "length": fault.length,
        "delay_ns": int(fault.delay * 1e9),
    }
    for engine in _engines(target):
        assert lib.zinf_faults_inject(engine, ffi.new("zinf_fault *", raw)) == 0, f"{fault} can't be injected"


def clear_faults(target: Engine | Store) -> None:
    """Disarm every fault."""
    for engine in _engines(target):
        lib.zinf_faults_inject(engine, ffi.NULL)


def faults_fired(target: Engine | Store) -> int:
    """Return how many blocks were hit so far."""
    return sum(lib.zinf_faults_fired(engine) for engine in _engines(target))


def _engines(target: Engine | Store) -> Iterator[FFI.CData]:
    """Yield the engines as the providers that fail know them."""
    engines = [target] if isinstance(target, Engine) else target._resources.engines.values()
    for engine in engines:
        yield ffi.cast("zinf_engine *", int(_engine.ffi.cast("intptr_t", engine._open())))


def inject_setup_fault(nth: int, error: int) -> int:
    """Lets the nth set-up call (from 1) of engines opened from now on fail with `error`. nth 0: none.

    Returns the number of set-up calls since it was last called.
    """
    return lib.zinf_faults_set_up(nth, error)
