"""An estimate as plain text, of at most 80 columns."""

from __future__ import annotations

from zinf_fx.estimate.prediction import Estimate, Prediction
from zinf_fx.placement import TIERS
from zinf_fx.plan.show.saving import checkpoints_text, days_text
from zinf_fx.sizes import in_words
from zinf_fx.tables import counted, digits, table

_PARTS = {
    "compute": "compute",
    "link": "between devices",
    "upload": "host to device",
    "download": "device to host",
    "disk": "disk",
    "optimizer": "optimizer's step",
}
_UNITS = (("seconds", 1), ("milliseconds", 1e3), ("microseconds", 1e6))


def estimate_text(estimate: Estimate) -> str:
    """The whole estimate."""
    parts = [_header(estimate), _states(estimate), _placements(estimate)]
    if estimate.chosen is None:
        parts.append(_lack(estimate))
    else:
        parts += [_bandwidths(estimate, estimate.chosen), _step(estimate, estimate.chosen), _disk(estimate.chosen)]
        parts.append(checkpoints_text(estimate.saves))
    return "\n\n".join(parts) + "\n"


def _header(estimate: Estimate) -> str:
    workload, hardware = estimate.workload, estimate.hardware
    achieved = digits(hardware.achieved(workload.dtype) / 1e12)
    return (
        f"{workload.model}\n"
        f"{hardware.name}: {counted(hardware.nodes, 'node')} x {counted(hardware.ranks_per_node, 'device')}, "
        f"{achieved} TFLOP/s achieved by each in {workload.dtype}"
    )


def _states(estimate: Estimate) -> str:
    per_parameter = estimate.workload.states
    rows = [[state, f"{getattr(per_parameter, state):.3g}", in_words(n)] for state, n in estimate.states.items()]
    rows.append(["together", f"{per_parameter.total:.3g}", in_words(sum(estimate.states.values()))])
    workload = estimate.workload
    kept = "activation checkpoints" if workload.recompute else "activations that backward needs"
    working = workload.working_states + workload.working_activations
    return (
        f"MODEL STATES: {workload.parameters:,} parameters\n\n"
        + table(rows, ["", "bytes each", "one copy"])
        + f"\n\nBesides, per device: {in_words(workload.checkpoints)} of {kept};\n"
        + f"{in_words(working)} to work in, where parameters are gathered operator by operator."
    )


def _placements(estimate: Estimate) -> str:
    hardware = estimate.hardware
    heads = ["", *TIERS, "fits", "TFLOP/s"]
    rows = [
        [
            one.preset,
            *(in_words(one.fit.memory[tier]) for tier in TIERS),
            _fits(one),
            _range(estimate, one) if one.fits else "",
        ]
        for one in estimate.predictions
    ]
    rows.append(["there is", *(in_words(getattr(hardware, tier).capacity) for tier in TIERS), "", ""])
    if not any(one.fits for one in estimate.predictions):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    lines = ["PLACEMENTS: bytes on each device, and in each node's host memory and NVMe", ""]
    lines += [table(rows, heads, left=(0, 4)), ""]
    fitting = [one.fit for one in estimate.predictions if one.fits]
    if any(one.checkpoints == "host" for one in fitting):
        lines.append("*: with activations in host memory (ZeRO-Infinity, section 5.1.2).")
    if any(one.tiles > 1 for one in fitting):
        lines.append("Tiles: parts of the largest operator (ZeRO-Infinity, section 5.1.3).")
    if first := next((one.preset for one in estimate.predictions if one.fits), None):
        lines.append(f"The first to fit is {first}; those after it move more.")
        lines.append("TFLOP/s per device: with nothing overlapped, and with all that can be.")
        if estimate.workload.recompute:
            lines.append("They count the recomputation of activations too (ZeRO-Infinity, equation 3).")
    return "\n".join(lines).rstrip()


def _fits(one: Prediction) -> str:
    if one.fit.exceeded:
        return "no: " + ", ".join(one.fit.exceeded)
    tiles = f", {one.fit.tiles:,} tiles" if one.fit.tiles > 1 else ""
    return "yes" + tiles + (" *" if one.fit.checkpoints == "host" else "")


def _range(estimate: Estimate, one: Prediction) -> str:
    return " - ".join(_teraflops(estimate, seconds) for seconds in (one.serial, one.overlapped))


def _teraflops(estimate: Estimate, seconds: float) -> str:
    return digits(estimate.flops(seconds) / 1e12)


def _bandwidths(estimate: Estimate, chosen: Prediction) -> str:
    wanted = list(estimate.needs[0].bandwidths)
    rows = [
        [
            need.moved,
            digits(need.intensity),
            *(_rate(need.bandwidths[one]) for one in wanted),
            _rate(need.available),
        ]
        for need in estimate.needs
    ]
    heads = ["", "FLOP/byte", *(f"{100 * one:.3g} %" for one in wanted), "there is"]
    note = "For these efficiencies, if nothing else is moved (ZeRO-Infinity, equation 2)."
    return f"BANDWIDTH with {chosen.preset}, GB/s per device\n\n{table(rows, heads)}\n\n{note}"


def _step(estimate: Estimate, chosen: Prediction) -> str:
    unit, factor = next(((u, f) for u, f in _UNITS if chosen.serial * f >= 1), _UNITS[-1])
    rows = [[title, chosen.seconds[part], ""] for part, title in _PARTS.items() if chosen.seconds[part]]
    for title, seconds in (("without overlap", chosen.serial), ("all overlapped", chosen.overlapped)):
        rows.append([title, seconds, f"{_teraflops(estimate, seconds)} TFLOP/s per device"])
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
    return f"DISK with {chosen.preset}, all overlapped\n\n" + table(rows)


def _lack(estimate: Estimate) -> str:
    """What the last preset lacks, which needs the least of devices and of host memory."""
    last = estimate.predictions[-1]
    wheres = {"device": "on each device", "host": "of host memory in each node", "nvme": "of NVMe in each node"}
    there_is = {tier: in_words(getattr(estimate.hardware, tier).capacity) for tier in last.fit.exceeded}
    lacks = [f"{in_words(last.fit.memory[tier])} {wheres[tier]}, not {size}" for tier, size in there_is.items()]
    return f"No placement fits: {last.preset} needs " + ",\nand ".join(lacks) + "."


def _rate(bytes_per_second: float) -> str:
    return digits(bytes_per_second / 1e9)
