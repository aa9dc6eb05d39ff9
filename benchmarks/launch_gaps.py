"""Measure whether a GPU would ever wait for Python: a training step of Llama 8 B launches on a device that isn't there.

    python benchmarks/launch_gaps.py                                  # minutes; neither a GPU nor memory is needed
    python benchmarks/launch_gaps.py --layers 2 --placements nvme --profile
    python benchmarks/launch_gaps.py --placements infinity-cpu --real-updates 64000000

The stand-in (launch_queue.py) takes kernels and copies as long as a described machine would; what launches them is the
runtime, with its graphs, transfers, windows and arenas, as on a GPU. Of each kernel it is known when it could have
begun, and when it was launched: where that is later, the device waited for the program. Forward and backward passes
follow each other without an optimizer's step; with `--optimizer`, that of the CPU, after backward or in it, goes on in
a thread of its own, in the time that host memory takes for its bytes, and `step()` is the beginning of the next forward
pass. What the program waits for the optimizer, for values that aren't there yet, is told apart; what the two threads
cost each other by taking turns in Python is not modelled. Rows are medians over the steps.

`--real-updates` measures that cost: a second thread updates so many parameters in this machine's memory, step after
step, as the optimizer's thread does, and the program's time is that of the clock, with all that keeps it from going on.
Each placement is measured without that thread, too.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import torch
from arguments import check
from launch_queue import Launch, LaunchQueue
from linear_layers import example_input, linear_layers
from llama import Llama, LlamaConfig
from tabulate import tabulate
from torch.utils._python_dispatch import _disable_current_modes

import zinf_fx
from zinf_fx.config import Config
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.plan import Plan
from zinf_fx.plan.simulation.simulate import simulate_plan
from zinf_fx.processors import processors
from zinf_fx.runtime.tensor.tiers import Tiers

BUDGET = "400GiB"  # of host memory: address space, which is never touched


@dataclass(frozen=True)
class Pass:
    """The measured times of a forward or backward pass.

    Attributes:
        launches: the kernels of the pass.
        free: from when on the device was free for it; at the earliest, when the program began with it.
        program: seconds for which the program ran.
        waited: seconds for which the program waited, by what it waited for.
        awaited: the times in which the program waited for the optimizer, as (begin, end).
    """

    kind: str
    launches: Sequence[Launch]
    free: float
    program: float
    waited: dict[str, float]
    awaited: Sequence[tuple[float, float]] = ()

    @property
    def kernels(self) -> float:
        """Return the seconds of the kernels."""
        return sum(launch.end - launch.start for launch in self.launches)

    @property
    def seconds(self) -> float:
        """Return the seconds that the device takes, with its waits."""
        return self.launches[-1].end - self.free

    @property
    def awaiting_copies(self) -> float:
        """Return the seconds for which the device waited for copies."""
        return sum(max(launch.ready - max(launch.free, self.free), 0.0) for launch in self.launches)

    @property
    def awaiting_program(self) -> float:
        """Return the seconds for which the device waited for the program, and the program not for the optimizer."""
        return sum(launch.start - max(launch.ready, self.free) for launch in self.launches) - self.awaiting_optimizer

    @property
    def awaiting_optimizer(self) -> float:
        """Return the seconds for which the device waited for the program, and the program for the optimizer."""
        late = ((max(launch.ready, self.free), launch.start) for launch in self.launches if launch.start > launch.ready)
        return sum(
            max(min(end, until) - max(begin, since), 0.0) for begin, end in late for since, until in self.awaited
        )

    @property
    def busy(self) -> float:
        """Return the share of its time for which the device would compute if no copy ever kept it waiting."""
        return self.kernels / (self.kernels + self.awaiting_program)


def llama(layers: int) -> Llama:
    """Return a model in bf16, whose memory is not touched."""
    with torch.device("meta"):
        model = Llama(LlamaConfig(layers=layers))
    return model.to(torch.bfloat16).to_empty(device="cpu")


def one_device(hardware: Hardware) -> Hardware:
    """Return one device of a node, with its share of the node's memory and drives."""
    ranks = hardware.ranks_per_node
    host = replace(
        hardware.host,
        capacity=hardware.host.capacity // ranks,
        read=hardware.host.read / ranks,
        write=hardware.host.write / ranks,
    )
    nvme = replace(hardware.nvme, read=hardware.nvme.read / ranks, write=hardware.nvme.write / ranks)
    return replace(hardware, nodes=1, ranks_per_node=1, host=host, nvme=nvme)


def run(
    placement: str, args: argparse.Namespace, hardware: Hardware, counter: Callable[[], float] = time.thread_time
) -> tuple[list[list[Pass]], dict[str, float]]:
    """Return the passes of each step; and by their kind, the seconds that they take as simulated. `counter` counts the
    program's seconds, as for `Clock`."""
    options = {"placement": placement, "checksum": False, "host_memory": BUDGET, "residency": args.residency}
    queue = LaunchQueue(hardware, counter)
    with tempfile.TemporaryDirectory(dir=args.store) as store, ExitStack() as device:
        tiers = Tiers.of(Config(store=store, **options))
        queue.serve(tiers.store)
        device.enter_context(queue.standing_in())
        model = zinf_fx.offload(llama(args.layers), store=store, **options)
        step = torch.compile(model, backend="zinf")
        optimizer = None
        if args.optimizer is not None:
            with _disable_current_modes():  # it tries the class on a few elements
                optimizer = zinf_fx.optim.AdamW(model.parameters(), step_in_backward=args.optimizer == "in-backward")
        tokens = torch.empty((args.batch, args.sequence), dtype=torch.int64)
        profile = cProfile.Profile(queue.clock.now) if args.profile else None
        steps = []
        with zinf_fx.record(model, hardware=hardware) as recording:
            step(tokens, tokens).backward()
        (plan,) = recording.plans
        for number in range(args.warm + args.steps):
            if profile is not None and number == args.warm:
                profile.enable()
            passes: list[Pass] = []
            if optimizer is None:
                model.zero_grad()  # which waits until all gradients have left
            with Measuring(queue, "forward", passes):
                if optimizer is not None:
                    update(optimizer)
                loss = step(tokens, tokens)
            with Measuring(queue, "backward", passes):
                loss.backward()
            if number >= args.warm:
                steps.append(passes)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        if optimizer is not None:
            update(optimizer)
            optimizer.finish()
        del model, step, loss, tiers, optimizer
        torch._dynamo.reset()
        gc.collect()
    return steps, simulated(plan, hardware)


def update(optimizer: torch.optim.Optimizer) -> None:
    with _disable_current_modes():
        optimizer.step()
        optimizer.zero_grad()


def simulated(plan: Plan, hardware: Hardware) -> dict[str, float]:
    """Return the simulated seconds of the passes of a step after which nothing is under way any more."""
    simulation = simulate_plan(plan, hardware, overlap=False)
    ends = {job.kind: timing.end for job, timing in zip(simulation.jobs, simulation.timings, strict=True)}
    return {"forward": ends["forward"], "backward": ends["backward"] - ends["forward"]}


class RealUpdates:
    """In a block, let a thread update bf16 parameters in host memory, with split masters and 8-bit moments, one step
    after the other.

    Attributes:
        rate: the parameters that it updated per second, when the block is over.
    """

    def __init__(self, count: int, store: str | None) -> None:
        threads = max(processors().busy_threads - 1, 1)  # the thread that launches has a core
        model = zinf_fx.offload(linear_layers(count), store=store, placement="host", update_threads=threads)
        self._optimizer = zinf_fx.optim.AdamW(model.parameters(), state_dtype="8bit", master_dtype="split")
        self._count = sum(parameter.numel() for parameter in model.parameters())
        torch.compile(model, backend="zinf")(example_input()).sum().backward()
        self._ends, self._steps, self.rate = threading.Event(), 0, 0.0
        self._thread = ThreadPoolExecutor(1)

    def _work(self) -> None:
        while not self._ends.is_set():
            self._optimizer.step()
            self._optimizer.finish()
            self._steps += 1

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._working = self._thread.submit(self._work)

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        with self._thread:
            self._working.result()
        self.rate = self._steps * self._count / (time.perf_counter() - self._began)


class Measuring:
    """Measure a block as a pass, and append it to a list."""

    def __init__(self, queue: LaunchQueue, kind: str, passes: list[Pass]) -> None:
        self._queue, self._kind, self._passes = queue, kind, passes

    def __enter__(self) -> None:
        queue = self._queue
        self._began, self._waited = queue.clock.now(), dict(queue.clock.waited)
        self._waits = len(queue.clock.waits)
        self._first, self._free = len(queue.launches), max(queue.streams.compute.end, self._began)

    def __exit__(self, *error: object) -> None:
        clock = self._queue.clock
        waited = {what: seconds - self._waited.get(what, 0.0) for what, seconds in clock.waited.items()}
        program = clock.now() - self._began - sum(waited.values())
        launches = self._queue.launches[self._first :]
        awaited = [(since, until) for what, since, until in clock.waits[self._waits :] if what == "the optimizer"]
        if launches:
            self._passes.append(Pass(self._kind, launches, self._free, program, waited, awaited))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--sequence", type=int, default=2048)
    options.add_argument("--placements", nargs="+", default=["device", "infinity-cpu", "infinity-nvme"])
    options.add_argument("--hardware", default="dgx-h100", help="one device of it, with its share of the node")
    options.add_argument("--launch", type=float, help="seconds that PyTorch and the driver take for one, if not those")
    options.add_argument(
        "--optimizer", choices=("after-backward", "in-backward"), help="when the CPU updates (default: never)"
    )
    options.add_argument(
        "--real-updates", type=int, metavar="N", help="have a thread update so many parameters in memory meanwhile"
    )
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--warm", type=int, default=2, help="steps before them")
    options.add_argument("--store", help="a directory for the stand-in's empty files")
    options.add_argument("--residency", action="store_true", help="keep in memory what there is room for")
    options.add_argument("--profile", action="store_true", help="print where Python's time goes")
    args = options.parse_args()
    check(options, args, "layers", "batch", "sequence", "steps", *(["real_updates"] if args.real_updates else []))
    if args.real_updates and args.optimizer:
        options.error("--real-updates are measured in this machine's time, and --optimizer is modelled: give one")
    hardware = one_device(load(args.hardware))
    if args.launch is not None:
        hardware = replace(hardware, launch=args.launch)
    rows = []
    rates = []
    for placement in args.placements:
        counter = time.perf_counter if args.real_updates else time.thread_time
        steps, predicted = run(placement, args, hardware, counter)
        rows += [row(placement, passes, predicted[passes[0].kind]) for passes in zip(*steps, strict=True)]
        if args.real_updates:
            with (updates := RealUpdates(args.real_updates, args.store)):
                steps, predicted = run(placement, args, hardware, counter)
            name = f"{placement}, beside updates"
            rows += [row(name, passes, predicted[passes[0].kind]) for passes in zip(*steps, strict=True)]
            rates.append(updates.rate)
    print(f"batch {args.batch} x {args.sequence}, {args.layers} layers, one device of {hardware.name}")
    if rates:
        print(f"beside updates of {median(rates) / 1e6:.0f} million parameters per second")
    print(tabulate(rows, headers="keys", floatfmt=".3f"))


def row(placement: str, passes: Sequence[Pass], predicted: float) -> dict[str, object]:
    """Return the row of one kind of pass: medians over the steps, and `predicted`, the seconds as simulated."""

    def middle(what) -> float:
        return median(map(what, passes))

    return {
        "placement": placement,
        "pass": passes[0].kind,
        "launches": middle(lambda timed: len(timed.launches)),
        "us per launch": round(middle(lambda timed: timed.program / len(timed.launches)) * 1e6),
        "program s": middle(lambda timed: timed.program),
        "kernels s": middle(lambda timed: timed.kernels),
        "device s": middle(lambda timed: timed.seconds),
        "simulated s": predicted,
        "waits for copies s": middle(lambda timed: timed.awaiting_copies),
        "for the program s": middle(lambda timed: timed.awaiting_program),
        "for the optimizer s": middle(lambda timed: timed.awaiting_optimizer),
        "busy but for copies": middle(lambda timed: timed.busy),
        "not lost to the program": middle(lambda timed: 1 - timed.awaiting_program / timed.seconds),
        "program waited for": ", ".join(f"{k} {v:.2f} s" for k, v in passes[-1].waited.items() if v >= 0.005),
    }


if __name__ == "__main__":
    sys.exit(main())
