"""The engine beside fio: the same directory, the same number of bytes, taking turns; medians and their ratios.

    python benchmarks/io.py [--directory DIR] [--size 1GiB] [--rounds 5] [--final-rounds 15]

Heats find fio's best configuration for each direction: kernel AIO and io_uring, blocks of 1 and 4 MiB, several depths,
and memory in huge pages where the system has any reserved; `--reserve-huge-pages` reserves what that needs meanwhile
(as root). The ratios come from finals between the engine and that configuration alone: on a noisy disk the best of many
medians is a lucky one, and only new rounds are fair. The engine runs as the store uses it, with checksums and without.
The files are in scratch directories, which are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from zinf_fx.config import parse_bytes
from zinf_fx.errors import StoreError
from zinf_fx.machine import fio
from zinf_fx.native.engine import BLOCK, DEPTH
from zinf_fx.runtime.disk.measure import Operation, Rate, Trial

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
    parser.add_argument("--rounds", type=int, default=5, help="of the heats (default 5)")
    parser.add_argument("--final-rounds", type=int, default=15, help="between the engine and fio's best (default 15)")
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


def medians(
    field: list[Contender], directions: Sequence[Operation], rounds: int, quiet: bool
) -> dict[tuple[str, Operation], float]:
    """Return the median bytes per second by contender's name and direction; all take turns."""
    measured: dict[tuple[str, Operation], list[float]] = defaultdict(list)
    with tqdm(total=rounds * len(directions) * len(field), unit="run", disable=quiet or None) as bar:
        for turn in range(rounds):
            for direction in directions:
                for k in range(len(field)):
                    contender = field[(turn + k) % len(field)]  # nobody always comes after the same one
                    bar.set_description(f"{direction} {contender.name}"[:60])
                    measured[contender.name, direction].append(contender.run(direction).bytes_per_second)
                    bar.update()
    return {key: statistics.median(rates) for key, rates in measured.items()}


def measure(args: argparse.Namespace, nbytes: int) -> tuple[list[dict], list[dict]]:
    """Return the rows of the heats, and of the finals."""
    with contextlib.ExitStack() as undo:
        undo.enter_context(reserved_huge_pages(args.reserve_huge_pages))
        field = list(contenders(args, nbytes, undo))
        rates = medians(field, DIRECTIONS, args.rounds, args.json)
        heats = [{"who": c.name} | {f"{d} GiB/s": rates[c.name, d] / 2**30 for d in DIRECTIONS} for c in field]
        finals = []
        for direction in DIRECTIONS:
            best = max((c for c in field if not c.ours), key=lambda c: rates[c.name, direction])
            finalists = [c for c in field if c.ours] + [best]
            final = medians(finalists, [direction], args.final_rounds, args.json)
            finals += [
                {
                    "direction": direction,
                    "who": c.name,
                    "GiB/s": final[c.name, direction] / 2**30,
                    "ratio to fio": final[c.name, direction] / final[best.name, direction],
                }
                for c in finalists
            ]
    return heats, finals


def main() -> int:
    args = parse()
    if not fio.installed():
        print("fio is not installed: there is nothing to compare with (Debian: apt install fio)", file=sys.stderr)
        return 2
    nbytes = parse_bytes(args.size, "size")
    heats, finals = measure(args, nbytes)
    if args.json:
        print(json.dumps({"directory": str(args.directory), "bytes": nbytes, "heats": heats, "finals": finals}))
        return 0
    print(f"{args.directory}, {nbytes / 2**30:g} GiB, {os.cpu_count()} CPUs\n\nHeats, median of {args.rounds}")
    print(tabulate(heats, headers="keys", floatfmt=".2f"))
    print(f"\nFinals, median of {args.final_rounds}")
    print(tabulate(finals, headers="keys", floatfmt=".2f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
