"""The engine beside fio: the same directory, the same number of bytes, taking turns; medians and their ratios.

    python benchmarks/io.py [--directory DIR] [--size 1GiB] [--rounds 5]

The files are in scratch directories, which are removed at the end. fio's figure is the best median of several
configurations: kernel AIO and io_uring, blocks of 1 and 4 MiB, several depths, and memory in huge pages where the
system has any reserved; `--reserve-huge-pages` reserves what that needs meanwhile (as root). The engine runs as the
store uses it, with checksums and without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from zinf_fx.config import parse_bytes
from zinf_fx.errors import StoreError
from zinf_fx.native.engine import BLOCK, DEPTH
from zinf_fx.runtime import fio
from zinf_fx.runtime.measure import Operation, Rate, Trial

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
DIRECTIONS: tuple[Operation, ...] = ("read", "write")
FIO_SHAPES = [
    fio.Shape(engine, block, depth, huge)
    for engine in ("libaio", "io_uring")
    for block, depth in ((1 << 20, 8), (1 << 20, 32), (4 << 20, 8))
    for huge in (False, True)
]


@dataclass
class Contender:
    """Somebody to measure. `run` moves the bytes once."""

    name: str
    ours: bool
    checksum: bool
    run: Callable[[Operation], Rate]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size", default="1GiB", help="bytes of a file, and of one run (default 1GiB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all-shapes", action="store_true", help="also other block sizes and depths of the engine")
    parser.add_argument("--reserve-huge-pages", action="store_true", help="for fio, while this runs; needs root")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


@contextlib.contextmanager
def reserved_huge_pages(wanted: bool) -> Iterator[None]:
    """As many as the largest configuration of fio needs."""
    if not wanted:
        yield
        return
    before = HUGE_PAGES.read_text()
    HUGE_PAGES.write_text(str(int(before) + 2 * max(shape.huge_pages_needed for shape in FIO_SHAPES)))
    try:
        yield
    finally:
        HUGE_PAGES.write_text(before)


def contenders(args: argparse.Namespace, nbytes: int, undo: contextlib.ExitStack) -> Iterator[Contender]:
    shapes = [(BLOCK, DEPTH)]
    if args.all_shapes:
        shapes += [(1 << 20, 8), (1 << 20, 32), (2 << 20, 16), (4 << 20, 8), (8 << 20, 8)]
    trials = [
        undo.enter_context(Trial(args.directory, nbytes=nbytes, block=block, depth=depth, checksum=checksum))
        for block, depth in shapes
        for checksum in (False, True)
    ]
    for trial, ((block, depth), checksum) in zip(trials, [(s, c) for s in shapes for c in (False, True)], strict=True):
        name = f"zinf_fx {trial.provider}, {block >> 10} KiB x {depth}{', checksums' if checksum else ''}"
        yield Contender(name, True, checksum, trial.run)
    path = trials[0].path  # fio measures on the first file: it has been written, and nobody compares its checksums
    for shape in FIO_SHAPES:
        if not shape.possible:
            print(f"left out: {shape} needs {shape.huge_pages_needed} reserved huge pages", file=sys.stderr)
            continue
        try:
            fio.run(path, "read", shape, nbytes)
        except StoreError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        yield Contender(str(shape), False, False, lambda op, shape=shape: fio.run(path, op, shape, nbytes))


def measure(args: argparse.Namespace, nbytes: int) -> list[tuple[Contender, dict[Operation, float]]]:
    """Each contender's median rate in bytes per second."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(reserved_huge_pages(args.reserve_huge_pages))
        field = list(contenders(args, nbytes, undo))
        found: dict[int, dict[Operation, list[float]]] = {i: {d: [] for d in DIRECTIONS} for i in range(len(field))}
        with tqdm(total=args.rounds * len(DIRECTIONS) * len(field), unit="run", disable=args.json) as bar:
            for turn in range(args.rounds):
                for direction in DIRECTIONS:
                    for k in range(len(field)):
                        i = (turn + k) % len(field)  # nobody always comes after the same one
                        contender = field[i]
                        bar.set_description(f"{direction} {contender.name}"[:60])
                        found[i][direction].append(contender.run(direction).bytes_per_second)
                        bar.update()
    return [(c, {d: statistics.median(rates) for d, rates in found[i].items()}) for i, c in enumerate(field)]


def main() -> int:
    args = parse()
    if not fio.installed():
        print("fio is not installed: there is nothing to compare with (Debian: apt install fio)", file=sys.stderr)
        return 2
    nbytes = parse_bytes(args.size, "size")
    results = measure(args, nbytes)
    best = {d: max((rates[d], c.name) for c, rates in results if not c.ours) for d in DIRECTIONS}
    rows = [
        {"who": c.name}
        | {f"{d} GiB/s": rates[d] / 2**30 for d in DIRECTIONS}
        | {f"{d} / best fio": rates[d] / best[d][0] for d in DIRECTIONS}
        for c, rates in results
    ]
    if args.json:
        print(json.dumps({"directory": str(args.directory), "bytes": nbytes, "rounds": args.rounds, "results": rows}))
        return 0
    print(f"{args.directory}, {nbytes / 2**30:g} GiB, median of {args.rounds}, {os.cpu_count()} CPUs")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    for d in DIRECTIONS:
        print(f"best fio {d}: {best[d][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
