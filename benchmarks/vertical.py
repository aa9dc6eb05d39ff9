"""Tokens per second of steps of several micro-batches, beside a loop over them, and plain PyTorch in memory.

    python benchmarks/vertical.py                                                 # the 303 M-parameter GPT, minutes
    python benchmarks/vertical.py --layers 4 --hidden 256 --heads 4 --counts 1 4  # a minute

All model states are on NVMe. "vertical": all micro-batches run an operator before the next one begins
(`micro_batches`); "horizontal": a forward and a backward pass for each, as gradient accumulation does; "in memory":
that loop in plain PyTorch; "DeepSpeed": that loop with ZeRO-3 on NVMe, where it is installed, in a process of its own.
It keeps few parameters in memory (`--live`), as of a model that doesn't fit: with its own limits, 1e9, all of this one
would stay there. The ways take turns, a few steps each after one that isn't counted, and ratios are
taken within each round; one that isn't there has none. "simulated" are the seconds that
`zinf-fx simulate --hardware this-machine` predicts, of the disk, the memory and operators that are measured before the
way's turn and after it: the mean of both, as others that use the machine come and go.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine.machine import measure_machine
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import deepspeed_nvme
from arguments import add_gpt, check, computing_with
from gpt import GPT, GPTConfig, default_dtype, example_batch
from master_adamw import adamw
from train_step import machine
from train_step_variant import OPTIONS
from turns import in_turns

WAYS = ("vertical", "horizontal", "in memory", "DeepSpeed")
SIMULATED = WAYS[:2]
TO = {"horizontal": "to_horizontal", "in memory": "to_memory", "DeepSpeed": "to_deepspeed"}
"""By way, the name of ratios to it: of tokens per second."""
DEEPSPEED = Path(__file__).with_name("vertical_deepspeed.py")


class Training:
    """One way to train the model with batches of `count` micro-batches."""

    def __init__(self, args: argparse.Namespace, way: str, count: int, store: str) -> None:
        config = config_of(args)
        torch.manual_seed(0)
        with default_dtype(torch.bfloat16):
            if way == "in memory":
                self._model = self._loss = GPT(config)
                self._optimizer = adamw(self._model.parameters(), torch.bfloat16, **OPTIONS)
            else:
                with zinf_fx.offloading(store=store, placement="nvme"):
                    self._model = GPT(config)
                self._optimizer = zinf_fx.optim.AdamW(self._model.parameters(), **OPTIONS)
                divided = way == "vertical"
                options = options_of(args, count if divided else 1)
                self._loss = torch.compile(self._model, backend="zinf", dynamic=divided or None, options=options)
        self._batch = example_batch(config, count * args.micro_batch)
        self._parts = 1 if way == "vertical" else count
        self._moved = self._step() if way == "in memory" else self._bytes_of(self._step)

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step in the steady state: the mean of some after a first one, whose optimizer's step
        is done in the forward pass of the next, as that of the last is after them."""
        self._step()
        start = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = (time.perf_counter() - start) / steps
        self._finish()
        return seconds

    @property
    def bytes_per_parameter(self) -> float | None:
        """Moved to and from NVMe in a step."""
        return self._moved and self._moved / sum(p.numel() for p in self._model.parameters())

    def _bytes_of(self, step: Callable[[], None]) -> int:
        step()
        self._finish()
        before = zinf_fx.stats(self._model)
        step()
        self._finish()
        after = zinf_fx.stats(self._model)
        return after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written

    def _step(self) -> None:
        parts: list[tuple[Tensor, ...]] = list(zip(*(tensor.chunk(self._parts) for tensor in self._batch), strict=True))
        for part in parts:
            (self._loss(*part) / len(parts)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _finish(self) -> None:
        if hasattr(self._optimizer, "finish"):
            self._optimizer.finish()


class DeepSpeed:
    """The loop of DeepSpeed, in a process of its own that waits between its turns.

    Attributes:
        bytes_per_parameter: moved to and from disks in a step; None before the first turn.
    """

    def __init__(self, args: argparse.Namespace, count: int, store: str) -> None:
        self.bytes_per_parameter: float | None = None
        request = {"model": asdict(config_of(args)), "options": OPTIONS, "store": store}
        request |= {"count": count, "micro_batch": args.micro_batch, "live": args.live}
        self._worker = deepspeed_nvme.Worker(DEEPSPEED, request, args.threads)
        try:
            self._worker.answer()  # when it is ready
        except BaseException:
            self.close()
            raise

    def seconds(self, steps: int) -> float:
        """Return the seconds of a step: the mean of some after a first one."""
        seconds, self.bytes_per_parameter = self._worker.ask(steps)
        return seconds

    def close(self) -> None:
        """End the process."""
        self._worker.close()


@contextmanager
def trained(args: argparse.Namespace, count: int, store: str) -> Iterator[dict[str, Training | DeepSpeed]]:
    """Open a block with the ways to train with so many micro-batches."""
    with ExitStack() as stack:
        trainings: dict[str, Training | DeepSpeed] = {}
        for way in args.ways:
            prefix = f"{way.lower().replace(' ', '-')}-"
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=store, prefix=prefix))
            if way == "DeepSpeed":
                trainings[way] = stack.enter_context(closing(DeepSpeed(args, count, directory)))
            else:  # of a store of its own: those of one share its memory, and the order of their transfers
                trainings[way] = Training(args, way, count, directory)
        yield trainings
        trainings.clear()
    torch.compiler.reset()
    gc.collect()


def config_of(args: argparse.Namespace) -> GPTConfig:
    """Return the model, without a tied head."""
    return GPTConfig(args.layers, args.hidden, args.heads, context=args.context, tied=False)


def options_of(args: argparse.Namespace, count: int) -> dict[str, object]:
    """Return the options of a step of so many micro-batches, or of one in the loop."""
    return {"micro_batches": count, "activations": args.activations, "prefetch": tuple(args.prefetch)}


def simulated(args: argparse.Namespace, way: str, count: int, store: str) -> float:
    """Return the seconds that a step is predicted to take here."""
    hardware = measure_machine(store)
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model = GPT(config_of(args))
    together, accumulate = (count, 1) if way == "vertical" else (1, count)
    batch = example_batch(config_of(args), together * args.micro_batch)
    options = options_of(args, together)
    planning = plan_model(model, batch, store=store, placement="nvme", timed=True, **options)
    return simulate_plan(planning.plans[0], hardware, planning.seconds[0], accumulate=accumulate).seconds


def with_prediction(turn: Callable[[], float], predict: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a step in a turn, and those that are predicted beside it."""
    before = predict()
    seconds = turn()
    return seconds, (before + predict()) / 2


def measure(args: argparse.Namespace, store: str) -> list[dict]:
    """Return a row for each number of micro-batches and way."""
    rows = []
    turns = len(args.counts) * args.rounds * len(args.ways)
    with tqdm(total=turns, unit="turn", disable=not sys.stderr.isatty()) as bar:
        for count in args.counts:
            bar.set_postfix_str(f"{count} micro-batches")
            with trained(args, count, store) as trainings:
                rounds: list[dict[str, float]] = [{} for _ in range(args.rounds)]
                predicted: list[dict[str, float]] = [{} for _ in range(args.rounds)]
                for number, way in in_turns(args.ways, args.rounds):
                    turn = partial(trainings[way].seconds, args.steps)
                    if args.simulate and way in SIMULATED:
                        predict = partial(simulated, args, way, count, store)
                        rounds[number][way], predicted[number][way] = with_prediction(turn, predict)
                    else:
                        rounds[number][way] = turn()
                    bar.update()
                moved = {way: training.bytes_per_parameter for way, training in trainings.items()}
            tokens = count * args.micro_batch * args.context
            for way in args.ways:
                row = {"micro_batches": count, "way": way, "bytes_per_parameter": moved[way]}
                row |= {"seconds": median(seconds[way] for seconds in rounds)}
                row |= {"tokens_per_second": median(tokens / seconds[way] for seconds in rounds)}
                row |= {
                    name: median(seconds[to] / seconds[way] for seconds in rounds)
                    for to, name in TO.items()
                    if to in args.ways
                }
                if way in predicted[0]:
                    pairs = list(zip(predicted, rounds, strict=True))
                    row["simulated"] = median(guess[way] for guess, _ in pairs)
                    row["simulated_to_measured"] = median(guess[way] / seconds[way] for guess, seconds in pairs)
                rows.append(row)
    return rows


def table(rows: Sequence[dict]) -> str:
    columns = [
        ("s per\nstep", "seconds", ".2f"),
        ("tokens\nper s", "tokens_per_second", ".2f"),
        ("x hori-\nzontal", "to_horizontal", ".2f"),
        ("x in\nmemory", "to_memory", ".2f"),
        ("x Deep-\nSpeed", "to_deepspeed", ".2f"),
        ("bytes per\nparameter", "bytes_per_parameter", ".1f"),
        ("simulated\ns", "simulated", ".2f"),
        ("simulated\n/ measured", "simulated_to_measured", ".2f"),
    ]
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    cells = [
        [row["micro_batches"], row["way"]]
        + ["" if row.get(name) is None else format(row[name], form) for _, name, form in columns]
        for row in rows
    ]
    headers = ["micro-\nbatches", "way", *(header for header, *_ in columns)]
    align = ("right", "left", *["right"] * len(columns))
    return tabulate(cells, headers, disable_numparse=True, colalign=align)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Steps of several micro-batches, operator by operator and one after the other.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_gpt(parser, context=128)
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences in each")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16], help="micro-batches of a step")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, help="to train; default all, DeepSpeed where it is installed"
    )
    parser.add_argument("--live", type=int, default=30_000_000, help="parameters that DeepSpeed keeps in memory")
    parser.add_argument("--activations", choices=("keep", "recompute", "offload"), default="keep")
    parser.add_argument(
        "--prefetch", type=int, nargs=3, default=[1, 2, 3], metavar="N", help="operators, as the option of the backend"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="of each way in a round")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--simulate", action=argparse.BooleanOptionalAction, default=True, help="predict steps, too")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    numbers = ("layers", "hidden", "heads", "context", "micro_batch", "counts", "rounds", "steps", "threads", "live")
    check(options, args, *numbers)
    try:
        Config(prefetch=tuple(args.prefetch))
    except ConfigError as error:
        options.error(str(error))
    here, chosen = deepspeed_nvme.installed(), args.ways is not None
    if not chosen:
        args.ways = [way for way in WAYS if way != "DeepSpeed" or here]
    elif "DeepSpeed" in args.ways and not here:
        options.error("--ways DeepSpeed: it is not installed here; pip install deepspeed ninja, and libaio's headers")
    with computing_with(args.threads), tempfile.TemporaryDirectory(prefix="vertical-") as directory:
        rows = measure(args, args.store or directory)
    if args.json:
        print(json.dumps({"machine": machine(), "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{machine()}; torch {torch.__version__}, {args.threads} thread(s)")
    print(
        f"GPT {args.layers} x {args.hidden}, bfloat16 with fp32 AdamW, everything on NVMe, micro-batches of "
        f"{args.micro_batch} x {args.context}, activations={args.activations!r}, prefetch={tuple(args.prefetch)}"
    )
    print(f"medians of {args.rounds} rounds of {args.steps} steps; ratios within each round\n")
    print(table(rows))
    if not here and not chosen:
        print("\nDeepSpeed is not installed, and left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
