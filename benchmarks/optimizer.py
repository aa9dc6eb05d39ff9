"""Throughput of a streamed AdamW step with everything on NVMe, beside the disk's limit and optimizers in memory.

    python benchmarks/optimizer.py [--store DIR] [--parameters 32000000 128000000] [--dtypes bfloat16 float32]

The limit is the engine alone: it moves the very bytes of a recorded step once more, request by request in the same
order, through as much buffer memory, without waiting for anything but room. The step and the limit take turns, and
ratios are taken between neighbours. Low-precision parameters have fp32 masters; moments are fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import zinf_fx
from zinf_fx.runtime.tensor.storage import new_storages
from zinf_fx.runtime.tensor.tiers import Tiers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import deepspeed_nvme
from engine_alone import EngineAlone, recorded
from master_adamw import adamw
from train_step import machine
from turns import in_turns

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
DEEPSPEED = Path(__file__).with_name("optimizer_deepspeed.py")
MATRIX = 2048


def parameters_like_a_model(count: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Matrices of 2048 x 2048, each followed by a vector of 2048, of `count` elements in all."""
    shapes = ((MATRIX, MATRIX), (MATRIX,))
    index = 0
    while count:
        shape = shapes[index % 2]
        numel = torch.Size(shape).numel()
        shape = shape if numel <= count else (count,)
        yield torch.randn(shape, dtype=dtype)
        count -= min(numel, count)
        index += 1


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def streamed(store: Path, count: int, dtype: torch.dtype, rounds: int, bar: tqdm) -> dict:
    """Return the row of a streamed optimizer and its limit, taking turns."""
    with zinf_fx.offloading(store=store, placement="nvme"):
        model = torch.nn.ParameterList(map(torch.nn.Parameter, parameters_like_a_model(count, dtype)))
    optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False, **OPTIONS)  # all of it is timed
    for parameter in model:
        storage = parameter.stored
        parameter.grad = zinf_fx.StoredTensor.of(new_storages([storage], "nvme")[0], parameter.shape, parameter.device)
        parameter.grad.normal_()
    tiers: Tiers = model[0].stored.tiers
    tiers.drain()
    optimizer.step()  # makes the states
    with recorded(tiers) as recording:
        optimizer.step()
    engine = EngineAlone(tiers.store, recording.requests, recording.peak)
    rivals = {"step": optimizer.step, "limit": engine.run}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _, name in in_turns(list(rivals), rounds):
        bar.set_description(f"{count / 1e6:g} M {dtype} {name}")
        times[name].append(seconds(rivals[name]))
        bar.update()
    moved = {write: sum(r.nbytes for r in recording.requests if r.write == write) for write in (False, True)}
    return {
        "optimizer": "zinf_fx.optim.AdamW, all on NVMe",
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": count,
        "seconds": median(times["step"]),
        "limit_seconds": median(times["limit"]),
        "ratio_to_limit": median(limit / step for step, limit in zip(times["step"], times["limit"], strict=True)),
        "parameters_per_second": count / median(times["step"]),
        "read_per_parameter": moved[False] / count,
        "written_per_parameter": moved[True] / count,
        "peak_buffer_bytes": recording.peak,
        "all_seconds": times,
    }


def in_memory(count: int, dtype: torch.dtype, rounds: int, bar: tqdm) -> dict:
    """Return the row of torch.optim.AdamW(fused=True), with fp32 masters for low-precision parameters."""
    parameters = list(parameters_like_a_model(count, dtype))
    optimizer = adamw(parameters, dtype, **OPTIONS)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    times = []
    for _ in range(rounds):
        bar.set_description(f"{count / 1e6:g} M {dtype} in memory")
        times.append(seconds(optimizer.step))
        bar.update()
    return _row("torch.optim.AdamW(fused=True), in memory", dtype, count, times)


def deepspeed(store: Path, count: int, dtype: torch.dtype, rounds: int, bar: tqdm) -> dict:
    """Return the row of DeepSpeed's ZeRO-3 optimizer with its NVMe swapper, in a process of its own."""
    request = {"store": str(store), "count": count, "dtype": str(dtype).removeprefix("torch."), "rounds": rounds}
    bar.set_description(f"{count / 1e6:g} M {dtype} DeepSpeed")
    with contextlib.closing(deepspeed_nvme.Worker(DEEPSPEED, request, torch.get_num_threads())) as worker:
        times = worker.answer()
    bar.update(rounds)
    return _row("DeepSpeed, states on NVMe", dtype, count, times)


def _row(name: str, dtype: torch.dtype, count: int, times: list[float]) -> dict:
    return {
        "optimizer": name,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": count,
        "seconds": median(times),
        "parameters_per_second": count / median(times),
        "all_seconds": {"step": times},
    }


def table(rows: Sequence[dict]) -> str:
    def cell(row: dict, key: str, form: str, scale: float = 1) -> str:
        return format(row[key] / scale, form) if key in row else "-"

    columns = [
        ("dtype", lambda r: r["dtype"]),
        ("optimizer", lambda r: r["optimizer"]),
        ("parameters\nmillions", lambda r: cell(r, "parameters", "g", 1e6)),
        ("seconds", lambda r: cell(r, "seconds", ".3f")),
        ("parameters\nper second\nmillions", lambda r: cell(r, "parameters_per_second", ".0f", 1e6)),
        ("bytes read\nper\nparameter", lambda r: cell(r, "read_per_parameter", ".2f")),
        ("bytes written\nper\nparameter", lambda r: cell(r, "written_per_parameter", ".2f")),
        ("limit\nseconds", lambda r: cell(r, "limit_seconds", ".3f")),
        ("limit\n/ step", lambda r: cell(r, "ratio_to_limit", ".2f")),
        ("peak\nbuffers\nMiB", lambda r: cell(r, "peak_buffer_bytes", ".0f", 1 << 20)),
    ]
    cells = [[value(row) for _, value in columns] for row in rows]
    align = ("left", "left", *["right"] * (len(columns) - 2))
    return tabulate(cells, headers=[name for name, _ in columns], disable_numparse=True, colalign=align)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()), help="directory on the disk to use")
    parser.add_argument("--parameters", type=int, nargs="+", default=[32_000_000, 128_000_000], metavar="COUNT")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7, help="of step and limit (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def measure(args: argparse.Namespace) -> list[dict]:
    """Return the rows. Each has a store of its own below `args.store`, which is removed."""
    with_deepspeed = deepspeed_nvme.installed()
    rows = []
    runs = len(args.dtypes) * len(args.parameters) * (3 + with_deepspeed) * args.rounds
    with tqdm(total=runs, unit="step", disable=None if not args.json else True) as bar:
        for dtype in (getattr(torch, name) for name in args.dtypes):
            for count in args.parameters:
                with tempfile.TemporaryDirectory(dir=args.store, prefix="zinf-optimizer-") as directory:
                    rows.append(streamed(Path(directory), count, dtype, args.rounds, bar))
                    gc.collect()  # the store goes with the last tensor
                    if with_deepspeed:
                        rows.append(deepspeed(Path(directory), count, dtype, args.rounds, bar))
                rows.append(in_memory(count, dtype, args.rounds, bar))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    if min([args.rounds, *args.parameters]) < 1:
        options.error("--rounds and --parameters must be at least 1")
    rows = measure(args)
    if args.json:
        print(json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads; {args.store}")
    print(f"medians of {args.rounds}, ratios within each round; limit: the engine alone, moving the same bytes\n")
    print(table(rows))
    if not deepspeed_nvme.installed():
        print("\nDeepSpeed is not installed, and left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
