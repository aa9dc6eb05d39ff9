"""ZeRO-Infinity: figure 2a, the thresholds that the text reads off figure 3, and tables 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from papers import formulas as f
from papers.comparison import Cell, Comparison
from papers.formulas import INFINITY_STATES, StateBytes, evaluate

_K = 1024  # "K for 1024" (table 1)
_GIB, _TIB = 2**30, 2**40  # figure 2a's GB and TB; its parameters are in decimal trillions
_GB, _TB, _TFLOP = 1e9, 1e12, 1e12

PEAK = 70e12
"""FLOP per second that a V100 achieves without communication (section 4.2), on average over hidden sizes."""
_PEAK_RANGE = (62e12, 78e12)  # for hidden sizes of 8K and 64K (section 4.2)
_OVERLAP_SPEEDUP = 1.3  # measured (section 7.7, from figure 6d)
_DEVICES = 512
_LINK, _HOST, _NVME = 70e9, 3.0e9, 1.6e9  # measured bytes per second and device (section 7.7, figure 2b)
_SEQUENCE = 1024


# -- section 3 --------------------------------------------------------------------------------------------------------

# layers, hidden size in K, attention heads; then trillions of parameters, TB of model states, of all activations and of
# checkpoints per node, and GB of working memory per device for model states and activations.
_FIGURE_2A = (
    ((80, 10, 128), ("0.10", "1.83", "2.03", "0.05", "1.95", "1.63")),
    ((100, 20, 160), ("0.50", "9.16", "3.91", "0.12", "6.25", "2.50")),
    ((128, 25, 256), ("1.01", "18.31", "7.13", "0.20", "9.77", "3.56")),
    ((195, 64, 512), ("10.05", "182.81", "24.38", "0.76", "64.00", "8.00")),
    ((315, 160, 1024), ("101.47", "1845.70", "88.59", "3.08", "400.00", "18.00")),
)
# The text says 32 sequences per node, 2 to 4 per device. Its columns take the two ends for a node of 16 devices: 2 per
# device for checkpoints (32 per node), 4 per device for all activations (64 per node) and for working memory.
_PER_NODE_CHECKPOINTS, _PER_NODE_ACTIVATIONS, _PER_DEVICE = 32, 64, 4
_MSWM_OF_10K = (
    "the formula gives 1.5625 GiB for 10K; the printed figure is 5/4 of that. The four other rows are the formula's"
)


def figure_2a() -> Comparison:
    """Memory for massive models."""
    rows = []
    for (layers, hidden, heads), printed in _FIGURE_2A:
        values = {f.layers: layers, f.hidden: hidden * _K, f.heads: heads, f.sequence: _SEQUENCE, f.interval: 1}
        parameters = evaluate(f.transformer_parameters, values)
        ours = (
            parameters / 1e12,
            evaluate(f.model_states, {**INFINITY_STATES.values, f.parameters: parameters}) / _TIB,
            evaluate(f.all_activations, {**values, f.batch: _PER_NODE_ACTIVATIONS}) / _TIB,
            evaluate(f.activation_checkpoints, {**values, f.batch: _PER_NODE_CHECKPOINTS}) / _TIB,
            evaluate(f.model_state_working_memory, values) / _GIB,
            evaluate(f.activation_working_memory, {**values, f.batch: _PER_DEVICE}) / _GIB,
        )
        why = {4: _MSWM_OF_10K} if hidden == 10 else {}
        cells = tuple(Cell(p, o, why=why.get(i)) for i, (p, o) in enumerate(zip(printed, ours, strict=True)))
        rows.append((f"{layers} x {hidden}K", cells))
    columns = ("params. T", "states TB", "act. TB", "ckpt. TB", "MSWM GB", "AWM GB")
    return Comparison("ZeRO-Infinity, figure 2a: memory of massive models (layers x hidden)", columns, tuple(rows))


# -- section 4 --------------------------------------------------------------------------------------------------------


def _efficiency(intensity: sympy.Expr, bandwidth: float, values: Mapping[sympy.Symbol, float]) -> float:
    """Equation 2 at the paper's peak."""
    ait = evaluate(intensity.subs(INFINITY_STATES.values), {f.sequence: _SEQUENCE, f.interval: 1, **values})
    return evaluate(f.reached_efficiency, {f.intensity: ait, f.bandwidth: bandwidth, f.peak: PEAK})


def _needed(
    intensity: sympy.Expr,
    wanted: float,
    values: Mapping[sympy.Symbol, float],
    *,
    peak: float = PEAK,
    states: StateBytes = INFINITY_STATES,
) -> float:
    """Return the bytes per second for a wanted efficiency: equation 2, solved for the bandwidth."""
    ait = evaluate(intensity.subs(states.values), {f.sequence: _SEQUENCE, f.interval: 1, **values})
    return evaluate(f.needed_bandwidth, {f.intensity: ait, f.efficiency: wanted, f.peak: peak})


_STATES = f.intensity_of_parameters_and_gradients
_OPTIMIZER = f.intensity_of_optimizer_states
_CHECKPOINTS = f.intensity_of_activation_checkpoints


def _for_optimizer(states: StateBytes = INFINITY_STATES) -> float:
    """Return the bytes per second for 90 % with respect to optimizer states at batch 2 (section 4.2)."""
    return _needed(_OPTIMIZER, 0.9, {f.batch: 2}, states=states)


def _from_20_bytes() -> str:
    everything = _for_optimizer(StateBytes(0, 0, INFINITY_STATES.total))
    return (
        f"section 4.1's 16 bytes of optimizer states per parameter give {_for_optimizer() / _TB:.2f} TB/s; all 20 "
        f"bytes of section 3's model states, read and written, would give {everything / _TB:.2f}"
    )


def figure_3() -> Comparison:
    """Return what the text reads off figure 3 (sections 4.2 and 5.2.3): efficiencies in %, bandwidths in TB/s or
    GB/s."""
    of_batch_1, of_2k, of_8k = {f.batch: 1}, {f.hidden: 2 * _K}, {f.hidden: 8 * _K}
    four_times = _needed(_OPTIMIZER, 0.5, of_batch_1) / _needed(_STATES, 0.5, of_batch_1)
    cells = {
        "3a: % with 70 GB/s for parameters, gradients, batch 1": Cell(
            "50", 100 * _efficiency(_STATES, 70e9, of_batch_1), ">"
        ),
        "3b: bandwidth for optimizer states / for parameters, 50 %": Cell("4", four_times),
        "3b: TB/s for 90 %, batch 2": Cell("1.5", _for_optimizer() / _TB, why=_from_20_bytes()),
        "3c: % with 2 GB/s for checkpoints, hidden 2K": Cell("50", 100 * _efficiency(_CHECKPOINTS, 2e9, of_2k), ">"),
        "3c: GB/s for 50 %, hidden 8K": Cell("1", _needed(_CHECKPOINTS, 0.5, of_8k) / _GB, "<"),
        "5.2.3: % with 3 GB/s for them, hidden 8K": Cell("80", 100 * _efficiency(_CHECKPOINTS, 3e9, of_8k), ">"),
    }
    title = "ZeRO-Infinity, figure 3: thresholds at 70 TFLOP/s, sequence 1024"
    return Comparison.of_one_column(title, "threshold", cells)


# -- section 8 --------------------------------------------------------------------------------------------------------

_TABLE_3 = {  # times a V100's compute: slow memory GB/s per device, in total TB/s, between devices GB/s
    1: ("3.0", "1.5", "70.0"),
    10: ("30.0", "15.0", "700.0"),
    100: ("300.0", "150.0", "7000.0"),
}


def table_3() -> Comparison:
    """Bandwidth for 512 devices with more compute: section 4.2's thresholds, which grow as the peak does.

    Slow memory: optimizer states at 90 %, batch 2, which all devices read and write together. Between devices:
    parameters and gradients at 50 %, batch 1.
    """
    slow_why = f"from 1.5 TB/s in section 4.2 (figure 3b), to two digits: {_from_20_bytes()}"
    link_why = "rounded to 70 GB/s per V100, as in section 4.2"
    rows = []
    for times, (per_device, total, link) in _TABLE_3.items():
        slow = _needed(_OPTIMIZER, 0.9, {f.batch: 2}, peak=times * PEAK)
        between = _needed(_STATES, 0.5, {f.batch: 1}, peak=times * PEAK)
        cells = (
            Cell(per_device, slow / _DEVICES / _GB, why=slow_why),
            Cell(total, slow / _TB, why=slow_why),
            Cell(link, between / _GB, why=link_why),
        )
        rows.append((f"{times} x V100", cells))
    columns = ("slow memory GB/s", "all devices TB/s", "link GB/s")
    return Comparison("ZeRO-Infinity, table 3: bandwidth that 512 devices need", columns, tuple(rows))


# -- section 7.7 ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A model of table 4: hidden size in K and batch per device (table 1), and what is printed of it.

    `degradations`: by parameters and gradients, optimizer states, checkpoints; `efficiency`: what they leave.
    """

    name: str
    hidden: int
    batch: float
    degradations: tuple[str, str, str]
    efficiency: str
    least: str
    most: str


_MODELS = (
    _Model("5T", 48, 3, ("0.25", "0.10", "0.020"), "0.63", "39", "63.82"),
    _Model("10T", 64, 2, ("0.33", "0.14", "0.015"), "0.515", "32", "52.22"),
    _Model("20T", 88, 1.25, ("0.44", "0.21", "0.01"), "0.34", "21.08", "34.73"),
)


def _degradations(run: _Model) -> tuple[float, float, float]:
    """1 - efficiency with respect to each state. All 512 devices' NVMe moves the optimizer states together."""
    values = {f.batch: run.batch, f.hidden: run.hidden * _K}
    return (
        1 - _efficiency(_STATES, _LINK, values),
        1 - _efficiency(_OPTIMIZER, _DEVICES * _NVME, values),
        1 - _efficiency(_CHECKPOINTS, _HOST, values),
    )


def expected_efficiency(run: _Model) -> float:
    """1 less the degradations of all states (section 7.7)."""
    return 1 - sum(_degradations(run))


_DEGRADATION_WHY = {
    "5T": {2: "'approximately 0.020': to two places"},
    "10T": {3: "1 - 0.33 - 0.14 - 0.015: the paper adds the degradations after rounding them"},
}


def degradations() -> Comparison:
    """Return the steps to table 4."""
    rows = []
    for run in _MODELS:
        ours = (*_degradations(run), expected_efficiency(run))
        printed = (*run.degradations, run.efficiency)
        why = _DEGRADATION_WHY.get(run.name, {})
        cells = tuple(Cell(p, o, why=why.get(i)) for i, (p, o) in enumerate(zip(printed, ours, strict=True)))
        rows.append((run.name, cells))
    columns = ("parameters, gradients", "optimizer states", "checkpoints", "efficiency")
    return Comparison("ZeRO-Infinity, section 7.7: degradation by each state", columns, tuple(rows))


_MOST_WHY = {
    "5T": "78 x 1.3 x 0.63, the rounded efficiency of section 7.7, is 63.88; 63.82 looks like a slip of a digit",
    "10T": "78 x 1.3 x 0.515, the rounded efficiency of section 7.7",
    "20T": "78 x 1.3 x 0.34 is 34.48; the minimum, 21.08, is of 0.34 too, so 34.73 looks like a slip of a digit",
}


def table_4() -> Comparison:
    """Predicted TFLOP/s: the least peak without overlap, the greatest with the speedup that overlap gives.

    Formulas give all of it but three measured inputs: both peaks, and the speedup of 1.3.
    """
    rows = []
    for run in _MODELS:
        left = expected_efficiency(run)
        least = Cell(run.least, _PEAK_RANGE[0] * left / _TFLOP)
        most = Cell(run.most, _PEAK_RANGE[1] * left * _OVERLAP_SPEEDUP / _TFLOP, why=_MOST_WHY[run.name])
        rows.append((run.name, (least, most)))
    return Comparison("ZeRO-Infinity, table 4: predicted TFLOP/s per device", ("least", "most"), tuple(rows))
