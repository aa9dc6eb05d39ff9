"""How fast all ranks together bring parameters from their stores to every rank: shards of each, or one owner each.

    python benchmarks/partitioning.py [--stores DIR [DIR ...]] [--ranks 1 2 4] [--parameters 16] [--mib 32]

Bandwidth-centric partitioning (ZeRO-Infinity, section 6.1): every rank reads its shard of a parameter from its own
store, and an all-gather makes it whole. The other way, ZeRO-Offload's (`partition="owner"`): one rank owns a whole
parameter, reads it, and broadcasts it. Both go over the same parameters in order, three on their way at a time, and
take turns; a figure is the bytes of whole parameters that every rank has at the end, per second. Rank k uses the k-th
of the stores (again from the first, where there are fewer): what shards gain depends on how many disks they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate

import zinf_fx
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.transfers import Staging

sys.path.insert(0, str(Path(__file__).resolve().parent))

from train_step import machine

TOGETHER = 3
WAYS = {"shards": "shards", "owners": "owner"}


def bring(parameters: Sequence[zinf_fx.StoredTensor]) -> None:
    """Each parameter to every rank, as a planned graph does it, through the host arena."""
    staging, held = Staging(), deque()
    whole = Tile(0, "a parameter", tuple(parameters[0].shape), parameters[0].dtype, "nvme", None)

    def use_first() -> None:
        for storage, _ in list(held)[:2]:  # the next one's collective goes on meanwhile
            staging.allgather(storage, whole)
        _, tile = held.popleft()
        tile.wait()
        staging.release(tile)

    for parameter in parameters:
        held.append((parameter.storage, staging.fetch(parameter.storage, whole, None)))
        if len(held) == TOGETHER:
            use_first()
    while held:
        use_first()


def measure(store: Path, parameters: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns, on this rank among all."""
    numel, dtype = nbytes // 2, torch.bfloat16
    ways: dict[str, list[zinf_fx.StoredTensor]] = {}
    for way, partition in WAYS.items():
        stored = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(numel, dtype=dtype)) for _ in range(parameters))
        config = zinf_fx.Config(store=store, placement="nvme", partition=partition)
        ways[way] = list(zinf_fx.offload(stored, config))
        ways[way][0].storage.tiers.drain()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, stored in ways.items():
            dist.barrier()
            started = time.perf_counter()
            bring(stored)
            dist.barrier()
            if turn:  # the first warms up
                seconds[way].append(time.perf_counter() - started)
    return seconds


def on_rank(args: argparse.Namespace) -> None:
    """What torchrun runs: rank 0 prints."""
    dist.init_process_group("gloo")
    stores = args.stores
    try:
        found = measure(stores[dist.get_rank() % len(stores)], args.parameters, args.mib << 20, args.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found))
    finally:
        dist.destroy_process_group()


def launch(size: int, args: argparse.Namespace, stores: Sequence[Path]) -> dict[str, list[float]]:
    """The seconds that `size` ranks measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), __file__, "--on-rank"]
    command += ["--parameters", str(args.parameters), "--mib", str(args.mib), "--rounds", str(args.rounds)]
    command += ["--stores", *map(str, stores)]
    done = subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        sys.exit(f"{size} ranks failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=Path, nargs="+", metavar="DIR", help="of the ranks; default: temporary ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parameters", type=int, default=16)
    parser.add_argument("--mib", type=int, default=32, help="of a parameter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    if args.on_rank:
        on_rank(args)
        return
    total = args.parameters * (args.mib << 20)
    rows = []
    with contextlib.ExitStack() as stack:
        stores = args.stores
        if not stores:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=os.environ.get("ZINF_STORE"))))
            stores = [folder / str(rank) for rank in range(max(args.ranks))]
            for store in stores:
                store.mkdir()
        for size in args.ranks:
            seconds = launch(size, args, stores)
            ratio = median(b / a for a, b in zip(seconds["shards"], seconds["owners"], strict=True))
            rates = {way: total / median(taken) for way, taken in seconds.items()}
            rows.append({"ranks": size, **rates, "ratio": ratio})
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(f"{args.parameters} parameters of {args.mib} MiB, in whole on every rank; medians of {args.rounds}\n")
    shown = [
        (r["ranks"], f"{r['shards'] / 2**30:.2f}", f"{r['owners'] / 2**30:.2f}", f"{r['ratio']:.2f}") for r in rows
    ]
    print(tabulate(shown, headers=("ranks", "shards, GiB/s", "owners, GiB/s", "ratio"), disable_numparse=True))


if __name__ == "__main__":
    main()
