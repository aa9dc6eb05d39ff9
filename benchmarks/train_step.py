"""Time and memory of one training step: plain PyTorch in memory, eager and compiled, and zinf with its states on disk.

    python benchmarks/train_step.py                                   # the 303 M-parameter GPT, minutes
    python benchmarks/train_step.py --layers 4 --hidden 256 --heads 4 --context 128
    python benchmarks/train_step.py --device cuda --batch 32          # the model on the GPU in every variant

Every run of a variant is a process of its own, so that peak memory is its own. The variants alternate, and ratios are
taken between the runs of one round: a machine that slows down for a minute slows all of them. The optimizer's seconds
end when ``step`` returns; what it does after that is waited for in the next forward, and counted there. ``zinf-sync``
ends it within ``step``, so that its forward and backward are what those take alone. ``zinf-in-backward`` updates
parameters in backward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from arguments import add_gpt, check
from processes import answer_of
from tabulate import tabulate
from tqdm import tqdm
from turns import in_turns

VARIANTS = ("eager", "compile", "zinf", "zinf-in-backward", "zinf-sync")
# What zinf_fx.optim.AdamW gets.
OVERLAPS = {"zinf": {"overlap": True}, "zinf-in-backward": {"step_in_backward": True}, "zinf-sync": {"overlap": False}}
WORKER = Path(__file__).with_name("train_step_variant.py")


def run_variant(request: dict) -> dict:
    """Return what ``train_step_variant.measure`` returns, from a fresh process."""
    return answer_of(f"variant {request['variant']}", WORKER, json.dumps(request))


def run_rounds(requests: Sequence[dict], repeats: int) -> list[dict[str, dict]]:
    """Return ``repeats`` rounds, each ``{variant: result}``; every other round runs in the opposite order."""
    rounds: list[dict[str, dict]] = [{} for _ in range(repeats)]
    with tqdm(total=repeats * len(requests), unit="run", disable=not sys.stderr.isatty()) as bar:
        for number, request in in_turns(requests, repeats):
            bar.set_postfix_str(request["variant"])
            rounds[number][request["variant"]] = run_variant(request)
            bar.update()
    return rounds


def summarise(rounds: Sequence[dict[str, dict]], variant: str) -> dict:
    """Return the medians over all measured steps of all rounds, and the median over rounds of the ratio to each other
    variant."""
    results = [results[variant] for results in rounds]

    def ratio(key: str, baseline: str) -> float:
        return median(median_of(r[variant][key]) / median_of(r[baseline][key]) for r in rounds)

    parts = ("step", "forward", "backward", "optimizer")
    return {
        "variant": variant,
        **{part: median(seconds for result in results for seconds in result[part]) for part in parts},
        "fastest_step": min(seconds for result in results for seconds in result["step"]),
        "first_step": median(result["first_step"] for result in results),
        "peak_resident_bytes": max(result["peak_resident_bytes"] for result in results),
        "rusage_maxrss_bytes": max(result["rusage_maxrss_bytes"] for result in results),
        "peak_device_bytes": max(result["peak_device_bytes"] for result in results),
        "read_per_parameter": median(result["read_per_parameter"] for result in results),
        "written_per_parameter": median(result["written_per_parameter"] for result in results),
        "step_ratio": {baseline: ratio("step", baseline) for baseline in rounds[0]},
        "peak_ratio": {baseline: ratio("peak_resident_bytes", baseline) for baseline in rounds[0]},
    }


def optimizer_share(rounds: Sequence[dict[str, dict]], variant: str) -> float:
    """Return the part of a variant's step that forward and backward alone would not take, by the median over rounds."""

    def alone(results: dict[str, dict]) -> float:
        sync = results["zinf-sync"]
        return median_of(sync["forward"]) + median_of(sync["backward"])

    return median(1 - alone(results) / median_of(results[variant]["step"]) for results in rounds)


def median_of(value: float | list[float]) -> float:
    return median(value) if isinstance(value, list) else value


def table(summaries: Sequence[dict]) -> str:
    parts = ("step", "forward", "backward", "optimizer", "fastest_step", "first_step")
    baselines = [name for name in ("eager", "compile") if name in summaries[0]["step_ratio"]]
    headers = ["variant", "s per\nstep", "forward", "backward", "optimizer", "fastest\nstep", "first\nstep"]
    headers += [f"time /\n{name}" for name in baselines]
    on_gpu = any(s["peak_device_bytes"] for s in summaries)
    headers += ["peak\nGiB", *(f"peak /\n{name}" for name in baselines)]
    headers += [*(["device\nGiB"] if on_gpu else []), "B/param\nread", "B/param\nwritten"]
    rows = [
        [
            s["variant"],
            *(f"{s[part]:.3f}" for part in parts),
            *(f"{s['step_ratio'][name]:.2f}" for name in baselines),
            f"{s['peak_resident_bytes'] / 2**30:.2f}",
            *(f"{s['peak_ratio'][name]:.2f}" for name in baselines),
            *([f"{s['peak_device_bytes'] / 2**30:.2f}"] if on_gpu else []),
            *(
                f"{s[moved]:.2f}" if s["variant"].startswith("zinf") else "-"
                for moved in ("read_per_parameter", "written_per_parameter")
            ),
        ]
        for s in summaries
    ]
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * (len(headers) - 1)))


def compare_losses(rounds: Sequence[dict[str, dict]], exact: bool = True) -> tuple[list[str], bool]:
    """Return lines that compare every variant's losses with eager's, and whether those that must be bitwise equal are.

    Inductor's fused kernels round differently, and so do a GPU and the CPU, which steps what is not on the device: then
    not `exact`."""
    reference = "eager"
    compared = [variant for variant in rounds[0] if variant != reference]
    expected = rounds[0][reference]["losses"]
    lines, passed = [], True
    for variant in compared:
        must_equal = exact and variant != "compile"
        for number, results in enumerate(rounds, start=1):
            losses = results[variant]["losses"]
            differing = [step for step, pair in enumerate(zip(expected, losses, strict=True)) if pair[0] != pair[1]]
            if not differing:
                lines.append(f"round {number}: {variant} = {reference}: {len(losses)} losses bitwise equal")
                continue
            finite = all(map(math.isfinite, losses))
            worst = max(abs(a - b) for a, b in zip(expected, losses, strict=True)) if finite else math.nan
            passed = passed and not must_equal and finite
            lines.append(
                f"round {number}: {variant} differs from {reference} in {len(differing)} of {len(losses)} losses, "
                f"first at step {differing[0]} ({losses[differing[0]]!r}, not {expected[differing[0]]!r}), "
                f"by at most {worst:.3g}" + (": they must be bitwise equal" if must_equal else "")
            )
    return lines, passed


def machine() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare a training step in memory with one through zinf.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model and batch")
    add_gpt(model, context=512)
    model.add_argument("--batch", type=int, default=4)
    model.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="AdamW's states are fp32")
    model.add_argument("--clip", type=float, help="clip the gradients' norm to this")
    model.add_argument("--seed", type=int, default=0)
    runs = parser.add_argument_group("runs")
    runs.add_argument("--variants", nargs="+", choices=VARIANTS, default=["eager", "compile", "zinf", "zinf-sync"])
    runs.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    runs.add_argument("--steps", type=int, default=4, help="measured steps")
    runs.add_argument("--repeats", type=int, default=2, help="runs of each variant")
    runs.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models compute")
    runs.add_argument("--store", type=Path, metavar="DIR", help="in place of $ZINF_STORE or the user cache")
    runs.add_argument("--placement", default="infinity-nvme", help="a preset of zinf_fx.Config")
    runs.add_argument(
        "--check", action="store_true", help="compare losses; exit with 1 unless eager equals zinf bitwise (on the CPU)"
    )
    runs.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(arguments)
    check(options, args, "layers", "hidden", "heads", "context", "batch", "steps", "repeats")
    if args.warmup < 0:
        options.error(f"--warmup must be at least 0, not {args.warmup}")
    if args.clip is not None and "zinf-in-backward" in args.variants:
        options.error("--clip needs gradients after backward, and zinf-in-backward has consumed them: leave one out")
    if args.check and (len(set(args.variants)) < 2 or "eager" not in args.variants):
        options.error("--check compares other variants with eager: name both in --variants")
    variants = [name for name in VARIANTS if name in args.variants]
    offloading = {"placement": args.placement} | ({"store": str(args.store)} if args.store else {})
    requests = [
        {
            "variant": variant,
            "model": {name: getattr(args, name) for name in ("layers", "hidden", "heads", "context")},
            **{name: getattr(args, name) for name in ("batch", "dtype", "clip", "seed", "warmup", "steps", "device")},
            "offloading": offloading,
            "optimizer": OVERLAPS.get(variant, {}),
        }
        for variant in variants
    ]
    rounds = run_rounds(requests, args.repeats)
    summaries = [summarise(rounds, variant) for variant in variants]
    first = rounds[0][variants[0]]
    comparison, passed = compare_losses(rounds, args.device == "cpu") if args.check else ([], True)
    if args.json:
        about = {"machine": machine(), "torch": first["torch"], "parameters": first["parameters"]}
        print(
            json.dumps(about | {"summaries": summaries, "comparison": comparison, "passed": passed, "rounds": rounds})
        )
    else:
        print(f"{first['gpu']}{machine()}; torch {first['torch']}, {first['threads']} threads")
        print(
            f"GPT {args.layers} x {args.hidden}, {first['parameters']:,} parameters, {args.dtype}, "
            f"batch {args.batch} x {args.context}; zinf: {args.placement}"
        )
        print(f"medians of {args.repeats} runs of {args.steps} steps after {args.warmup}; ratios within each round\n")
        print(table(summaries))
        for variant in ("zinf", "zinf-in-backward"):
            if {variant, "zinf-sync"} <= set(variants):
                print(f"\nthe optimizer's share of {variant}'s step: {optimizer_share(rounds, variant):.1%}")
        print("".join(f"\n{line}" for line in comparison))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
