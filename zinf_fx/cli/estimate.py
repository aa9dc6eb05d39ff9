"""`zinf-fx estimate`: what training a model takes on given hardware: memory, bandwidth, time and wear."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from zinf_fx.analysis.papers import comparisons
from zinf_fx.analysis.papers.table import comparison_text
from zinf_fx.cli.arguments import saving_of
from zinf_fx.cli.machine import hardware_of
from zinf_fx.cli.target import build, running
from zinf_fx.config import parse_bytes, parse_count, parse_positive, parse_rate
from zinf_fx.errors import ConfigError
from zinf_fx.estimate import Estimate, Optimizer, Workload, estimate, of_module, of_transformer
from zinf_fx.estimate.table import estimate_text
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import THIS_MACHINE, Hardware

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
    found = estimate(workload, machine, wanted=wanted, preset=options.placement, **saving_of(options))
    print(json.dumps(_data(found), indent=1) + "\n" if options.json else estimate_text(found), end="")


def _reproduce(options: argparse.Namespace) -> None:
    if given := _given(options, ("target", *_DIMENSIONS)):
        raise ConfigError(f"reproduce takes no model, and {', '.join(given)} was given: leave one of them out")
    tables = comparisons()
    if options.json:
        print(json.dumps([asdict(one) for one in tables], indent=1))
    else:
        print("\n".join(comparison_text(one) for one in tables), end="")


# -- the model --------------------------------------------------------------------------------------------------------


def _workload(options: argparse.Namespace, machine: Hardware) -> Workload:
    optimizer = Optimizer(_count(options, "optimizer_bytes"), options.state_dtype, options.master_dtype)
    if optimizer.nbytes is not None and (given := _given(options, ("state_dtype", "master_dtype"))):
        named = ", ".join(given).replace("_", "-")
        raise ConfigError(f"optimizer-bytes has all states, and {named} was given: leave one of them out")
    if options.target is not None:
        if given := _given(options, (*_DIMENSIONS, "checkpoint_interval", "dtype", "lora")):
            named = ", ".join(given).replace("_", "-")
            raise ConfigError(f"the target {options.target} has its own dimensions: leave out {named}")
        model, inputs = build(options.target)
        with running(f"running {options.target} on its example inputs, without values,"):
            return of_module(model, inputs, name=options.target, optimizer=optimizer, frozen=options.frozen)
    given = _given(options, _DIMENSIONS)
    if missing := [f"--{name}" for name in _DIMENSIONS if name not in given]:
        raise ConfigError(f"no model: give a TARGET, or dimensions ({', '.join(missing)} missing)")
    dimensions = {name: parse_count(text, name) for name, text in given.items()}
    interval = _count(options, "checkpoint_interval") or 1
    if interval > dimensions["layers"]:
        raise ConfigError(f"checkpoint-interval={interval} is more than the {dimensions['layers']} layers")
    hidden, heads = dimensions["hidden"], dimensions["heads"]
    if hidden % heads:
        raise ConfigError(f"hidden={hidden} is no multiple of heads={heads}")
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in machine.peak), "float32")
    how = {"lora": _count(options, "lora"), "frozen": options.frozen, "optimizer": optimizer}
    return of_transformer(**dimensions, interval=interval, dtype=options.dtype or half, **how)


def _given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, str]:
    return {name: text for name in names if (text := getattr(options, name)) is not None}


def _count(options: argparse.Namespace, name: str) -> int | None:
    return None if (text := getattr(options, name)) is None else parse_count(text, name.replace("_", "-"))


# -- the hardware -----------------------------------------------------------------------------------------------------


# What stands in a description in place of its own, by option: how its value is read, and the fields that have it.
_REPLACED: dict[str, tuple[Callable[[str, str], object], tuple[str, ...]]] = {
    "nodes": (parse_count, ("nodes",)),
    "gpus_per_node": (parse_count, ("ranks_per_node",)),
    "device_memory": (parse_bytes, ("device.capacity",)),
    "host_memory": (parse_bytes, ("host.capacity",)),
    "nvme": (parse_bytes, ("nvme.capacity",)),
    "endurance": (parse_bytes, ("nvme.endurance",)),
    "host_bandwidth": (parse_rate, ("upload.bandwidth", "download.bandwidth")),
    "link_bandwidth": (parse_rate, ("in_node.bandwidth", "between_nodes.bandwidth")),
}


def _hardware(options: argparse.Namespace) -> Hardware:
    """The description, with what was given instead."""
    machine = _described(options)
    for option, text in _given(options, _REPLACED).items():
        read, places = _REPLACED[option]
        for place in places:
            machine = _with(machine, place, read(text, option.replace("_", "-")))
    if options.nvme_bandwidth is not None:
        read, _, write = options.nvme_bandwidth.partition(",")
        read, write = (parse_rate(rate, "nvme-bandwidth") for rate in (read, write or read))
        machine = replace(machine, nvme=replace(machine.nvme, read=read, write=write))
    return machine


def _with(described: Any, place: str, value: object) -> Any:
    """A description with another value at a place, such as "nvme.capacity"."""
    name, _, inside = place.partition(".")
    return replace(described, **{name: _with(getattr(described, name), inside, value) if inside else value})


def _described(options: argparse.Namespace) -> Hardware:
    if options.hardware != THIS_MACHINE:
        if options.store is not None:
            raise ConfigError(f"store={str(options.store)!r} is only for --hardware {THIS_MACHINE}")
        return descriptions.load(options.hardware)
    if options.link_bandwidth is None and (options.nodes or options.gpus_per_node):
        raise ConfigError(f"{THIS_MACHINE} with other nodes or devices needs --link-bandwidth, which can't be measured")
    return hardware_of(THIS_MACHINE, options.store)


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
