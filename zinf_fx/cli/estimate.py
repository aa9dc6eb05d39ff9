"""`zinf-fx estimate`: what training a model takes on given hardware: memory, bandwidth, time and wear."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from zinf_fx.analysis import papers
from zinf_fx.analysis.papers import table as papers_table
from zinf_fx.cli.arguments import THIS_MACHINE
from zinf_fx.cli.machine import hardware_of
from zinf_fx.cli.target import TargetError, build, said_once
from zinf_fx.config import parse_bytes, parse_count, parse_positive, parse_rate
from zinf_fx.errors import ConfigError, ZinfError
from zinf_fx.estimate import Estimate, Workload, estimate, of_module, of_transformer
from zinf_fx.estimate.table import render
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import Hardware, Link

_DIMENSIONS = ("layers", "hidden", "heads", "batch", "sequence")


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
        with said_once():
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
