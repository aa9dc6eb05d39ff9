"""The AdamW update on the CPU for each format of states, beside a copy of the same memory, PyTorch's fused AdamW, and
those of DeepSpeed, bitsandbytes and torchao, as far as they are installed (see update_peers.py).

    python benchmarks/update.py [--parameters 64000000] [--threads 1 2] [--rounds 7] [--json]

A copy of memory tells the limit: the rate at which it reads and writes, divided by the bytes that an update reads and
writes of a parameter. All take turns, and ratios to the limit are taken within a round. The kernel is alone: it updates
what lies in memory in one call, as a step with `placement="host"` does chunk by chunk.

The bytes of other libraries are those of what they keep, each read and written once: the fewest that their update has
to move. They keep bf16 parameters without a master.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from tqdm import tqdm

from zinf_fx.adam import UpdateForm
from zinf_fx.machine.machine import adam_operands
from zinf_fx.optim.arithmetic import borrow
from zinf_fx.optim.formats import MASTER, MASTER_UP
from zinf_fx.optim.kernels import Operands
from zinf_fx.optim.update import update_elements

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import check, computing_with
from turns import in_turns
from update_peers import OPTIONS, PEERS, packages, prepare, said

FP32, BF16 = torch.float32, torch.bfloat16
# Of parameters and gradients, and of masters and moments.
FORMATS: dict[str, tuple[torch.dtype, UpdateForm]] = {
    "fp32": (FP32, "float32"),
    "bf16, fp32 master": (BF16, "float32"),
    "bf16, fp32 master, bf16 moments": (BF16, "bfloat16"),
    "bf16, fp32 master, 8-bit moments": (BF16, "8bit"),
    "bf16, split master, bf16 moments": (BF16, "split, bfloat16"),
    "bf16, split master, 8-bit moments": (BF16, "split, 8bit"),
}
# Bytes that a thread copies at least. The C library writes past the caches only what is larger than most of them; else
# a copy also reads what it overwrites, and takes up to twice as long.
COPIED = 128 << 20
PAUSE = 0.02  # seconds: OpenMP's threads spin for some milliseconds after their last work, on the cores of the next
COPY, PYTORCH = "a copy", "torch.optim.AdamW(fused=True), fp32"


def operands_of(count: int, name: str) -> Operands:
    """So many elements in a format, whose moments hold zeros."""
    operands = adam_operands(count, *FORMATS[name])
    operands.parameter.normal_()
    if MASTER in operands.master and MASTER_UP not in operands.master:
        operands.master[MASTER].copy_(operands.parameter)
    operands.gradient.normal_(std=1e-3)
    return operands


def moved(operands: Operands) -> float:
    """Return the bytes that an update reads and writes of a parameter."""
    count, masters = operands.parameter.numel(), list(operands.master.values())
    changed = sum(tensor.nbytes for tensor in (*masters, *operands.states.values()))
    parameters = operands.parameter.nbytes * (
        1 if MASTER in operands.master and MASTER_UP not in operands.master else 2
    )
    return (2 * changed + parameters + operands.gradient.nbytes) / count


def updating(operands: Operands) -> Callable[[], object]:
    """Return what updates the operands once more, by the native kernel."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **OPTIONS, fused=True)
    inner = borrow(optimizer, torch.optim.AdamW, optimizer.param_groups[0], [])

    def update() -> None:
        threads = torch.get_num_threads()
        update_elements(inner, [operands], None, threads=threads)  # it has no memory for PyTorch's class to compute in

    return update


def in_memory(count: int) -> Callable[[], object]:
    """Return what takes a step of PyTorch's own over parameters and gradients in fp32."""
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    return torch.optim.AdamW([parameter], **OPTIONS, fused=True).step


def copying(nbytes: int) -> Callable[[], object]:
    """Return what copies so many bytes by as many threads as PyTorch has."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    pool, part = ThreadPoolExecutor(threads), nbytes // threads

    def copy(number: int) -> None:
        ctypes.memmove(target.data_ptr() + number * part, source.data_ptr() + number * part, part)

    return lambda: list(pool.map(copy, range(threads)))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(count: int, threads: int, rounds: int, bar: tqdm, failures: dict[str, str]) -> list[dict]:
    """Return a row for each way, with so many threads; of peers that don't run here, what they say is put into
    `failures`."""
    with computing_with(threads):
        operands = {name: operands_of(count, name) for name in FORMATS}
        copied = max(4 * count, COPIED * threads)
        ways = {COPY: copying(copied), PYTORCH: in_memory(count)}
        ways |= {name: updating(some) for name, some in operands.items()}
        nbytes = {COPY: 2 * copied / count, PYTORCH: moved(operands["fp32"])} | {
            name: moved(some) for name, some in operands.items()
        }
        beside: dict[str, str | None] = {PYTORCH: "fp32"}
        for peer in (peer for peer in PEERS if peer.is_installed):
            bar.set_description(f"{threads} threads, {peer.name}: builds")
            try:
                name, step, total = prepare(peer, count)
            except Exception as error:
                failures[peer.name] = said(error)
                bar.update(rounds)
            else:
                ways[name], nbytes[name], beside[name] = step, total, peer.beside
        times: dict[str, list[float]] = {name: [] for name in ways}
        for work in (*ways.values(), *ways.values()):  # first steps make states
            work()
        for _, name in in_turns(list(ways), rounds):
            bar.set_description(f"{threads} threads, {name}")
            time.sleep(PAUSE)
            times[name].append(seconds(ways[name]))
            bar.update()
    return [
        {
            "threads": threads,
            "way": name,
            "bytes_per_parameter": nbytes[name],
            "parameters_per_second": count / median(times[name]),
            "bytes_per_second": nbytes[name] * count / median(times[name]),
            "ratio_to_limit": median(
                nbytes[name] * copy / (nbytes[COPY] * taken)
                for copy, taken in zip(times[COPY], times[name], strict=True)
            ),
            "beside": beside.get(name),
            "ratio_of_zinf_fx": _ratio(times[name], times.get(beside.get(name))),
            "all_seconds": times[name],
        }
        for name in ways
    ]


def _ratio(times: list[float], baselines: list[float] | None) -> float | None:
    return baselines and median(taken / baseline for taken, baseline in zip(times, baselines, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=64_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the rows, with all times")
    args = parser.parse_args()
    check(parser, args, "parameters", "threads", "rounds")
    total = len(args.threads) * args.rounds * (len(FORMATS) + 2 + sum(peer.is_installed for peer in PEERS))
    rows: list[dict] = []
    failures: dict[str, str] = {}
    with tqdm(total=total, disable=None) as bar:
        for threads in args.threads:
            rows += measure(args.parameters, threads, args.rounds, bar, failures)
    versions, absent = packages()
    if args.json:
        print(json.dumps({"rows": rows, "versions": versions, "not_installed": absent, "failures": failures}))
        return
    table = [
        [
            row["threads"],
            row["way"],
            f"{row['bytes_per_parameter']:.1f}" if row["way"] != COPY else "",
            f"{row['parameters_per_second'] / 1e6:,.0f}" if row["way"] != COPY else "",
            f"{row['bytes_per_second'] / 1e9:.1f}",
            f"{row['ratio_to_limit']:.2f}",
            f"{row['ratio_of_zinf_fx']:.2f}" if row["ratio_of_zinf_fx"] else "",
        ]
        for row in rows
    ]
    headers = ["threads", "", "bytes per\nparameter", "M parameters/s", "GB/s", "of the\nlimit", "zinf_fx\n/ it"]
    print(tabulate(table, headers))
    print("\nzinf_fx / it: parameters/s of zinf_fx's row with moments of as many bits, over the row's, within a round")
    if versions:
        print(", ".join(versions))
    if absent:
        print(f"{', '.join(absent)}: not installed, and left out")
    for name, line in failures.items():
        print(f"{name} doesn't run here, and is left out: {line}")


if __name__ == "__main__":
    main()
