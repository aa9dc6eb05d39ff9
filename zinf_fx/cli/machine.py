"""The hardware that a command is asked about, by name: a description, a file, or this machine, measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from zinf_fx.config import Config
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import THIS_MACHINE, Hardware
from zinf_fx.runtime.disk.scratch import make_default


def described(name: str) -> Callable[[], Hardware]:
    """Return a function that gives the description of a name. The description is read now, so that a wrong name is
    refused at once; this machine is measured at the first call. Raises: ConfigError for an unknown name."""
    if name == THIS_MACHINE:
        return cache(lambda: hardware_of(name))
    hardware = hardware_of(name)
    return lambda: hardware


def hardware_of(name: str, store: Path | None = None) -> Hardware:
    """Return a description by name. `store`: directory on the disk of this machine; default all of `Config`'s.

    Raises: ConfigError for an unknown name; StoreError when the disk can't be measured, or has no place for a store.
    """
    if name != THIS_MACHINE:
        return descriptions.load(name)
    stores = stores_in_use(store)
    print("zinf-fx: measuring this machine, which takes some seconds", file=sys.stderr)
    return measure_machine(*stores)


def stores_in_use(store: Path | None = None) -> tuple[Path, ...]:
    """Return the directories of a store, by default those of `Config`, and make its default one, as its first use
    would.

    Raises: StoreError when it can't be.
    """
    config = Config(store=store)
    make_default(config)
    return config.stores
