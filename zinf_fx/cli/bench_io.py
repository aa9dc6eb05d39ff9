"""`zinf-fx bench-io DIR...`: what the engine moves in a directory, beside fio, and the profile for plans."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from zinf_fx.config import parse_bytes
from zinf_fx.errors import ConfigError, StoreError
from zinf_fx.machine import fio
from zinf_fx.native.engine import BLOCK, DEPTH, is_direct, provider_names
from zinf_fx.runtime.disk.filesystem import file_system_of
from zinf_fx.runtime.disk.measure import OPERATIONS, Operation, Profile, Rate, Trial, store_profile

SHAPES = ((BLOCK, DEPTH), (BLOCK, 8), (1 << 20, 32))
FIO_SHAPES = tuple(
    fio.Shape(engine, block, depth, huge_pages)
    for engine in ("libaio", "io_uring")
    for block, depth in ((1 << 20, 32), (4 << 20, 8))
    for huge_pages in (False, True)
)


@dataclass(frozen=True)
class Way:
    """The median rates of one way to move bytes, in bytes per second."""

    directory: str
    by: str
    block: int
    depth: int
    rates: dict[Operation, float]


def run(options: argparse.Namespace) -> None:
    """Measure and print. Raises: StoreError for a directory that can't be used."""
    nbytes = parse_bytes(options.size, "size")
    if options.rounds < 1:
        raise ConfigError(f"rounds={options.rounds} is not accepted: at least one is needed")
    for directory in options.directories:
        # What can't be used is refused once, and not by each way to move bytes.
        file_system_of(directory)
        if not directory.is_dir():
            raise StoreError("measure", directory, "it is no directory; name the one that a store is to be in")
    report = {}
    for directory in options.directories:
        ways, profiles = _measure(directory, nbytes, options)
        # The page cache counts only where there is no direct I/O.
        direct = [profile for profile in profiles if is_direct(profile.provider)]
        best = max(direct or profiles, key=lambda profile: profile.weight)
        stored = None if options.no_store else store_profile(directory, best)
        report[str(directory)] = {"profile": asdict(best), "rows": [asdict(way) for way in ways]}
        if not options.json:
            _print(directory, ways, best, stored)
    if options.json:
        print(json.dumps(report, indent=1))


def _measure(directory: Path, nbytes: int, options: argparse.Namespace) -> tuple[list[Way], list[Profile]]:
    """The rates of the engine's ways, and fio's where it is installed; and what the engine's are as profiles."""
    providers = provider_names() if options.provider == "all" else (options.provider,)
    fio_shapes = [shape for shape in FIO_SHAPES if fio.installed() and shape.possible]
    steps = len(OPERATIONS) * options.rounds
    total = steps * (len(providers) * len(SHAPES) + len(fio_shapes))
    ways: list[Way] = []
    profiles: list[Profile] = []
    with tqdm(total=total, unit="run", disable=options.json, file=sys.stderr, leave=False) as bar:
        for provider, (block, depth) in product(providers, SHAPES):
            bar.set_description(f"{provider} {block >> 10} KiB x {depth}")
            with (
                _left_out(bar, steps) if len(providers) > 1 else nullcontext(),
                Trial(directory, provider=provider, nbytes=nbytes, block=block, depth=depth) as trial,
            ):
                rates = _medians(trial.run, options.rounds, bar)
                profiles.append(Profile(**rates, provider=provider, depth=depth, block=block, measured_at=time.time()))
                cache = "" if is_direct(provider) else " (page cache)"
                ways.append(Way(str(directory), f"zinf_fx {provider}{cache}", block, depth, rates))
        if not profiles:
            raise StoreError("measure", directory, "no provider works here")
        with Trial(directory, nbytes=nbytes) if fio_shapes else nullcontext() as trial:
            for shape in fio_shapes:
                assert trial is not None
                bar.set_description(str(shape))
                with _left_out(bar, steps):
                    run_once = partial(fio.run, trial.path, shape=shape, nbytes=trial.nbytes)
                    rates = _medians(run_once, options.rounds, bar)
                    pages = ", huge pages" if shape.huge_pages else ""
                    ways.append(Way(str(directory), f"fio {shape.engine}{pages}", shape.block, shape.depth, rates))
    return ways, profiles


@contextmanager
def _left_out(bar: tqdm, steps: int) -> Iterator[None]:
    """Open a block that measures a way to move bytes in so many steps. If it doesn't work here, it is left out, with a
    message."""
    try:
        yield
    except StoreError as error:
        bar.write(f"left out: {error}", file=sys.stderr)
        bar.update(steps)


def _medians(run_once: Callable[[Operation], Rate], rounds: int, bar: tqdm) -> dict[Operation, float]:
    rates: dict[Operation, list[float]] = {operation: [] for operation in OPERATIONS}
    for operation, _ in product(OPERATIONS, range(rounds)):
        rates[operation].append(run_once(operation).bytes_per_second)
        bar.update()
    return {operation: statistics.median(measured) for operation, measured in rates.items()}


def _print(directory: Path, ways: list[Way], profile: Profile, stored: Path | None) -> None:
    file_system = file_system_of(directory)
    print(f"{directory}: {file_system.kind} on {file_system.source}, medians in GiB/s")
    table = [
        {"by": way.by, "block": f"{way.block >> 10} KiB", "depth": way.depth}
        | {operation: rate / 2**30 for operation, rate in way.rates.items()}
        for way in ways
    ]
    print(tabulate(table, headers="keys", floatfmt=".2f"))
    print(f"best: {profile.provider}, {profile.block >> 10} KiB x {profile.depth}")
    if stored is not None:
        print(f"profile stored in {stored}")
