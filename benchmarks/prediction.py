"""Compare predicted with measured seconds: simulate and run a training step of several configurations on this machine.

    python benchmarks/prediction.py                  # minutes
    python benchmarks/prediction.py --scale 0.5      # smaller models
    python benchmarks/prediction.py --updates 48000000 --threads 1 2    # of the optimizer's step alone

In each configuration, something else takes most of the time. `zinf-fx simulate --hardware this-machine` predicts the
step in the same way: from the plan, the operators' measured seconds, and the measured rates of the disk and the memory.
Measuring the machine, predicting and training alternate, because both sides of the ratio should see the same machine;
the table has the medians over the rounds.

`--updates` compares the optimizer's step instead: of so many bf16 parameters in host memory, for each form of states,
with the update rates that `this-machine` has for so many threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from tqdm import tqdm

import zinf_fx
from zinf_fx.frontend.explain import plan_model
from zinf_fx.machine.machine import measure_machine, update_rates
from zinf_fx.plan.hardware import Hardware
from zinf_fx.plan.simulation.simulate import simulate_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import check, computing_with
from gpt import GPT, GPTConfig, default_dtype, example_batch
from linear_layers import example_input, linear_layers
from train_step import machine
from train_step_variant import OPTIONS

FORMS: dict[str, dict[str, object]] = {
    "fp32 masters and moments": {},
    "bf16 moments": {"state_dtype": torch.bfloat16},
    "8-bit moments, split masters": {"state_dtype": "8bit", "master_dtype": "split"},
}


@dataclass(frozen=True)
class Case:
    """A case is a model, a batch of sequences of its context, and options of `zinf_fx.offloading`.

    Attributes:
        frozen: the matrices are not trained, as when adapters are.
        overlap: the optimizer's step goes on in the next forward pass.
    """

    name: str
    model: GPTConfig
    batch: int
    options: dict[str, object]
    frozen: bool = False
    overlap: bool = False


def cases(scale: float) -> list[Case]:
    """Return all cases, with hidden sizes `scale` times as large."""

    def gpt(layers: int, hidden: int, context: int) -> GPTConfig:
        return GPTConfig(layers=layers, hidden=max(64, int(hidden * scale) // 64 * 64), heads=8, context=context)

    states = {"parameters": "device", "gradients": "device", "optimizer": "nvme"}
    activations = {"activations": "nvme"}
    frozen = {"parameters": "nvme"}
    compiled = {"placement": "nvme", "compute": "inductor"}
    return [
        Case("compute", gpt(6, 768, 256), 8, {"placement": "device"}),
        Case("disk: frozen weights are read", gpt(6, 2560, 16), 1, {"placement": frozen, "residency": False}, True),
        Case("disk: states are read and written", gpt(6, 1792, 32), 1, {"placement": states}),
        Case("activations", gpt(8, 512, 512), 8, {"placement": activations, "activations": "offload"}),
        Case("everything on NVMe", gpt(6, 1536, 128), 4, {"placement": "nvme"}),
        Case("the same, the optimizer overlaps", gpt(6, 1536, 128), 4, {"placement": "nvme"}, overlap=True),
        Case("the same, compiled regions", gpt(6, 1536, 128), 4, compiled, overlap=True),
    ]


@dataclass
class Subject:
    """Train and predict a case on this machine.

    Attributes:
        measured: seconds of each measured step.
        predicted: seconds of a step in each prediction.
        busy: the share of the last predicted step for which each resource works.
    """

    case: Case
    store: str
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = example_batch(self.case.model, self.case.batch)
        with default_dtype(torch.bfloat16), zinf_fx.offloading(store=self.store, **self.case.options):
            self.model = self._freeze(GPT(self.case.model))
        self._loss = torch.compile(self.model, backend="zinf")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = zinf_fx.optim.AdamW(trained, overlap=self.case.overlap, **OPTIONS)
        for _ in range(2):
            self._step()

    def train(self, steps: int) -> None:
        """Measure some steps, after one that isn't counted."""
        self._step()
        for _ in range(steps):
            start = time.perf_counter()
            self._step()
            self.measured.append(time.perf_counter() - start)

    def predict(self) -> None:
        """Measure the machine and the operators, and predict a step from that."""
        hardware = measure_machine(self.store)
        with default_dtype(torch.bfloat16), torch.device("meta"):
            model = self._freeze(GPT(self.case.model))
        planning = plan_model(model, self.batch, store=self.store, timed=True, **self.case.options)
        (plan,), (seconds,) = planning.plans, planning.seconds
        simulation = simulate_plan(plan, hardware, seconds, overlap=self.case.overlap)
        self.predicted.append(simulation.seconds)
        self.busy = simulation.utilisation

    def _freeze(self, model: GPT) -> GPT:
        for parameter in model.parameters() if self.case.frozen else ():
            parameter.requires_grad_(parameter.ndim < 2)
        return model

    def _step(self) -> None:
        self._loss(*self.batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def run(args: argparse.Namespace, store: str) -> list[dict[str, object]]:
    results = []
    chosen = cases(args.scale)
    with tqdm(total=len(chosen) * args.rounds, unit="round", disable=not sys.stderr.isatty()) as bar:
        for case in chosen:
            bar.set_postfix_str(case.name)
            subject = Subject(case, store)
            for _ in range(args.rounds):
                subject.predict()
                subject.train(args.steps)
                bar.update()
            measured, predicted = median(subject.measured), median(subject.predicted)
            results.append(
                {
                    "case": case.name,
                    "parameters": sum(p.numel() for p in subject.model.parameters()),
                    "measured": measured,
                    "predicted": predicted,
                    "ratio": predicted / measured,
                    "measured_range": (min(subject.measured), max(subject.measured)),
                    "predicted_range": (min(subject.predicted), max(subject.predicted)),
                    "busy": subject.busy,
                }
            )
            del subject
            torch.compiler.reset()
            gc.collect()
    return results


class Updates:
    """Step layers by AdamW whose states are in host memory, in one form.

    Attributes:
        count: how many parameters they have.
    """

    def __init__(self, parameters: int, form: dict[str, object], store: str) -> None:
        self._options = {"placement": "host", "store": store}
        self._batch = (example_input(),)
        self._parameters, self._form = parameters, form
        model = zinf_fx.offload(linear_layers(parameters), **self._options)
        self.count = sum(parameter.numel() for parameter in model.parameters())
        self._optimizer = zinf_fx.optim.AdamW(model.parameters(), overlap=False, **form, **OPTIONS)
        torch.compile(model, backend="zinf")(*self._batch).float().sum().backward()
        for _ in range(2):
            self.seconds()

    def seconds(self) -> float:
        """Take a step over the same gradients, and return its seconds."""
        start = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - start

    def predicted(self, hardware: Hardware) -> float:
        """Return the seconds of the same step as simulated."""
        with torch.device("meta"):
            model = linear_layers(self._parameters)
        (plan,) = plan_model(model, self._batch, **self._options, **self._form).plans
        simulation = simulate_plan(plan, hardware, overlap=False)
        timed = zip(simulation.jobs, simulation.timings, strict=True)
        return sum(timing.end - timing.start for job, timing in timed if job.kind == "update")


def run_updates(args: argparse.Namespace, store: str) -> list[dict[str, object]]:
    """Return a row for each number of threads and form of states."""
    rows: list[dict[str, object]] = []
    hardware = measure_machine(store)
    for threads in args.threads:
        with computing_with(threads):
            subjects = {name: Updates(args.updates, form, store) for name, form in FORMS.items()}
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in FORMS}
            for _ in range(args.rounds):
                rated = replace(hardware, updates=update_rates(threads))
                for name, subject in subjects.items():
                    measured = median(subject.seconds() for _ in range(args.steps))
                    times[name].append((measured, subject.predicted(rated)))
        for name, pairs in times.items():
            measured, predicted = (median(seconds) for seconds in zip(*pairs, strict=True))
            ratio = median(of_rate / of_step for of_step, of_rate in pairs)
            rows.append(
                {
                    "threads": threads,
                    "states": name,
                    "parameters": subjects[name].count,
                    "measured": measured,
                    "predicted": predicted,
                    "ratio": ratio,
                }
            )
        del subjects
        torch.compiler.reset()
        gc.collect()
    return rows


def table(results: Sequence[dict]) -> str:
    rows = [
        [
            r["case"],
            f"{r['parameters']:,}",
            f"{r['measured']:.3f}",
            "{:.3f}-{:.3f}".format(*r["measured_range"]),
            f"{r['predicted']:.3f}",
            "{:.3f}-{:.3f}".format(*r["predicted_range"]),
            f"{r['ratio']:.2f}",
            *(f"{r['busy'][name]:.0%}" for name in ("compute", "disk")),
        ]
        for r in results
    ]
    headers = ["most of the time", "parameters", "measured\ns", "", "predicted\ns", "", "ratio"]
    headers += ["compute\nbusy", "disk\nbusy"]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description="Predicted beside measured seconds of a training step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--scale", type=float, default=1.0, help="of the models' hidden sizes")
    options.add_argument("--rounds", type=int, default=3, help="each measures the machine, predicts and trains")
    options.add_argument("--steps", type=int, default=3, help="measured steps of a round")
    options.add_argument("--updates", type=int, metavar="N", help="the optimizer's step of so many parameters instead")
    options.add_argument("--threads", type=int, nargs="+", default=[1], help="that update, with --updates")
    options.add_argument("--store", metavar="DIR", help="on the disk to use; default a temporary directory")
    options.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = options.parse_args(arguments)
    if args.rounds < 1 or args.steps < 1 or not 0 < args.scale <= 4:
        options.error("--rounds and --steps must be at least 1, --scale above 0 and up to 4")
    check(options, args, "threads", *(["updates"] if args.updates is not None else []))
    with tempfile.TemporaryDirectory(prefix="prediction-") as directory:
        results = (run if args.updates is None else run_updates)(args, args.store or directory)
    if args.json:
        print(json.dumps(results))
    elif args.updates is not None:
        print(f"{machine()}; torch {torch.__version__}; bf16 parameters, AdamW\n")
        print(tabulate(results, headers="keys", floatfmt=".3f", intfmt=","))
    else:
        print(f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads; bfloat16\n")
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
