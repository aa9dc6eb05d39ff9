"""Where memory goes: activations kept, recomputed or moved, and how large a layer may be under a budget.

    python benchmarks/memory.py                                       # minutes
    python benchmarks/memory.py --layers 24 --hidden 1024 --context 512 --budget 256MiB

The first table trains a GPT once per policy, each in a process of its own, with every model state on disk. The second
is figure 6b of ZeRO-Infinity in small: the largest hidden size of which a transformer layer's tiles and gradients fit
the budget, when its largest matrix is divided by the tiling factor. It plans, and runs nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from arguments import add_gpt
from tabulate import tabulate
from train_step import machine, run_variant

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, default_dtype

from zinf_fx.config import parse_bytes
from zinf_fx.errors import BudgetError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.sizes import in_words

_STATES = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
# What is saved for backward, and where it lives until then. On a CPU, host memory is where it was computed.
POLICIES = {
    "kept": {"activations": "keep"},
    "recomputed": {"activations": "recompute"},
    "to host memory": {"activations": "offload", "placement": _STATES | {"activations": "host"}},
    "to NVMe": {"activations": "offload"},
    "recomputed, checkpoints to NVMe": {"activations": "recompute", "placement": _STATES | {"activations": "nvme"}},
}
FACTORS = (1, 2, 4, 8, 16)
_HEAD = 64  # hidden sizes are multiples of an attention head's


def activations(args: argparse.Namespace) -> Iterator[list[str]]:
    """Return a row per policy: peak resident memory, seconds per step, and the first policy's beside them."""
    first: dict | None = None
    for policy, options in POLICIES.items():
        offloading = {"placement": "nvme", "chunk": args.chunk, **options}
        request = {
            "variant": "zinf",
            "model": {name: getattr(args, name) for name in ("layers", "hidden", "heads", "context")},
            **{name: getattr(args, name) for name in ("batch", "dtype", "warmup", "steps")},
            **{"clip": None, "seed": 0, "optimizer": {}, "device": "cpu"},
            "offloading": offloading | ({"store": str(args.store)} if args.store else {}),
        }
        result = run_variant(request)
        first = first or result
        peak, seconds = result["peak_resident_bytes"], median(result["step"])
        yield [
            policy,
            in_words(peak),
            f"{peak / first['peak_resident_bytes']:.2f}",
            f"{seconds:.3f}",
            f"{seconds / median(first['step']):.2f}",
            "yes" if result["losses"] == first["losses"] else "no",
        ]


def largest_hidden(factor: int, budget: int, dtype: torch.dtype) -> int:
    """Return the largest hidden size with which a layer trains within `budget` bytes; 0: none."""
    lower, upper = 0, 1
    while fits(upper * _HEAD, factor, budget, dtype):
        lower, upper = upper, 2 * upper
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if fits(middle * _HEAD, factor, budget, dtype):
            lower = middle
        else:
            upper = middle
    return lower * _HEAD


def fits(hidden: int, factor: int, budget: int, dtype: torch.dtype) -> bool:
    """Whether a layer can be planned within the budget, its largest matrix in `factor` tiles."""
    with torch.device("meta"), default_dtype(dtype):
        model = GPT(GPTConfig(layers=1, hidden=hidden, heads=hidden // _HEAD, context=16, vocabulary=16))
        tokens = torch.zeros(1, 16, dtype=torch.int64)
    tile = -(-4 * hidden // factor) * hidden * dtype.itemsize
    try:
        plan_model(model, (tokens, tokens), placement="infinity-nvme", device_memory=budget, tile=tile)
    except BudgetError:
        return False
    return True


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_gpt(parser, context=512, layers=8, hidden=512, heads=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--chunk", default="4MiB", help="of the optimizer's step")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--store", type=Path, metavar="DIR", help="in place of $ZINF_STORE or the user cache")
    parser.add_argument("--budget", default="32MiB", help="of the second table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    budget, dtype = parse_bytes(args.budget, "budget"), getattr(torch, args.dtype)
    print(f"{machine()}; torch {torch.__version__}")
    print(
        f"\nGPT {args.layers} x {args.hidden}, {args.dtype}, batch {args.batch} x {args.context}, all states on disk\n"
    )
    headers = ["activations", "peak\nresident", "peak /\nkept", "s per\nstep", "time /\nkept", "same\nlosses"]
    align = ("left", *["right"] * 5)
    print(tabulate(list(activations(args)), headers=headers, disable_numparse=True, colalign=align))
    print(f"\na transformer layer in {args.dtype} within device_memory={in_words(budget)}\n")
    rows = []
    for factor in FACTORS:
        hidden = largest_hidden(factor, budget, dtype)
        rows.append([factor, hidden, in_words(4 * hidden * hidden * dtype.itemsize)])
    print(tabulate(rows, headers=["tiling\nfactor", "largest\nhidden size", "its largest\nmatrix"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
