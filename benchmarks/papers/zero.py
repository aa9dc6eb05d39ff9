"""ZeRO: tables 1 and 2, and what sections 3, 6, 7 and 8 state."""

from __future__ import annotations

import math
from dataclasses import replace

from papers import formulas as f
from papers.comparison import Cell, Comparison
from papers.formulas import PARTITIONED, ZERO_STATES, evaluate, largest_model, per_device

_GB = 1e9
_STAGES = ("zero-1", "zero-2", "zero-3")
_STAGE_NAMES = {"dp": "baseline", "zero-1": "Pos", "zero-2": "Pos+g", "zero-3": "Pos+g+p"}

MODELS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
# As the paper has it: by degree of data parallelism, GB per device in each stage, for each model.
_TABLE_1 = """
    1      120  120  120       2048 2048 2048      16000 16000 16000
    4     52.5 41.3   30        896  704  512       7000  5500  4000
    16    35.6 21.6  7.5        608  368  128       4750  2875  1000
    64    31.4 16.6 1.88        536  284   32       4187  2218   250
    256   30.4 15.4 0.47        518  263    8       4046  2054  62.5
    1024  30.1 15.1 0.12        513  257    2       4011  2013  15.6
"""
_CUT = "the paper cuts the decimals of figures this large off, and rounds the others"

_TABLE_2 = {  # degree of model parallelism: parameters of the largest model, on 64 x as many devices
    1: ("2B", "7.6B", "14.4B", "128B"),
    2: ("4B", "15.2B", "28.8B", "256B"),
    4: ("8B", "30.4B", "57.6B", "0.5T"),
    8: ("16B", "60.8B", "115.2B", "1T"),
    16: ("32B", "121.6B", "230.4B", "2T"),
}
_TABLE_2_RANKS = 64
_V100 = 32e9
_PARAMETERS = {"B": 1e9, "T": 1e12}
_MULTIPLIED = "the paper multiplies the first row, already rounded, by the degree of model parallelism"


def table_1(model: str) -> Comparison:
    """Model states per device (section 5.4), of one of the table's models."""
    rows, first = [], len(_STAGES) * list(MODELS).index(model)
    for ranks, *printed in map(str.split, _TABLE_1.strip().splitlines()):
        values = {**ZERO_STATES.values, f.parameters: MODELS[model], f.ranks: int(ranks)}
        ours = [evaluate(per_device(PARTITIONED[stage]), values) / _GB for stage in _STAGES]
        rows.append((ranks, tuple(map(_cut, printed[first : first + len(_STAGES)], ours))))
    title = f"ZeRO, table 1, {model}: GB of model states per device, by degree of data parallelism"
    return Comparison(title, tuple(_STAGE_NAMES[stage] for stage in _STAGES), tuple(rows))


def _cut(printed: str, ours: float) -> Cell:
    cell = Cell(printed, ours)
    return cell if cell.agrees or str(math.floor(ours)) != printed else replace(cell, why=_CUT)


def table_2() -> Comparison:
    """Largest model of the theoretical columns: 32 GB devices, 64-way data parallelism."""
    stages = ("dp", *_STAGES)
    rows = []
    for tensor_ranks, printed in _TABLE_2.items():
        cells = []
        for stage, text in zip(stages, printed, strict=True):
            values = {f.device_memory: _V100, f.ranks: _TABLE_2_RANKS, f.tensor_ranks: tensor_ranks}
            largest = evaluate(largest_model(PARTITIONED[stage]), {**ZERO_STATES.values, **values})
            cell = Cell(text[:-1], largest / _PARAMETERS[text[-1]])
            cells.append(cell if cell.agrees else replace(cell, why=_MULTIPLIED))
        rows.append((str(tensor_ranks), tuple(cells)))
    columns = tuple(_STAGE_NAMES[stage] for stage in stages)
    title = (
        "ZeRO, table 2: largest model in billions of parameters (last rows of Pos+g+p: trillions), by model parallelism"
    )
    return Comparison(title, columns, tuple(rows))


def volumes() -> Comparison:
    """Return what sections 7 and 8 derive."""

    def per_parameter(stage: str) -> float:
        volume = f.for_many_ranks(f.data_parallel_volume(PARTITIONED[stage]))
        return evaluate(volume / f.parameters, {})

    message = f.batch * f.sequence * f.hidden * f.layers
    model_parallel = f.for_many_ranks(f.model_parallel_volume)
    added = f.for_many_ranks(f.partitioned_checkpoints_volume)
    offloaded = f.offloaded_checkpoints_volume * f.tensor_ranks
    cells = {
        "data parallelism / Ψ (7.1)": Cell("2", per_parameter("dp")),
        "Pos / Ψ (7)": Cell("2", per_parameter("zero-1")),
        "Pos+g / Ψ (7.2.1)": Cell("2", per_parameter("zero-2")),
        "Pos+g+p / Ψ (7.2.2)": Cell("3", per_parameter("zero-3")),
        "model parallelism / (seq x hd), a block (8)": Cell("12", evaluate(model_parallel / message, {})),
        "Pa / (seq x hd), a block (8)": Cell("1", evaluate(added / message, {})),
        "Pa / model parallelism, % (8)": Cell("10", 100 * evaluate(added / model_parallel, {}), "<"),
        "Pa+cpu / stored by Pa (8)": Cell("2", evaluate(offloaded / message, {})),
    }
    title = "ZeRO, sections 7 and 8: elements that a device exchanges per step"
    return Comparison.of_one_column(title, "volume", cells)


def activations() -> Comparison:
    """Activation memory that the text states, in GB."""
    # 100B parameters are 125 layers of 8192 (table 5); batch 32, sequence 1024 and 16-way model parallelism (6.1).
    large = {f.layers: 125, f.hidden: 8192, f.batch: 32, f.sequence: 1024, f.interval: 1, f.tensor_ranks: 16}
    whole = evaluate(f.activation_checkpoints, large)
    partitioned = evaluate(f.partitioned_checkpoints, large)
    halved = (
        "the paper's is half of that: the number of elements, as if each took one byte. 67 GB is 62.5 GiB, section "
        "3.2's 60 GB"
    )
    cells = {
        "100B, checkpoints (3.2)": Cell("60", whole / 2**30, why="'around 60 GB', rounded to tens of GiB"),
        "100B, checkpoints (6.1)": Cell("33", whole / _GB, why=halved),
        "100B, Pa (6.1)": Cell("2", partitioned / _GB, why=halved),
    }
    title = "ZeRO, sections 3.2 and 6.1: GB of activation checkpoints, batch 32 x 1024"
    return Comparison.of_one_column(title, "memory", cells)
