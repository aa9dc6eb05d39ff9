"""Seconds, bytes and memory of saving a training whose states are on disk, beside what the disk can do and torch.save.

    python benchmarks/checkpoint.py                                    # the 303 M-parameter GPT, minutes
    python benchmarks/checkpoint.py --layers 4 --hidden 256 --heads 4  # seconds

Each way is a process of its own, and a round has one of each, in turns: nothing saved; a `CheckpointManager` that keeps
the last one, by generations; one that copies in the background, as to another file system (`--other DIR`: to that one);
`zinf_fx.save_checkpoint` by copying there; and `torch.save` of the state dicts, which is synced, too. A process has
blocks of steps alone and of steps that are each followed by a save, in turns. Each of the latter is compared with the
mean of those before and behind it, so that it makes no difference if the machine becomes slower, and the median is
printed; where nothing is saved, that is how much blocks differ by themselves. One copy goes on in the background, and
the steps are those meanwhile. Then there are saves while nothing else runs: what the one before replaced was given back
to the disk. One that copies reads what it writes: its rate counts both, as the engine's does, which copies a file in
the same directory to a new one that replaces another. That is measured before and after each of these saves, and their
median in proportion to it is printed. What a process's memory grows by, from its first steps on, is compared with that
of one that saves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
from arguments import add_gpt
from checkpoint_worker import IDLE
from tabulate import tabulate
from tqdm import tqdm
from train_step import machine
from turns import in_turns

from zinf_fx.checkpoint.files import FILES, opened
from zinf_fx.native.engine import BLOCK, DEPTH, READ, WRITE, File, FileTicket
from zinf_fx.runtime.memory.host import aligned_empty
from zinf_fx.sizes import in_words

WAYS = ("nothing", "generations", "behind", "copies", "torch.save")
FEWER_BLOCKS = {"behind": 2, "copies": 1, "torch.save": 1}  # at most: they take minutes
WORKER = Path(__file__).with_name("checkpoint_worker.py")
HEADERS = (
    "saved as",
    "steps",
    "s/step",
    "/ plain",
    "moved more",
    "s/save",
    "bytes",
    "of the engine's rate",
    "peak resident",
    "more",
    "s/load",
)

Rounds = Sequence[dict[str, dict]]


def rate_of_copies(folder: Path, nbytes: int = 2 << 30) -> float:
    """Return the bytes per second that the engine reads and writes together, when it copies a file to a new one: as a
    save does, once there is one that it replaces. Many file systems overwrite faster than they write what is new."""
    paths = [folder / name for name in ("old", "new")]
    memory = aligned_empty(2 * DEPTH * BLOCK).random_(0, 256).split(BLOCK)
    for path in paths:
        fd = FILES.create(path)
        FILES.reserve(fd, nbytes)
        os.close(fd)
    with opened(paths, FILES) as (old, new):
        _moved(memory, ((WRITE, old, offset) for offset in range(0, nbytes, BLOCK)))
        started = time.perf_counter()
        both = ((READ, old), (WRITE, new))
        _moved(memory, ((kind, file, offset) for offset in range(0, nbytes, BLOCK) for kind, file in both))
    seconds = time.perf_counter() - started
    for path in paths:
        path.unlink()
    return 2 * nbytes / seconds


def _moved(memory: Sequence[torch.Tensor], requests: Iterable[tuple[int, File, int]]) -> None:
    """Move a block for each request: as many are under way at a time as there are blocks of memory."""
    under_way: deque[FileTicket] = deque()
    for number, (kind, file, offset) in enumerate(requests):
        if len(under_way) == len(memory):
            under_way.popleft().wait()
        block = memory[number % len(memory)]
        under_way.append(file.submit(kind, block.data_ptr(), offset, BLOCK, block))
    for ticket in under_way:
        ticket.wait()


def run(way: str, args: argparse.Namespace) -> dict:
    """Return the answer of a worker, and the engine's rates before and after each of its saves while nothing else
    runs."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    target = Path(tempfile.mkdtemp(dir=args.other if way in ("behind", "copies") and args.other else folder))
    try:
        store = folder / "store"
        store.mkdir()
        model = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "context")}
        request = {"way": way, "model": model, "batch": args.batch}
        blocks = min(args.blocks, FEWER_BLOCKS.get(way, args.blocks))
        request |= {"steps": args.steps, "blocks": blocks, "saves": args.saves if way != "torch.save" else 1}
        request |= {"store": str(store), "target": str(target)}
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, str(WORKER), json.dumps(request)]
            streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
            answer, rates = "", []
            with subprocess.Popen(command, **streams) as worker:
                for answer in worker.stdout:
                    if answer == IDLE:
                        rates.append(rate_of_copies(target))
                        print(file=worker.stdin, flush=True)
            if worker.returncode:
                errors.seek(0)
                raise RuntimeError(f"{way} ended with status {worker.returncode}:\n{errors.read().strip()}")
        return {**json.loads(answer), "rates": rates}
    finally:
        shutil.rmtree(target)
        shutil.rmtree(folder, ignore_errors=target.is_relative_to(folder))


def over_plain(rounds: Rounds, way: str) -> float:
    """Return how many times as long a step with a save takes as one without, in the same process."""
    return median(saving / plain for plain, saving in _compared(rounds, way, "step"))


def moved_more(rounds: Rounds, way: str, what: str) -> float:
    """Return how many more bytes a step with a save moves than one without. `what`: "read" or "written"."""
    return median(saving - plain for plain, saving in _compared(rounds, way, what))


def _compared(rounds: Rounds, way: str, what: str) -> list[tuple[float, float]]:
    """Return pairs of `what` of a step: the mean of the plain blocks around a block with saves, and that of the block
    itself."""
    compared = []
    for answer in (by_way[way] for by_way in rounds):
        around = pairwise(block[what] for block in answer["plain"])
        compared += [(mean(pair), block[what]) for pair, block in zip(around, answer["saving"], strict=True)]
    return compared


def grown(rounds: Rounds, way: str) -> float:
    """Return by how many bytes the peak of memory grows more than with steps alone."""
    return median(by_way[way]["grown"] - by_way["nothing"]["grown"] for by_way in rounds)


def of_rate(rounds: Rounds, way: str) -> float:
    """Return the share of the engine's rate around it that a save reaches which reads and writes all bytes."""
    shares = []
    for answer in (by_way[way] for by_way in rounds):
        rates = [mean(pair) for pair in pairwise(answer["rates"])]
        shares += [2 * answer["nbytes"] / seconds / rate for seconds, rate in zip(answer["saves"], rates, strict=True)]
    return median(shares)


def rows(rounds: Rounds) -> list[list[str]]:
    table = []
    for way in rounds[0]:
        answers = [by_way[way] for by_way in rounds]
        blocks = [block for answer in answers for block in answer["saving"]]
        seconds = median(block["step"] for block in blocks)
        steps = median(block["steps"] for block in blocks)
        cells = [way, f"{steps:g}", f"{seconds:.2f}", f"{over_plain(rounds, way):.3f}"]
        peak = in_words(round(median(answer["peak"] for answer in answers)))
        if way == "nothing":
            table.append([*cells, "", "", "", "", peak, "", ""])
            continue
        saves = median(second for answer in answers for second in answer["saves"])
        loads = [second for answer in answers for second in answer["loads"]]
        rate = "" if way == "generations" else f"{of_rate(rounds, way):.2f}"
        moved = moved_more(rounds, way, "read") + moved_more(rounds, way, "written")
        cells += [f"{moved / 2**20:+,.0f} MiB", f"{saves:.2f}", in_words(answers[0]["nbytes"]), rate]
        cells += [peak, f"{grown(rounds, way) / 2**20:+,.0f} MiB" if "nothing" in rounds[0] else ""]
        table.append([*cells, f"{median(loads):.1f}" if loads else ""])
    return table


def verdicts(rounds: Rounds) -> list[str]:
    """Return a line for each bound: what was measured, and whether it keeps to it."""

    def written_more(rounds: Rounds, way: str) -> float:
        return moved_more(rounds, way, "written")

    def grown_mebibytes(rounds: Rounds, way: str) -> float:
        return grown(rounds, way) / 2**20

    more = "MiB of memory more, at most"
    asked = [
        ("generations", "a step with a save / a plain one", over_plain, "<=", 1.05),
        ("generations", "bytes written more per step", written_more, "<=", 0),
        ("generations", more, grown_mebibytes, "<=", 64),
        ("behind", "a step while it is copied / a plain one", over_plain, "<=", 1.15),
        ("behind", more, grown_mebibytes, "<=", 64),
        ("copies", "of the engine's rate when nothing else runs", of_rate, ">=", 0.9),
        ("copies", more, grown_mebibytes, "<=", 64),
    ]
    lines = []
    for way, what, measured, sign, bound in asked:
        if way in rounds[0] and not (what == more and "nothing" not in rounds[0]):
            value = measured(rounds, way)
            is_met = value <= bound if sign == "<=" else value >= bound
            lines.append(f"{way}: {what}: {value:.3g}, {'as' if is_met else 'NOT'} {sign} {bound:g}")
    return lines


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_gpt(parser, context=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of a block, each followed by a save")
    parser.add_argument("--blocks", type=int, default=6, help="with saves, and as many without; of the slow ways fewer")
    parser.add_argument("--saves", type=int, default=5, help="after the steps, while nothing else runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="some of those above, in place of all")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for stores and checkpoints, in place of /tmp")
    parser.add_argument("--other", type=Path, metavar="DIR", help="for copies, on another file system")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    rounds: list[dict[str, dict]] = [{} for _ in range(args.rounds)]
    with tqdm(total=args.rounds * len(args.ways), unit="run", disable=not sys.stderr.isatty()) as bar:
        for number, way in in_turns(args.ways, args.rounds):
            bar.set_postfix_str(way)
            rounds[number][way] = run(way, args)
            bar.update()
    first = rounds[0][args.ways[0]]
    print(f"{machine()}; {first['parameters']:,} parameters, bf16 with fp32 masters and moments, all on disk")
    if rates := [rate for by_way in rounds for answer in by_way.values() for rate in answer["rates"]]:
        together = in_words(round(median(rates)))
        print(f"the engine reads and writes {together}/s together when it copies a file in this directory")
    print()
    align = ["left"] + ["right"] * (len(HEADERS) - 1)
    print(tabulate(rows(rounds), HEADERS, tablefmt="simple", disable_numparse=True, colalign=align))
    print("\n" + "\n".join(verdicts(rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
