"""`zinf-fx estimate`: what training a model takes on given hardware: memory, bandwidth, time and wear."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from zinf_fx.cli.arguments import saving_of
from zinf_fx.cli.machine import hardware_of
from zinf_fx.cli.target import build, running
from zinf_fx.config import parse_bytes, parse_count, parse_positive, parse_rate
from zinf_fx.errors import ConfigError
from zinf_fx.frontend.estimate import Estimate, Optimizer, Prediction, Workload, estimate, of_module, of_transformer
from zinf_fx.placement import TIERS, Tier
from zinf_fx.plan import hardware as descriptions
from zinf_fx.plan.hardware import THIS_MACHINE, Hardware
from zinf_fx.plan.show.checkpoint_bytes import checkpoints_text, days_text
from zinf_fx.sizes import in_words
from zinf_fx.tables import counted, digits, table

_DIMENSIONS = ("layers", "hidden", "heads", "batch", "sequence")


def run(options: argparse.Namespace) -> None:
    """Print the estimate. Raises: ZinfError for whatever of the input can't be used."""
    wanted = [parse_positive(text, "efficiency") for text in options.efficiency]
    optimizer = _optimizer(options)
    machine = _hardware(options)
    workload = _workload(options, machine)
    if options.peak is not None:
        peak = parse_positive(options.peak, "peak") * 1e12
        machine = replace(machine, achievable=1.0, peak={**machine.peak, workload.dtype: peak})
    asked = {"optimizer": optimizer, "wanted": wanted, "preset": options.placement, **saving_of(options)}
    with running(f"planning {workload.name} on its example inputs"):
        answer = estimate(workload, machine, **asked)
    print(json.dumps(_data(answer), indent=1) + "\n" if options.json else _text(answer), end="")


# -- the model --------------------------------------------------------------------------------------------------------


def _workload(options: argparse.Namespace, machine: Hardware) -> Workload:
    if options.target is not None:
        if given := _given(options, (*_DIMENSIONS, "checkpoint_interval", "dtype", "lora")):
            named = ", ".join(given).replace("_", "-")
            raise ConfigError(f"the target {options.target} has its own dimensions: leave out {named}")
        return of_module(*build(options.target), name=options.target, frozen=options.frozen)
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
    how = {"lora": _count(options, "lora"), "frozen": options.frozen}
    return of_transformer(**dimensions, interval=interval, dtype=options.dtype or half, **how)


def _optimizer(options: argparse.Namespace) -> Optimizer:
    optimizer = Optimizer(_count(options, "optimizer_bytes"), options.state_dtype, options.master_dtype)
    if optimizer.nbytes is not None and (given := _given(options, ("state_dtype", "master_dtype"))):
        named = ", ".join(given).replace("_", "-")
        raise ConfigError(f"optimizer-bytes has all states, and {named} was given: leave one of them out")
    return optimizer


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


# -- for people, in at most 80 columns --------------------------------------------------------------------------------


_UNITS = (("seconds", 1), ("milliseconds", 1e3), ("microseconds", 1e6))


def _text(answer: Estimate) -> str:
    parts = [_header(answer), _states(answer), _placements(answer)]
    if answer.chosen is None or answer.saves is None:
        parts.append(_lack(answer))
    else:
        parts += [_bandwidths(answer, answer.chosen), _step(answer.chosen), _disk(answer.chosen)]
        parts.append(checkpoints_text(answer.saves))
    return "\n\n".join(parts) + "\n"


def _header(answer: Estimate) -> str:
    hardware, dtype = answer.hardware, answer.workload.dtype
    achieved = digits(hardware.achieved(dtype) / 1e12)
    return (
        f"{answer.workload.name}\n"
        f"{hardware.name}: {counted(hardware.nodes, 'node')} x {counted(hardware.ranks_per_node, 'device')}, "
        f"{achieved} TFLOP/s achieved by each in {dtype}"
    )


def _states(answer: Estimate) -> str:
    sizes = {**answer.states, "together": sum(answer.states.values())}
    rows = [[state, f"{nbytes / answer.parameters:.3g}", in_words(nbytes)] for state, nbytes in sizes.items()]
    about = answer.chosen or answer.predictions[-1]
    moving = about.step.needed["device"] - about.step.living
    return (
        f"MODEL STATES: {answer.parameters:,} parameters\n\n"
        + table(rows, ["", "bytes each", "one copy"])
        + f"\n\nBesides, per device with {about.preset}: {in_words(about.step.activations)} of activations for\n"
        + f"backward, and up to {in_words(moving)} of what moves and is computed with."
    )


def _placements(answer: Estimate) -> str:
    hardware, fitting = answer.hardware, [prediction for prediction in answer.predictions if prediction.fits]
    heads = ["", *TIERS, "fits", "TFLOP/s"]
    rows = [
        [
            prediction.preset,
            *(in_words(prediction.memory[tier]) for tier in TIERS),
            _fits(prediction),
            " - ".join(
                _teraflops(prediction, seconds) for seconds in (prediction.step.serial, prediction.step.overlapped)
            )
            * prediction.fits,
        ]
        for prediction in answer.predictions
    ]
    rows.append(["there is", *(in_words(getattr(hardware, tier).capacity) for tier in TIERS), "", ""])
    if not fitting:
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    lines = ["PLACEMENTS: bytes on each device, and in each node's host memory and NVMe", ""]
    lines += [table(rows, heads, left=(0, 4)), ""]
    if hardware.unified:
        lines.append("Device and host are one memory: what is needed of both stands below device.")
    if any(prediction.activations == "host" for prediction in fitting):
        lines.append("*: with activations in host memory (ZeRO-Infinity, section 5.1.2).")
    if any(prediction.step.tiles > 1 for prediction in fitting):
        lines.append("Tiles: parts of the largest parameter (ZeRO-Infinity, section 5.1.3).")
    if fitting:
        lines.append(f"The first to fit is {fitting[0].preset}; those after it move more.")
        lines.append("TFLOP/s per device: with nothing overlapped, and as a step is simulated.")
        if answer.workload.recomputes:
            lines.append("They count the recomputation of activations too (ZeRO-Infinity, equation 3).")
    return "\n".join(lines).rstrip()


def _fits(prediction: Prediction) -> str:
    if prediction.exceeded:
        return "no: " + ", ".join(prediction.exceeded)
    tiles = f", {prediction.step.tiles:,} tiles" if prediction.step.tiles > 1 else ""
    return "yes" + tiles + (" *" if prediction.activations == "host" else "")


def _teraflops(prediction: Prediction, seconds: float) -> str:
    return digits(prediction.step.flops / seconds / 1e12)


def _bandwidths(answer: Estimate, chosen: Prediction) -> str:
    wanted = list(answer.needs[0].bandwidths)
    rows = [
        [
            need.moved,
            digits(need.intensity),
            *(_rate(need.bandwidths[efficiency]) for efficiency in wanted),
            _rate(need.available),
        ]
        for need in answer.needs
    ]
    heads = ["", "FLOP/byte", *(f"{100 * efficiency:.3g} %" for efficiency in wanted), "there is"]
    note = "For these efficiencies, if nothing else is moved (ZeRO-Infinity, equation 2)."
    return f"BANDWIDTH with {chosen.preset}, GB/s per device\n\n{table(rows, heads)}\n\n{note}"


def _step(chosen: Prediction) -> str:
    step = chosen.step
    unit, factor = next(((u, f) for u, f in _UNITS if step.serial * f >= 1), _UNITS[-1])
    rows = [[part, seconds, ""] for part, seconds in step.seconds.items()]
    for title, seconds in (("nothing overlapped", step.serial), ("simulated", step.overlapped)):
        rows.append([title, seconds, f"{_teraflops(chosen, seconds)} TFLOP/s per device"])
    shown = [[title, digits(seconds * factor), note] for title, seconds, note in rows]
    return f"STEP with {chosen.preset}, {unit}\n\n" + table(shown, left=(0, 2))


def _disk(chosen: Prediction) -> str:
    if not chosen.disk_written:
        return f"DISK\n\nNothing is written with {chosen.preset}."
    rows = [
        ["read per step, all nodes", in_words(chosen.disk_read)],
        ["written per step, all nodes", in_words(chosen.disk_written)],
        ["written per day and node", f"{chosen.written_per_day / 1e12:,.1f} TB"],
        ["days until the drives are worn", days_text(chosen.written_per_day, chosen.days)],
    ]
    return f"DISK with {chosen.preset}, one simulated step after another\n\n" + table(rows)


def _lack(answer: Estimate) -> str:
    """What the last placement lacks, which needs the least of host memory. Less would do on devices, which nobody asked
    for where other memories are too small."""
    last = answer.predictions[-1]
    beside_device: list[Tier] = [tier for tier in last.exceeded if tier != "device"]
    places: dict[Tier, str] = {
        "device": "on each device",
        "host": "of host memory in each node",
        "nvme": "of NVMe in each node",
    }
    lacks = [
        f"{in_words(last.memory[tier])} {places[tier]}, not {in_words(getattr(answer.hardware, tier).capacity)}"
        for tier in beside_device or last.exceeded
    ]
    return f"No placement fits: {last.preset} needs " + ",\nand ".join(lacks) + "."


def _rate(bytes_per_second: float) -> str:
    return digits(bytes_per_second / 1e9)


# -- for programs -----------------------------------------------------------------------------------------------------


def _data(answer: Estimate) -> dict[str, Any]:
    """The estimate, and what it derives."""
    workload = answer.workload
    return {
        "workload": {
            "model": workload.name,
            "dtype": workload.dtype,
            "parameters": answer.parameters,
            "recomputes": workload.recomputes,
        },
        "hardware": asdict(answer.hardware),
        "states": dict(answer.states),
        "predictions": [_prediction(prediction) for prediction in answer.predictions],
        "chosen": answer.chosen.preset if answer.chosen else None,
        "needs": [asdict(need) for need in answer.needs],
        "saves": asdict(answer.saves) if answer.saves else None,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    data, step = asdict(prediction), prediction.step
    del data["step"]
    return data | {
        "fits": prediction.fits,
        "tiles": step.tiles,
        "work": step.flops,
        "saved_for_backward": step.activations,
        "in_flight": step.needed["device"] - step.living,
        "seconds": step.seconds,
        "serial": step.serial,
        "overlapped": step.overlapped,
        "flops_serial": step.flops / step.serial,
        "flops_overlapped": step.flops / step.overlapped,
    }
