"""Seconds and memory of saving a training whose states are on disk, beside what the disk can do and beside torch.save.

    python benchmarks/checkpoint.py                                    # the 303 M-parameter GPT, minutes
    python benchmarks/checkpoint.py --layers 4 --hidden 256 --heads 4  # seconds

Each way is a process of its own, and a round has one of each, in turns: nothing saved; `zinf_fx.save_checkpoint`; and
`torch.save` of the state dicts, which is synced, too. A save reads what it writes: its rate counts both, as the
engine's does, which reads one half of a file while it writes the other, in the same directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tabulate import tabulate
from tqdm import tqdm
from train_step import machine

from zinf_fx.runtime.disk.measure import Trial
from zinf_fx.sizes import in_words

WAYS = ("nothing", "save_checkpoint", "torch.save")
WORKER = Path(__file__).with_name("checkpoint_worker.py")


def run(way: str, args: argparse.Namespace) -> dict:
    """The answer of a worker, and the engine's rate before it."""
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        store, target = folder / "store", folder / "target"
        store.mkdir()
        target.mkdir()
        with Trial(folder, nbytes=1 << 30, checksum=True) as trial:
            rate = trial.run("mixed").bytes_per_second
        model = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "context")}
        request = {"way": way, "model": model, "batch": args.batch, "steps": args.steps}
        request |= {"store": str(store), "target": str(target)}
        command = [sys.executable, str(WORKER), json.dumps(request)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{way} ended with status {done.returncode}:\n{done.stderr.strip()}")
        return {**json.loads(done.stdout.splitlines()[-1]), "rate": rate}
    finally:
        shutil.rmtree(folder)


def rows(rounds: Sequence[dict[str, dict]]) -> list[list[str]]:
    found = []
    for way in WAYS:
        answers = [one[way] for one in rounds]
        steps = median(second for one in answers for second in one["steps"])
        ratio = median(median(one[way]["steps"]) / median(one["nothing"]["steps"]) for one in rounds)
        more = median(one[way]["peak"] - one["nothing"]["peak"] for one in rounds)
        cells = [way, f"{steps:.1f}", f"{ratio:.2f}"]
        if way == "nothing":
            found.append([*cells, "", "", "", in_words(median(one["peak"] for one in answers)), "", ""])
            continue
        saves = median(second for one in answers for second in one["saves"])
        of_rate = median(2 * one["nbytes"] / median(one["saves"]) / one["rate"] for one in answers)
        loads = [second for one in answers for second in one["loads"]]
        cells += [f"{saves:.1f}", in_words(answers[0]["nbytes"]), f"{of_rate:.2f}"]
        cells += [in_words(round(median(one["peak"] for one in answers))), f"{more / 2**20:+,.0f} MiB"]
        found.append([*cells, f"{median(loads):.1f}" if loads else ""])
    return found


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="each followed by a save")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for stores and checkpoints, in place of /tmp")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    rounds: list[dict[str, dict]] = []
    with tqdm(total=args.rounds * len(WAYS), unit="run", disable=not sys.stderr.isatty()) as bar:
        for number in range(args.rounds):
            rounds.append({})
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                bar.set_postfix_str(way)
                rounds[-1][way] = run(way, args)
                bar.update()
    first = rounds[0]["nothing"]
    rate = median(one["rate"] for each in rounds for one in each.values())
    print(f"{machine()}; {first['parameters']:,} parameters, bf16 with fp32 masters and moments, all on disk")
    print(f"the engine reads and writes {in_words(round(rate))}/s together in this directory, with checksums\n")
    headers = [
        "saved by",
        "s/step",
        "/ plain",
        "s/save",
        "bytes",
        "of the engine's rate",
        "peak resident",
        "more",
        "s/load",
    ]
    print(tabulate(rows(rounds), headers, tablefmt="simple", disable_numparse=True, colalign=["left"] + ["right"] * 8))
    return 0


if __name__ == "__main__":
    sys.exit(main())
