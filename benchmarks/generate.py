"""Tokens per second of `generate()`: a Llama in memory, and one whose weights are on disk and pass once per token.

    python benchmarks/generate.py                                   # 300 M parameters in bf16; minutes, to compile
    python benchmarks/generate.py --layers 2 --hidden 256           # seconds
    python benchmarks/generate.py --host-memory 512MiB              # of which what fits stays between tokens
    python benchmarks/generate.py --variants memory zinf eager      # the last: in the store, and not compiled

Each row is a process of its own. A token's seconds are the median over all but the first, which reads the prompt.
Planned are the simulated seconds of a call with one token of each text (without attention to what was before), on this
machine as it was measured before and after the text, and the bytes that the call reads; peaks are of resident memory,
PyTorch and compiler included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from processes import answer_of
from tabulate import tabulate
from train_step import machine

from zinf_fx.sizes import in_words

WORKER = Path(__file__).with_name("generate_worker.py")
VARIANTS = ("memory", "zinf", "eager")
_HEAD = 64


def row(batch: int, variant: str, answer: dict, memory: dict | None) -> list[str]:
    rate = batch / answer["seconds"]
    cells = [str(batch), variant, f"{answer['first']:.3f}", f"{answer['seconds']:.4f}", f"{rate:.2f}"]
    cells += [f"{memory['seconds'] / answer['seconds']:.2f}" if memory else ""]
    if "planned_seconds" in answer:
        planned = answer["planned_seconds"]
        cells += [f"{batch / planned:.2f}", f"{planned / answer['seconds']:.2f}"]
        cells += [in_words(round(answer["read"])), in_words(answer["planned_read"])]
    else:
        cells += ["", "", "", ""]
    equal = "" if memory is None else "yes" if answer["text"] == memory["text"] else "NO"
    return [*cells, in_words(answer["peak"]), equal]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of it")
    parser.add_argument("--tokens", type=int, default=24, help="that are generated")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["memory", "zinf"])
    parser.add_argument("--host-memory", metavar="BYTES", help="budget of it; without one, matrices never stay")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if args.tokens < 2 or args.hidden % _HEAD:
        options.error(f"--tokens must be at least 2, and --hidden a multiple of {_HEAD}")
    heads = args.hidden // _HEAD
    shape = {"hidden_size": args.hidden, "intermediate_size": 11 * args.hidden // 4, "num_hidden_layers": args.layers}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": max(heads // 2, 1), "vocab_size": args.vocabulary}
    given = {} if args.host_memory is None else {"host_memory": args.host_memory}
    request = {"shape": shape, "prompt": args.prompt, "tokens": args.tokens, "options": given}
    rows = []
    with tempfile.TemporaryDirectory(prefix="generate-") as directory:
        for batch in args.batches:
            answers: dict[str, dict] = {}
            for variant in args.variants:
                asked = request | {"variant": variant, "batch": batch, "store": args.store or directory}
                answers[variant] = answer_of(variant, WORKER, json.dumps(asked))
                rows.append(row(batch, variant, answers[variant], answers.get("memory")))
    parameters = next(iter(answers.values()))["parameters"]
    print(
        f"{machine()}\n\na Llama of {parameters:,} parameters in bf16, host memory {args.host_memory or 'unlimited'}\n"
    )
    headers = ["batch", "", "prompt\ns", "token\ns", "tokens/s", "of in\nmemory", "tokens/s\nplanned", "of\nplanned"]
    headers += ["read per\ntoken", "planned", "peak\nresident", "same\ntext"]
    print(tabulate(rows, headers=headers, disable_numparse=True, colalign=("right", "left", *["right"] * 10)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
