"""`zinf-fx bench-io DIR...`: what the engine moves in a directory, beside fio, and the profile for plans."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
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
class Row:
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
    report = {}
    for directory in options.directories:
        rows = list(_rows(directory, nbytes, options))
        profile = _profile(rows)
        stored = None if options.no_store else store_profile(directory, profile)
        report[str(directory)] = {"profile": asdict(profile), "rows": [asdict(row) for row in rows]}
        if not options.json:
            _print(directory, rows, profile, stored)
    if options.json:
        print(json.dumps(report, indent=1))


def _rows(directory: Path, nbytes: int, options: argparse.Namespace) -> Iterator[Row]:
    providers = provider_names() if options.provider == "all" else (options.provider,)
    steps = len(OPERATIONS) * options.rounds
    fio_shapes = [one for one in FIO_SHAPES if fio.installed() and one.possible]
    total = steps * (len(providers) * len(SHAPES) + len(fio_shapes))
    found = 0
    with tqdm(total=total, unit="run", disable=options.json, file=sys.stderr, leave=False) as bar:
        for provider in providers:
            for block, depth in SHAPES:
                bar.set_description(f"{provider} {block >> 10} KiB x {depth}")
                try:
                    with Trial(directory, provider=provider, nbytes=nbytes, block=block, depth=depth) as trial:
                        rates = {
                            one: _median(lambda one=one: trial.run(one), options.rounds, bar) for one in OPERATIONS
                        }
                except StoreError as error:
                    if len(providers) == 1:
                        raise
                    bar.write(f"left out: {error}", file=sys.stderr)
                    bar.update(steps)
                    continue
                found += 1
                cache = "" if is_direct(provider) else " (page cache)"
                yield Row(str(directory), f"zinf_fx {provider}{cache}", block, depth, rates)
        if not found:
            raise StoreError("measure", directory, "no provider works here")
        if fio_shapes:
            yield from _fio_rows(directory, nbytes, fio_shapes, options.rounds, bar)


def _fio_rows(directory: Path, nbytes: int, shapes: list[fio.Shape], rounds: int, bar: tqdm) -> Iterator[Row]:
    with Trial(directory, nbytes=nbytes) as trial:
        for shape in shapes:
            bar.set_description(str(shape))
            try:
                run_once = functools.partial(fio.run, trial.path, shape=shape, nbytes=trial.nbytes)
                rates = {one: _median(functools.partial(run_once, one), rounds, bar) for one in OPERATIONS}
            except StoreError as error:
                bar.write(f"left out: {error}", file=sys.stderr)
                bar.update(len(OPERATIONS) * rounds)
                continue
            pages = ", huge pages" if shape.huge_pages else ""
            yield Row(str(directory), f"fio {shape.engine}{pages}", shape.block, shape.depth, rates)


def _median(run_once: Callable[[], Rate], rounds: int, bar: tqdm) -> float:
    rates = []
    for _ in range(rounds):
        rates.append(run_once().bytes_per_second)
        bar.update()
    return statistics.median(rates)


def _profile(rows: list[Row]) -> Profile:
    """The engine's best way, by reads and writes alike. The page cache counts only where there is no direct I/O."""
    ours = [row for row in rows if row.by.startswith("zinf_fx")]
    best = max(
        [row for row in ours if is_direct(row.by.split()[1])] or ours,
        key=lambda row: 1 / (1 / row.rates["read"] + 1 / row.rates["write"]),
    )
    return Profile(
        read=best.rates["read"],
        write=best.rates["write"],
        mixed=best.rates["mixed"],
        provider=best.by.split()[1],
        depth=best.depth,
        block=best.block,
        measured_at=time.time(),
    )


def _print(directory: Path, rows: list[Row], profile: Profile, stored: Path | None) -> None:
    file_system = file_system_of(directory)
    print(f"{directory}: {file_system.kind} on {file_system.source}, medians in GiB/s")
    table = [
        {"by": row.by, "block": f"{row.block >> 10} KiB", "depth": row.depth}
        | {operation: rate / 2**30 for operation, rate in row.rates.items()}
        for row in rows
    ]
    print(tabulate(table, headers="keys", floatfmt=".2f"))
    print(f"best: {profile.provider}, {profile.block >> 10} KiB x {profile.depth}")
    if stored is not None:
        print(f"profile stored in {stored}")
