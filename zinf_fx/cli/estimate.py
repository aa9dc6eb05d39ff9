"""`zinf-fx estimate`: what training a model takes on given hardware: memory, bandwidth, time and wear."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zinf_fx.analysis import papers
from zinf_fx.analysis.papers import table as papers_table
from zinf_fx.analysis.partitioning import PARTITIONED
from zinf_fx.cli.machine import THIS_MACHINE, hardware_of
from zinf_fx.cli.target import HELP, TargetError, build
from zinf_fx.config import parse_bytes, parse_count, parse_positive, parse_rate
from zinf_fx.errors import ConfigError, ZinfError
from zinf_fx.estimate import Estimate, Workload, estimate, of_module, of_transformer
from zinf_fx.estimate.table import render
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import Hardware, Link

_DIMENSIONS = ("layers", "hidden", "heads", "batch", "sequence")


def add_to(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "estimate",
        help="what training a model takes: memory, bandwidth, time, wear",
        description="Estimates training with Adam from the formulas of the ZeRO and ZeRO-Infinity papers: the memory "
        "of each state, which placement is the first to fit, the bandwidth that an efficiency takes, the time of a "
        "step, and how fast it wears the disks. The model is a TARGET, or a Transformer of given dimensions.",
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=HELP + "; the inputs are one device's")
    model = parser.add_argument_group("a Transformer")
    model.add_argument("--layers", metavar="N", help="blocks")
    model.add_argument("--hidden", metavar="N", help="hidden size")
    model.add_argument("--heads", metavar="N", help="attention heads")
    model.add_argument("--batch", metavar="N", help="sequences per device")
    model.add_argument("--sequence", metavar="N", help="tokens per sequence")
    model.add_argument("--checkpoint-interval", metavar="N", help="blocks per activation checkpoint (default 1)")
    model.add_argument("--dtype", choices=descriptions.DTYPES, help="default: the hardware's 16-bit one")
    parser.add_argument(
        "--optimizer-bytes", metavar="N", help="states per parameter (default 12, of fp32 8; ZeRO-Infinity counts 16)"
    )
    cluster = parser.add_argument_group("hardware")
    cluster.add_argument(
        "--hardware",
        metavar="NAME",
        default="dgx-2",
        help=f"{', '.join(descriptions.names())}, a TOML file, or {THIS_MACHINE}, which is measured; default: dgx-2",
    )
    cluster.add_argument("--store", metavar="DIR", type=Path, help=f"the disk of {THIS_MACHINE}; default: Config()'s")
    cluster.add_argument("--nodes", metavar="N", help="instead of the description's, as all below")
    cluster.add_argument("--gpus-per-node", metavar="N", help="devices of a node")
    cluster.add_argument("--device-memory", metavar="SIZE", help="of one device, such as 80GiB")
    cluster.add_argument("--host-memory", metavar="SIZE", help="of one node, such as 2TiB")
    cluster.add_argument("--nvme", metavar="SIZE", help="capacity of one node, such as 30TB")
    cluster.add_argument("--nvme-bandwidth", metavar="RATE", help="of one node: RATE, or READ,WRITE, such as 25GB/s")
    cluster.add_argument("--host-bandwidth", metavar="RATE", help="between host memory and each device, such as 3GB/s")
    cluster.add_argument("--link-bandwidth", metavar="RATE", help="that a collective of all devices sees")
    cluster.add_argument("--peak", metavar="TFLOPS", help="TFLOP/s that a device achieves when it waits for nothing")
    cluster.add_argument("--endurance", metavar="SIZE", help="bytes that a node's drives may be written, such as 1.2PB")
    parser.add_argument("--placement", metavar="PRESET", help=f"{', '.join(PARTITIONED)}; default: the first to fit")
    parser.add_argument(
        "--efficiency", metavar="E", nargs="+", default=["0.5", "0.9"], help="to give bandwidths for (0.5 0.9)"
    )
    parser.add_argument(
        "--reproduce", action="store_true", help="print the papers' tables beside the formulas' figures"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes and seconds")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the estimate. Raises: ZinfError for whatever of the input can't be used."""
    if options.reproduce:
        _reproduce(options)
        return
    wanted = [parse_positive(text, "efficiency") for text in options.efficiency]
    machine = _hardware(options)
    workload = _workload(options, machine)
    if options.peak is not None:
        peak = parse_positive(options.peak, "peak") * 1e12
        machine = replace(machine, achievable=1.0, peak={**machine.peak, workload.dtype: peak})
    found = estimate(workload, machine, wanted=wanted, preset=options.placement)
    print(json.dumps(_data(found), indent=1) if options.json else render(found), end="\n" if options.json else "")


def _reproduce(options: argparse.Namespace) -> None:
    given = [name for name in ("target", *_DIMENSIONS) if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"reproduce takes no model, and {', '.join(given)} was given: leave one of them out")
    tables = list(papers.comparisons())
    if options.json:
        print(json.dumps([asdict(one) for one in tables], indent=1))
    else:
        print("\n".join(papers_table.render(one) for one in tables), end="")


# -- the model --------------------------------------------------------------------------------------------------------


def _workload(options: argparse.Namespace, machine: Hardware) -> Workload:
    optimizer_bytes = None
    if options.optimizer_bytes is not None:
        optimizer_bytes = parse_count(options.optimizer_bytes, "optimizer-bytes")
    given = {name: text for name in _DIMENSIONS if (text := getattr(options, name)) is not None}
    if options.target is not None:
        of_dimensions = [
            *given,
            *(name for name in ("checkpoint_interval", "dtype") if getattr(options, name) is not None),
        ]
        if of_dimensions:
            named = ", ".join(name.replace("_", "-") for name in of_dimensions)
            raise ConfigError(f"the target {options.target} has its own dimensions: leave out {named}")
        return _of_target(options.target, optimizer_bytes)
    if missing := [name for name in _DIMENSIONS if name not in given]:
        needed = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(f"no model: give a TARGET, or dimensions ({needed} missing)")
    dimensions = {name: parse_count(text, name) for name, text in given.items()}
    interval = (
        1 if options.checkpoint_interval is None else parse_count(options.checkpoint_interval, "checkpoint-interval")
    )
    if interval > dimensions["layers"]:
        raise ConfigError(f"checkpoint-interval={interval} is more than the {dimensions['layers']} layers")
    dtype = options.dtype or _half_precision(machine)
    return of_transformer(**dimensions, interval=interval, dtype=dtype, optimizer_bytes=optimizer_bytes)


def _half_precision(machine: Hardware) -> str:
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in machine.peak), "float32")


def _of_target(target: str, optimizer_bytes: int | None) -> Workload:
    model, inputs = build(target)
    try:
        return of_module(model, inputs, name=target, optimizer_bytes=optimizer_bytes)
    except ZinfError:
        raise
    except Exception as error:
        found = str(error).strip().splitlines() or [""]
        raise TargetError(
            f"running {target} on its example inputs, without values, raised {type(error).__name__}: {found[0]}"
        ) from error


# -- the hardware -----------------------------------------------------------------------------------------------------


def _hardware(options: argparse.Namespace) -> Hardware:
    """The description, with what was given instead."""
    machine = _described(options)
    changes: dict[str, Any] = {}
    if options.nodes is not None:
        changes["nodes"] = parse_count(options.nodes, "nodes")
    if options.gpus_per_node is not None:
        changes["ranks_per_node"] = parse_count(options.gpus_per_node, "gpus-per-node")
    for name, tier in (("device_memory", "device"), ("host_memory", "host"), ("nvme", "nvme")):
        if (text := getattr(options, name)) is not None:
            changes[tier] = replace(getattr(machine, tier), capacity=parse_bytes(text, name.replace("_", "-")))
    nvme = changes.get("nvme", machine.nvme)
    if options.nvme_bandwidth is not None:
        read, _, write = options.nvme_bandwidth.partition(",")
        read, write = parse_rate(read, "nvme-bandwidth"), parse_rate(write or read, "nvme-bandwidth")
        nvme = replace(nvme, read=read, write=write)
    if options.endurance is not None:
        nvme = replace(nvme, endurance=parse_bytes(options.endurance, "endurance"))
    changes["nvme"] = nvme
    if options.host_bandwidth is not None:
        changes["upload"] = changes["download"] = _link(machine.upload, options.host_bandwidth, "host-bandwidth")
    if options.link_bandwidth is not None:
        changes["in_node"] = _link(machine.in_node, options.link_bandwidth, "link-bandwidth")
        changes["between_nodes"] = _link(machine.between_nodes, options.link_bandwidth, "link-bandwidth")
    return replace(machine, **changes)


def _described(options: argparse.Namespace) -> Hardware:
    if options.hardware != THIS_MACHINE:
        if options.store is not None:
            raise ConfigError(f"store={str(options.store)!r} is only for --hardware {THIS_MACHINE}")
        return descriptions.load(options.hardware)
    if options.link_bandwidth is None and (options.nodes or options.gpus_per_node):
        raise ConfigError(f"{THIS_MACHINE} with other nodes or devices needs --link-bandwidth, which can't be measured")
    return hardware_of(THIS_MACHINE, options.store)


def _link(link: Link, text: str, name: str) -> Link:
    return replace(link, bandwidth=parse_rate(text, name))


# -- for programs -----------------------------------------------------------------------------------------------------


def _data(found: Estimate) -> dict[str, Any]:
    """The estimate, and what it derives."""
    data = asdict(found)
    data["chosen"] = found.chosen.preset if found.chosen else None
    for one, prediction in zip(data["predictions"], found.predictions, strict=True):
        one["fits"] = prediction.fits
        one["flops_serial"] = found.flops(prediction.serial)
        one["flops_overlapped"] = found.flops(prediction.overlapped)
    return data
