"""A step of adapters over a frozen base: in memory in bf16, and from disk in each format.

    python benchmarks/frozen.py                                       # 1.2 B parameters in bf16; minutes
    python benchmarks/frozen.py --layers 4 --hidden 256 --heads 4     # seconds
    python benchmarks/frozen.py --batch 1 --context 64 --formats nf4  # few tokens: dequantisation and the disk show

Every row is a process of its own, and takes its turn in each round: ratios are taken within a round. `memory` is plain
PyTorch (eager), whose base is bf16. The limit is the larger of its seconds and of those in which the engine reads the
bytes of the step; read are a step's bytes, as planned and as counted. Peaks are of resident memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from arguments import add_gpt
from processes import answer_of
from tabulate import tabulate
from tqdm import tqdm
from train_step import machine
from turns import in_turns

from zinf_fx.runtime.disk.measure import Trial
from zinf_fx.sizes import in_words

WORKER = Path(__file__).with_name("frozen_worker.py")
FORMATS = ("nf4", "mxfp4", "int8", "fp8", "fp8_block", "bf16")
HEADERS = ("base", "s/step", "/ memory", "limit / step", "read, planned", "counted", "peak", "/ memory")


def rows(rounds: Sequence[dict[str, dict]], rate: float) -> list[list[str]]:
    """Return the rows of the table. `rate`: the bytes per second at which the engine reads."""
    table = []
    for base in rounds[0]:
        answers = [by_base[base] for by_base in rounds]
        ratio = median(by_base[base]["step"] / by_base["memory"]["step"] for by_base in rounds)
        limits = [
            max(by_base["memory"]["step"], by_base[base]["read"] / rate) / by_base[base]["step"] for by_base in rounds
        ]
        peak = median(answer["peak"] for answer in answers)
        of_memory = peak / median(by_base["memory"]["peak"] for by_base in rounds)
        disk = ["", "", ""]
        if base != "memory":
            disk = [f"{median(limits):.2f}", *(in_words(round(answers[-1][name])) for name in ("planned", "read"))]
        cells = [base, f"{median(answer['step'] for answer in answers):.2f}", f"{ratio:.2f}", *disk]
        table.append([*cells, in_words(round(peak)), f"{of_memory:.2f}"])
    return table


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_gpt(parser, context=256, hidden=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["nf4", "int8", "bf16"])
    parser.add_argument("--activations", default="keep")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured in each process, after two")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    model = {name: getattr(args, name) for name in ("layers", "hidden", "heads", "context")}
    request = {"model": model} | {name: getattr(args, name) for name in ("batch", "rank", "activations", "steps")}
    bases = ["memory", *args.formats]
    rounds: list[dict[str, dict]] = [{} for _ in range(args.rounds)]
    with tempfile.TemporaryDirectory(dir=args.store) as store:
        with Trial(Path(store), nbytes=1 << 30, checksum=True) as trial:
            rate = trial.run("read").bytes_per_second
        with tqdm(total=args.rounds * len(bases), unit="run", disable=not sys.stderr.isatty()) as bar:
            for number, base in in_turns(bases, args.rounds):
                bar.set_postfix_str(base)
                rounds[number][base] = answer_of(base, WORKER, json.dumps(request | {"base": base, "store": store}))
                bar.update()
    first = rounds[0]["memory"]
    print(f"{machine()}; the engine reads {in_words(round(rate))}/s in this directory, with checksums")
    print(
        f"GPT {args.layers} x {args.hidden}, {first['parameters']:,} parameters, of which {first['trained']:,} are "
        f"trained (rank {args.rank}, fp32); batch {args.batch} x {args.context}, activations: {args.activations}\n"
    )
    print(tabulate(rows(rounds, rate), HEADERS, disable_numparse=True, colalign=["left"] + ["right"] * 7))
    return 0


if __name__ == "__main__":
    sys.exit(main())
