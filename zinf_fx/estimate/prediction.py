"""A workload on hardware: what fits where, the bandwidth that an efficiency takes, the time of a step, and wear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from zinf_fx.adam import state_dtype
from zinf_fx.analysis import efficiency
from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.partitioning import PARTITIONED, STATES, per_device
from zinf_fx.analysis.step_time import step_time
from zinf_fx.analysis.symbols import evaluate
from zinf_fx.analysis.traffic import bytes_moved
from zinf_fx.arguments import did_you_mean
from zinf_fx.config import PRESETS
from zinf_fx.errors import ConfigError
from zinf_fx.estimate.fitting import Fit, fit
from zinf_fx.estimate.workload import Workload
from zinf_fx.plan.hardware import SECONDS_PER_DAY, Hardware, Memory
from zinf_fx.plan.saving import Checkpoints, CheckpointSizes, checkpoints


@dataclass(frozen=True)
class Prediction:
    """One preset.

    Attributes:
        seconds: of each part of a step: compute, the links, and the optimizer's step.
        serial, overlapped: seconds of a step, with nothing overlapped and with all that can be.
        disk_read, disk_written: bytes per step, of all nodes.
        written_per_day: bytes per day on one node, at the overlapped rate.
        days: until a node's drives have written what they endure; None where that isn't known or nothing is written.
    """

    preset: str
    fit: Fit
    seconds: Mapping[str, float]
    serial: float
    overlapped: float
    disk_read: int
    disk_written: int
    written_per_day: float
    days: float | None

    @property
    def fits(self) -> bool:
        """Every tier is large enough."""
        return not self.fit.exceeded


@dataclass(frozen=True)
class Need:
    """Bytes per second and device that wanted efficiencies take, if one state alone is moved (section 4).

    Attributes:
        moved: what is moved, and over what.
        intensity: FLOP per byte (of a device's work and what the device moves).
        bandwidths: by efficiency.
        available: what the hardware has.
    """

    moved: str
    intensity: float
    bandwidths: Mapping[float, float]
    available: float


@dataclass(frozen=True)
class Estimate:
    """The answer.

    Attributes:
        states: bytes of each model state, in one copy.
        predictions: by preset, those first that cost less to communicate.
        chosen: the preset that bandwidths are given for: that asked for, else the first to fit; None if none does.
        needs: bandwidths for the chosen preset.
        saves: what checkpoints on disk cost with the chosen preset.
    """

    workload: Workload
    hardware: Hardware
    states: Mapping[str, int]
    predictions: tuple[Prediction, ...]
    chosen: Prediction | None
    needs: tuple[Need, ...]
    saves: Checkpoints | None

    def flops(self, seconds: float) -> float:
        """FLOP per second of one device when a step takes so long."""
        return self.workload.work / seconds


def estimate(
    workload: Workload,
    hardware: Hardware,
    *,
    wanted: Sequence[float] = (),
    preset: str | None = None,
    every: float = 1800.0,
    kept: int = 3,
) -> Estimate:
    """What the workload takes on the hardware.

    Args:
        wanted: efficiencies between 0 and 1 to give bandwidths for.
        preset: to give them for this one, not for the first that fits.
        every: seconds from one checkpoint on disk to the next; `kept`: how many there are.

    Raises: ConfigError.
    """
    for one in wanted:
        if not 0 < one < 1:
            raise ConfigError(f"efficiency={one:g} is not accepted: give numbers above 0 and below 1")
    if preset is not None and preset not in PARTITIONED:
        meant = did_you_mean(preset, PARTITIONED)
        raise ConfigError(f"placement={preset!r} is unknown; accepted: {', '.join(map(repr, PARTITIONED))}{meant}")
    values = _values(workload, hardware)
    predictions = tuple(_predict(name, workload, hardware, values) for name in PARTITIONED)
    by_name = {one.preset: one for one in predictions}
    chosen = by_name[preset] if preset else next((one for one in predictions if one.fits), None)
    states = {state: round(evaluate(per_device((), [state]), values)) for state in STATES}
    needs = tuple(_needs(chosen, workload, hardware, values, wanted)) if chosen else ()
    saves = checkpoints(_saved(chosen, workload, states), hardware, every=every, kept=kept) if chosen else None
    return Estimate(workload, hardware, states, predictions, chosen, needs, saves)


def _saved(chosen: Prediction, workload: Workload, states: Mapping[str, int]) -> CheckpointSizes:
    kept = [state for state in ("parameters", "optimizer") if getattr(PRESETS[chosen.preset], state) == "nvme"]
    in_store = sum(states[state] for state in kept)
    dtype = state_dtype(workload.dtype, workload.states.parameters)
    return CheckpointSizes({workload.dtype: states["parameters"]}, {dtype: states["optimizer"]}, in_store)


def _values(workload: Workload, hardware: Hardware) -> dict[sympy.Symbol, float]:
    """The numbers for the papers' symbols; a device has its share of what a node's devices use together."""
    share = hardware.ranks_per_node
    return {
        **workload.states.values,
        s.parameters: workload.parameters,
        s.ranks: hardware.ranks,
        s.work: workload.work,
        s.checkpoint_bytes: workload.checkpoints,
        s.peak: hardware.achieved(workload.dtype),
        s.link_bandwidth: hardware.link.bandwidth,
        s.upload_bandwidth: hardware.upload.bandwidth,
        s.download_bandwidth: hardware.download.bandwidth,
        s.read_bandwidth: hardware.nvme.read / share,
        s.write_bandwidth: hardware.nvme.write / share,
    }


def _update_bandwidth(preset: str, hardware: Hardware) -> float:
    """Of the memory that a device's states are updated in; those of NVMe pass through host memory."""
    if PRESETS[preset].optimizer == "device":
        return _both_ways(hardware.device)
    return _both_ways(hardware.host) / hardware.ranks_per_node


def _both_ways(memory: Memory) -> float:
    """Bytes per second when as much is read as written."""
    return 2 / memory.seconds(1, 1)


def _predict(preset: str, workload: Workload, hardware: Hardware, values: Mapping[sympy.Symbol, float]) -> Prediction:
    values = {**values, s.update_bandwidth: _update_bandwidth(preset, hardware)}
    placed = fit(preset, workload, hardware, values)
    moved = bytes_moved(preset, recompute=workload.recompute, checkpoints=placed.checkpoints)
    times = step_time(moved)
    overlapped = evaluate(times.overlapped, values)
    disk_written = hardware.ranks * evaluate(moved.disk_written, values)
    per_day = disk_written / hardware.nodes / overlapped * SECONDS_PER_DAY
    return Prediction(
        preset=preset,
        fit=placed,
        seconds={part: evaluate(each, values) for part, each in vars(times).items()},
        serial=evaluate(times.serial, values),
        overlapped=overlapped,
        disk_read=round(hardware.ranks * evaluate(moved.disk_read, values)),
        disk_written=round(disk_written),
        written_per_day=per_day,
        days=hardware.nvme.days_until_worn(per_day),
    )


def _needs(
    chosen: Prediction,
    workload: Workload,
    hardware: Hardware,
    values: Mapping[sympy.Symbol, float],
    wanted: Sequence[float],
) -> Iterator[Need]:
    """For each state that moves: between devices whole, to and from slower memory each device's part."""
    placement, partitioned = PRESETS[chosen.preset], PARTITIONED[chosen.preset]
    states = efficiency.parameters_and_gradients_moved(workload.recompute)
    optimizer = efficiency.optimizer_states_moved
    rows: list[tuple[str, sympy.Expr, float]] = []
    if hardware.ranks > 1 and "parameters" in partitioned:
        rows.append(("parameters, gradients: links", states, hardware.link.bandwidth))
    where = {"device": "device", "host": "host", "nvme": "NVMe"}
    share = hardware.ranks_per_node
    nvme = _both_ways(hardware.nvme) / share
    if placement.parameters != "device":
        link = min(hardware.upload.bandwidth, hardware.download.bandwidth)
        available = min(link, hardware.nvme.read / share) if placement.parameters == "nvme" else link
        rows.append((f"parameters, gradients: {where[placement.parameters]}", states / s.ranks, available))
    part = optimizer / s.ranks if "optimizer" in partitioned else optimizer
    available = nvme if placement.optimizer == "nvme" else _update_bandwidth(chosen.preset, hardware)
    rows.append((f"optimizer states: {where[placement.optimizer]}", part, available))
    if chosen.fit.checkpoints == "host":
        link = min(hardware.upload.bandwidth, hardware.download.bandwidth)
        rows.append(("checkpoints: host", 2 * s.checkpoint_bytes, link))
    for moved, nbytes, available in rows:
        ait = evaluate(s.work / nbytes, values)
        bandwidths = {
            one: evaluate(efficiency.needed_bandwidth, {**values, s.intensity: ait, s.efficiency: one})
            for one in wanted
        }
        yield Need(moved, ait, bandwidths, available)
