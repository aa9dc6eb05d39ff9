"""Training on a GPU through zinf, beside plain `torch.compile` in its memory: forward, backward and whole steps.

    python benchmarks/gpu.py                                                    # the 303 M-parameter GPT, 64 x 512
    python benchmarks/gpu.py --model llama-7b --batch 1 --context 4096 --optimizer none
    python benchmarks/gpu.py --model llama-7b --batch 1 --context 4096 --ways infinity-cpu --optimizer in-backward \
        --state-dtype 8bit --master-dtype split
    python benchmarks/gpu.py --model llama-30b --batch 1 --context 4096 --ways zero-offload --states-on-nvme 0.4 \
        --optimizer in-backward --state-dtype 8bit --master-dtype split --activations recompute

The ways take turns in one process, where each is built when the one before it is gone, and plain `torch.compile` comes
first. DeepSpeed, where it is installed, comes last: its ZeRO-3 with parameters and optimizer states in host memory, as
it runs by default, without `torch.compile` and with an optimizer of its own, whatever `--optimizer` says. Budgets are
for placements from which something moves.

Forward and backward are waited for apart. With `--optimizer sync`, a step of the optimizer ends before the next forward
begins, so that forward and backward are what those take alone; with `overlap`, zinf's default, and `in-backward`, only
whole steps are measured; with `none`, gradients are dropped, for models whose states of AdamW don't fit beside them.
"In a row" are seconds per step of as many steps without any wait but for the last: gradients that are on their way to
host memory then arrive during the next forward. Tokens and TFLOP/s are of those; the latter are 6 x parameters x tokens
per second, without attention's and what is computed again. "simulated" are the seconds that `zinf-fx simulate` predicts
for the plan that ran, of this machine as it is measured at the start.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn

import zinf_fx
from zinf_fx.config import PRESETS
from zinf_fx.machine.machine import measure_machine
from zinf_fx.placement import Placement, Tier
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import check
from deepspeed_nvme import RANK, installed
from gpt import GPT, GPTConfig, default_dtype
from llama import Llama, LlamaConfig
from master_adamw import adamw
from train_step import machine
from train_step_variant import OPTIONS, finish

IN_MEMORY = "torch.compile"
DEEPSPEED = "DeepSpeed"
OPTIMIZERS = {"sync": {"overlap": False}, "overlap": {}, "in-backward": {"step_in_backward": True}}


def gpt(layers: int, hidden: int, heads: int) -> Callable[[int], tuple[nn.Module, int]]:
    """Makes a GPT for sequences of a length, and says how many tokens it knows."""

    def build(context: int) -> tuple[nn.Module, int]:
        config = GPTConfig(layers, hidden, heads, context)
        return GPT(config), config.vocabulary

    return build


def llama(layers: int, hidden: int, inner: int, heads: int, vocabulary: int = 32000) -> Callable:
    """Likewise a Llama of the first kind, without grouped heads."""
    config = LlamaConfig(layers, hidden, inner, heads, heads, vocabulary)
    return lambda context: (Llama(config), vocabulary)


MODELS = {
    "gpt-tiny": gpt(2, 64, 2),
    "gpt-303m": gpt(24, 1024, 16),
    "llama-tiny": llama(2, 64, 96, 2, 128),
    "llama-7b": llama(32, 4096, 11008, 32),
    "llama-30b": llama(60, 6656, 17920, 52),
}


@dataclass
class Row:
    """What one way took: medians of seconds, peak bytes of the device, and what a simulated step takes. None: parts of
    steps are not waited for apart."""

    way: str
    parameters: int
    first: float
    forward: float | None
    backward: float | None
    step: float | None
    in_a_row: float
    device_bytes: int
    loss: float
    simulated: float | None = None


class Training:
    """The model, trained in one way; this one is plain `torch.compile`."""

    def __init__(self, args: argparse.Namespace, store: str) -> None:
        self._args, self._store = args, store
        self._device, self._dtype = torch.device(args.device), getattr(torch, args.dtype)
        torch.manual_seed(0)
        with default_dtype(self._dtype), self._device, self._placed():
            self.model, known = MODELS[args.model](args.context)
        self._loss: Callable[..., Tensor] = self.model
        self._optimizer: torch.optim.Optimizer | None = None
        self._prepare()
        torch.manual_seed(1)
        text = torch.randint(known, (args.batch, args.context + 1), device=self._device)
        self._batch = text[:, :-1], text[:, 1:]

    def _placed(self) -> AbstractContextManager:
        """For the block in which the model is made."""
        return nullcontext()

    def _prepare(self) -> None:
        """Return what computes the loss, and the optimizer."""
        self._loss = torch.compile(self.model)
        if self._args.optimizer != "none":
            self._optimizer = adamw(self.model.parameters(), self._dtype, **OPTIONS)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _update(self) -> None:
        """Step, and drop the gradients, which without an optimizer are there until the next backward."""
        if self._optimizer is not None:
            self._optimizer.step()
            self.model.zero_grad()

    def _forward(self) -> Tensor:
        loss = self._loss(*self._batch)
        if self._args.optimizer == "none":
            self.model.zero_grad()
        return loss

    def step(self) -> tuple[float, float, float, Tensor]:
        """Take a step. Returns the seconds of forward, backward and all; and the loss."""
        begin = time.perf_counter()
        loss = self._forward()
        finish(self._device)
        after_forward = time.perf_counter()
        self._backward(loss)
        finish(self._device)
        after_backward = time.perf_counter()
        self._update()
        finish(self._device)
        return after_forward - begin, after_backward - after_forward, time.perf_counter() - begin, loss.detach()

    def in_a_row(self, steps: int) -> tuple[float, Tensor]:
        """Take so many steps, which are waited for together. Returns the seconds per step, and the last loss."""
        begin = time.perf_counter()
        for _ in range(steps):
            loss = self._forward()
            self._backward(loss)
            self._update()
        self.end()
        finish(self._device)
        return (time.perf_counter() - begin) / steps, loss.detach()

    def end(self) -> None:
        """Nothing is under way any more."""


class Offloaded(Training):
    """Through zinf, by a preset of a placement."""

    def __init__(self, args: argparse.Namespace, store: str, placement: str) -> None:
        self._placement = placement
        super().__init__(args, store)

    def _placed(self) -> AbstractContextManager:
        if self._args.states_on_nvme:
            return nullcontext()  # which states those are goes by names, which `_prepare` knows
        return zinf_fx.offloading(placement=self._placement, **self._options())

    def _options(self) -> dict[str, object]:
        budgets = {name: getattr(self._args, name) for name in ("device_memory", "host_memory")}
        given = {} if self._placement == "device" else budgets
        return {"store": self._store, "pack": self._args.pack} | given

    def _prepare(self) -> None:
        args = self._args
        if args.states_on_nvme:
            divided = with_states_on_nvme(PRESETS[self._placement], self.model, args.states_on_nvme)
            zinf_fx.offload(self.model, placement=divided, **self._options())
        self._loss = torch.compile(self.model, backend="zinf", options={"activations": args.activations})
        if args.optimizer != "none":
            forms = {"state_dtype": args.state_dtype, "master_dtype": args.master_dtype}
            given = {name: form for name, form in forms.items() if form is not None} | OPTIMIZERS[args.optimizer]
            self._optimizer = zinf_fx.optim.AdamW(self.model.parameters(), **given, **OPTIONS)

    def end(self) -> None:
        if self._optimizer is not None:
            self._optimizer.finish()


def with_states_on_nvme(placement: Placement, model: nn.Module, share: float) -> dict[str, object]:
    """Return a placement with the optimizer's states of the first parameters, this share of all elements, on NVMe."""
    left = share * sum(parameter.numel() for parameter in model.parameters())
    tiers: dict[str, Tier] = {}
    for name, parameter in model.named_parameters():
        tiers[name] = "nvme" if left > 0 else placement.optimizer
        left -= parameter.numel()
    return asdict(placement) | {"optimizer": lambda name, parameter: tiers[name]}


class DeepSpeed(Training):
    """Through DeepSpeed's ZeRO-3, with parameters and optimizer states in host memory."""

    def _prepare(self) -> None:
        import deepspeed

        os.environ |= RANK
        in_host = {"device": "cpu", "pin_memory": self._device.type == "cuda"}
        told = {
            "train_micro_batch_size_per_gpu": self._args.batch,
            "bf16": {"enabled": self._dtype == torch.bfloat16},
            "optimizer": {"type": "AdamW", "params": OPTIONS},
            "zero_optimization": {"stage": 3, "offload_param": in_host, "offload_optimizer": in_host},
        }
        deepspeed.init_distributed(dist_backend="nccl" if self._device.type == "cuda" else "gloo")
        self._loss, *_ = deepspeed.initialize(model=self.model, model_parameters=self.model.parameters(), config=told)

    def _backward(self, loss: Tensor) -> None:
        self._loss.backward(loss)

    def _update(self) -> None:
        self._loss.step()


def training_in(way: str, args: argparse.Namespace, store: str) -> Training:
    if way == IN_MEMORY:
        return Training(args, store)
    return DeepSpeed(args, store) if way == DEEPSPEED else Offloaded(args, store, way)


def measured(args: argparse.Namespace, way: str, store: str, hardware: Hardware | None) -> Row:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    training = training_in(way, args, store)
    say(f"{way}: built")
    is_ours = isinstance(training, Offloaded)
    with zinf_fx.record(training.model) if is_ours else nullcontext() as recording:
        *_, first, _ = training.step()
    say(f"{way}: first step {first:.1f} s")
    for _ in range(args.warmup):
        training.step()
    apart: Sequence[float | None] = [None] * 3
    if args.optimizer in ("sync", "none"):
        *parts, _ = zip(*(training.step() for _ in range(args.steps)), strict=True)
        apart = [median(seconds) for seconds in parts]
    in_a_row, loss = training.in_a_row(args.steps)
    simulated = None
    if hardware is not None and is_ours:
        how = {"overlap": args.optimizer == "overlap", "in_backward": args.optimizer == "in-backward"}
        simulated = simulate_plan(recording.plans[0], hardware, **how).seconds
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in training.model.parameters())
    shown = ", ".join(f"{seconds:.4f}" for seconds in (*apart, in_a_row) if seconds is not None)
    say(f"{way}: {shown} s")
    return Row(way, count, first, *apart, in_a_row, peak, loss.item(), simulated)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Row], args: argparse.Namespace) -> str:
    plain = rows[0] if rows[0].way == IN_MEMORY else None
    has_parts = rows[0].step is not None
    tokens = args.batch * args.context
    heads = ["", "forward s", "backward s", "step s", "in a row s"]
    heads += ["forward\n/ plain", "backward\n/ plain", "both\n/ plain", "in a row\n/ plain"]
    heads += ["tokens\nper s", "TFLOP/s", "device\nGiB", "simulated\ns", "loss", "first\nstep s"]
    cells = []
    for row in rows:
        ratios = [""] * 4
        if plain is not None:
            ratios[3] = f"{row.in_a_row / plain.in_a_row:.3f}"
        if plain is not None and has_parts:
            both = (row.forward + row.backward) / (plain.forward + plain.backward)
            alone = row.forward / plain.forward, row.backward / plain.backward
            ratios[:3] = [f"{ratio:.3f}" for ratio in (*alone, both)]
        rate = tokens / row.in_a_row
        cells.append(
            [
                row.way,
                *(
                    "" if seconds is None else f"{seconds:.4f}"
                    for seconds in (row.forward, row.backward, row.step, row.in_a_row)
                ),
                *ratios,
                f"{rate:,.0f}",
                f"{6 * row.parameters * rate / 1e12:.1f}",
                f"{row.device_bytes / 2**30:.1f}",
                "" if row.simulated is None else f"{row.simulated:.4f}",
                f"{row.loss:.4f}",
                f"{row.first:.1f}",
            ]
        )
    return tabulate(cells, heads, disable_numparse=True, colalign=("left", *["right"] * (len(heads) - 1)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-303m")
    parser.add_argument("--batch", type=int, default=64, help="sequences")
    parser.add_argument("--context", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    ways = [IN_MEMORY, "device", "zero-offload", "infinity-cpu", "infinity-nvme"]
    known = [*ways, "host", "nvme", DEEPSPEED]
    parser.add_argument("--ways", nargs="+", choices=known, default=ways, help="presets of a placement, and plain")
    parser.add_argument("--optimizer", choices=(*OPTIMIZERS, "none"), default="sync")
    parser.add_argument("--state-dtype", choices=("8bit",), help="of AdamW's moments")
    parser.add_argument("--master-dtype", choices=("split",), help="of masters of bf16 parameters")
    parser.add_argument(
        "--states-on-nvme", type=float, default=0.0, metavar="SHARE", help="of the states of zinf's AdamW, from 0 to 1"
    )
    parser.add_argument("--activations", choices=("keep", "recompute", "offload"), default="keep")
    parser.add_argument(
        "--device-memory", help="budget, as 60GiB: parameters stay there between steps where it has room"
    )
    parser.add_argument("--host-memory", help="budget, as 100GiB")
    parser.add_argument("--pack", default="auto", help="bytes of what moves together at most, as 32MiB")
    parser.add_argument("--warmup", type=int, default=2, help="steps after the first one, before those that are timed")
    parser.add_argument("--steps", type=int, default=8, help="timed ones")
    parser.add_argument("--simulate", action=argparse.BooleanOptionalAction, default=True, help="predict steps, too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    check(options, args, "batch", "context", "steps")
    if not 0 <= args.states_on_nvme <= 1:
        options.error(f"--states-on-nvme {args.states_on_nvme} is not a share, from 0 to 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        options.error("there is no CUDA device; --device cpu tries the program with a tiny model")
    if DEEPSPEED in args.ways and (args.optimizer == "none" or not installed()):
        options.error("DeepSpeed has to be installed, and runs with an optimizer")
    args.ways.sort(key=lambda way: (way != IN_MEMORY, way == DEEPSPEED))  # whose process group stays
    torch.set_float32_matmul_precision("high")
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        hardware = measure_machine(args.store or directory) if args.simulate else None
        for way in args.ways:
            rows.append(measured(args, way, args.store or directory, hardware))
            torch.compiler.reset()
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    if args.json:
        print(json.dumps({"machine": machine(), "gpu": name, "torch": torch.__version__, "rows": [*map(asdict, rows)]}))
        return 0
    print(f"{name}, {machine()}; torch {torch.__version__}")
    print(
        f"{args.model}, {rows[0].parameters:,} parameters, {args.dtype}, batch {args.batch} x {args.context}, "
        f"optimizer {args.optimizer}, activations {args.activations}; medians of {args.steps} steps\n"
    )
    print(table(rows, args), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
