"""Faults in the engine: of transfers, and of setting it up."""

from __future__ import annotations

from dataclasses import dataclass

from zinf_fx.native._engine import ffi, lib

from zinf_fx.native.engine import Engine
from zinf_fx.runtime.disk.store import Store


@dataclass(frozen=True)
class Fault:
    """What is to go wrong; see `zinf_fault` in engine.h. It hits blocks nth .. nth + count - 1, counted from 1.

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


def inject(target: Engine | Store, fault: Fault) -> None:
    """Arms a fault in an engine, or in every engine of a store. At most 16 are armed at a time."""
    raw = {
        "stage": getattr(lib, f"ZINF_{fault.stage.upper()}"),
        "operation": getattr(lib, f"ZINF_{fault.operation.upper()}"),
        "nth": fault.nth,
        "count": fault.count,
        "error": fault.errno,
        "length": fault.length,
        "delay_ns": int(fault.delay * 1e9),
    }
    for engine in _engines(target):
        assert lib.zinf_inject(engine._open(), ffi.new("zinf_fault *", raw)) == 0, f"{fault} can't be injected"


def clear_faults(target: Engine | Store) -> None:
    """Disarms every fault."""
    for engine in _engines(target):
        lib.zinf_inject(engine._open(), ffi.NULL)


def _engines(target: Engine | Store) -> list[Engine]:
    return [target] if isinstance(target, Engine) else list(target._resources.engines.values())


def inject_setup_fault(nth: int, error: int) -> int:
    """Lets the nth set-up call (from 1) of engines opened from now on fail with `error`. nth 0: none.

    Returns the number of set-up calls since it was last called.
    """
    return lib.zinf_inject_setup(nth, error)
