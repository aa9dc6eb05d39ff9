"""How fast all ranks together bring parameters from their stores to every rank: shards of each, or one owner each; and
small ones by themselves, or in packs.

    python benchmarks/partitioning.py [--stores DIR [DIR ...]] [--ranks 1 2 4] [--parameters 16] [--small 512]

Bandwidth-centric partitioning (ZeRO-Infinity, section 6.1): every rank reads its shard of a parameter from its own
store, and an all-gather makes it whole. The other way, ZeRO-Offload's (`partition="owner"`): one rank owns a whole
parameter, reads it, and broadcasts it. Both go over the same parameters in order, three on their way at a time, and
take turns; a figure is the bytes of whole parameters that every rank has at the end, per second. Rank k uses the k-th
of the stores (again from the first, where there are fewer): what shards gain depends on how many disks they are.

Small parameters are biases of 4 KiB. By themselves, each takes a request and a collective; in packs, as with
`pack="auto"`, all that lie side by side take one of each. What is compared is how long all of them take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from tabulate import tabulate

import zinf_fx
from zinf_fx.plan.packs import pack_of
from zinf_fx.plan.schedule import Tile
from zinf_fx.runtime.execute.tile_cache import TileCache
from zinf_fx.runtime.tensor.allocation import Allocation
from zinf_fx.runtime.tensor.storage import TensorStorage
from zinf_fx.runtime.tensor.stored_tile import StoredTile

sys.path.insert(0, str(Path(__file__).resolve().parent))

from processes import answer_of
from train_step import machine

TOGETHER = 3
SMALL = 4096  # bytes of a small parameter
# How parameters are offloaded: large ones, then small ones.
LARGE_WAYS = {"shards": {"pack": None}, "owners": {"partition": "owner", "pack": None}}
SMALL_WAYS = {"alone": {"pack": None}, "packs": {"pack": "auto"}}


def bring(tiles: Sequence[tuple[StoredTile, Tile]]) -> None:
    """Each tile to every rank, as a planned graph does it, through the host arena."""
    cache, held = TileCache(), deque()

    def use_first() -> None:
        for storage, planned, _ in list(held)[:2]:  # the next one's collective goes on meanwhile
            cache.allgather(storage, planned)
        *_, tile = held.popleft()
        tile.wait()
        cache.release(tile)

    for storage, planned in tiles:
        held.append((storage, planned, cache.fetch(storage, planned, None)))
        if len(held) == TOGETHER:
            use_first()
    while held:
        use_first()


def tiles_of(parameters: Sequence[zinf_fx.StoredTensor]) -> list[tuple[StoredTile, Tile]]:
    """Return the tiles that move: parameters that lie side by side as one pack, the others by themselves."""
    allocations: dict[Allocation, list[tuple[TensorStorage, Tile]]] = {}
    for parameter in parameters:
        storage, ranks = parameter.stored, parameter.stored.shard.ranks.shards
        shard = storage.shard.shards.size if ranks > 1 else 0
        tile = Tile("a parameter", tuple(parameter.shape), parameter.dtype, "nvme", None, ranks=ranks, shard=shard)
        allocations.setdefault(storage.bytes.allocation, []).append((storage, replace(tile, partitioned=ranks > 1)))
    moved: list[tuple[StoredTile, Tile]] = []
    for together in allocations.values():
        storages, tiles = zip(*together, strict=True)
        planned = pack_of(tiles) if len(tiles) > 1 else tiles[0]
        moved.append((StoredTile.of(storages, planned), planned))
    return moved


def measure(
    store: Path, ways: Mapping[str, Mapping[str, object]], parameters: int, nbytes: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each way, in turns, on this rank among all."""
    numel, dtype = nbytes // 2, torch.bfloat16
    models: dict[str, torch.nn.ParameterList] = {}
    for way, options in ways.items():
        stored = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(numel, dtype=dtype)) for _ in range(parameters))
        models[way] = zinf_fx.offload(stored, zinf_fx.Config(store=store, placement="nvme", **options))
        stored[0].stored.tiers.drain()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, stored in models.items():
            tiles = tiles_of(list(stored))
            dist.barrier()
            started = time.perf_counter()
            bring(tiles)
            dist.barrier()
            if turn:  # the first warms up
                seconds[way].append(time.perf_counter() - started)
    return seconds


def on_rank(args: argparse.Namespace) -> None:
    """Measure on a rank that torchrun started; rank 0 prints."""
    dist.init_process_group("gloo")
    stores = args.stores
    try:
        store = stores[dist.get_rank() % len(stores)]
        seconds = measure(store, LARGE_WAYS, args.parameters, args.mib << 20, args.rounds)
        seconds |= measure(store, SMALL_WAYS, args.small, SMALL, args.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(seconds))
    finally:
        dist.destroy_process_group()


def launch(size: int, args: argparse.Namespace, stores: Sequence[Path]) -> dict[str, list[float]]:
    """Return the seconds that `size` ranks measured."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), __file__, "--on-rank"]
    command += ["--parameters", str(args.parameters), "--mib", str(args.mib), "--rounds", str(args.rounds)]
    command += ["--small", str(args.small)]
    command += ["--stores", *map(str, stores)]
    return answer_of(f"{size} ranks", *command, environment={"OMP_NUM_THREADS": "1", **os.environ})


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=Path, nargs="+", metavar="DIR", help="of the ranks; default: temporary ones")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--parameters", type=int, default=16)
    parser.add_argument("--mib", type=int, default=32, help="of a parameter")
    parser.add_argument("--small", type=int, default=512, help="how many small parameters")
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
            rates = {way: total / median(seconds[way]) for way in LARGE_WAYS}
            small = {way: median(seconds[way]) for way in SMALL_WAYS}
            gain = median(a / b for a, b in zip(seconds["alone"], seconds["packs"], strict=True))
            rows.append({"ranks": size, **rates, "ratio": ratio, **small, "gain": gain})
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    large = f"{args.parameters} parameters of {args.mib} MiB"
    print(f"{large}, and {args.small} of 4 KiB, in whole on every rank; medians of {args.rounds}\n")
    shown = [
        (
            r["ranks"],
            *(f"{r[way] / 2**30:.2f}" for way in LARGE_WAYS),
            f"{r['ratio']:.2f}",
            *(f"{1e3 * r[way]:.1f}" for way in SMALL_WAYS),
            f"{r['gain']:.1f}",
        )
        for r in rows
    ]
    headers = ("ranks", "shards, GiB/s", "owners, GiB/s", "ratio", "small alone, ms", "in packs, ms", "ratio")
    print(tabulate(shown, headers=headers, disable_numparse=True))


if __name__ == "__main__":
    main()
