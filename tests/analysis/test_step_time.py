"""Traffic and time, against small figures worked out by hand."""

from __future__ import annotations

import pytest
import sympy

from zinf_fx.analysis import symbols as s
from zinf_fx.analysis.memory import ZERO_STATES, StateBytes
from zinf_fx.analysis.step_time import step_time
from zinf_fx.analysis.symbols import evaluate
from zinf_fx.analysis.traffic import bytes_moved

# 1000 parameters on 4 devices. Bytes: 2000 of parameters, 2000 of gradients, 12000 of optimizer states.
VALUES = {**ZERO_STATES.values, s.parameters: 1000, s.ranks: 4, s.checkpoint_bytes: 64}
FIELDS = ("link", "upload", "download", "read", "written", "updated", "update_read", "update_written")


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        # link: 3/4 of each collective's message.
        ("dp", (3000, 0, 0, 0, 0, 24000, 0, 0)),
        ("zero-1", (3000, 0, 0, 0, 0, 6000, 0, 0)),
        ("zero-2", (3000, 0, 0, 0, 0, 6000, 0, 0)),
        ("zero-3", (4500, 0, 0, 0, 0, 6000, 0, 0)),
        # Gradients come down; the updated quarter of the parameters goes up.
        ("zero-offload", (3000, 500, 500, 0, 0, 6000, 0, 0)),
        # A quarter of the parameters goes up, for forward and for backward.
        ("infinity-cpu", (4500, 1000, 500, 0, 0, 6000, 0, 0)),
        # As above from NVMe; the step reads the states, and writes them and the parameters.
        ("infinity-nvme", (4500, 1000, 500, 1000, 0, 6000, 3000, 3500)),
        # Gradients are written in backward and read by the step, besides.
        ("nvme", (4500, 1000, 500, 1000, 500, 6000, 3500, 3500)),
    ],
)
def test_bytes_of_each_preset(preset: str, expected: tuple[int, ...]):
    moved = bytes_moved(preset, recompute=False)
    assert tuple(evaluate(getattr(moved, name), VALUES) for name in FIELDS) == expected


def test_disk_bytes_are_those_that_one_rank_moves_per_parameter():
    """16 bytes read and 14 written, as benchmarks/train_step.py counts them in a bf16 model with fp32 Adam."""
    moved = bytes_moved("infinity-nvme", recompute=False)
    values = {**ZERO_STATES.values, s.parameters: 1, s.ranks: 1}
    assert (evaluate(moved.disk_read, values), evaluate(moved.disk_written, values)) == (16, 14)
    assert evaluate(moved.link, values) == 0


def test_weights_that_an_update_reads_are_read_once_more():
    """As those of fp32 are, and of bf16 with split masters, but where they don't live on NVMe."""
    few = StateBytes(2, 2, 4, reread=2)
    values = {**few.values, s.parameters: 1, s.ranks: 1}
    found = (bytes_moved(preset, recompute=False) for preset in ("infinity-nvme", "infinity-cpu"))
    assert [evaluate(moved.disk_read, values) for moved in found] == [2 + 2 + 4 + 2, 0]
    assert few.total == 8


def test_a_recomputation_loads_parameters_again_and_checkpoints_may_leave():
    moved = bytes_moved("infinity-cpu", recompute=True, checkpoints="host")
    assert evaluate(moved.upload, VALUES) == 1500 + 64
    assert evaluate(moved.download, VALUES) == 500 + 64
    assert evaluate(moved.link, VALUES) == 6000


def test_serial_and_overlapped_time():
    times = step_time(bytes_moved("infinity-nvme", recompute=False))
    rates = {
        s.link_bandwidth: 4500,  # 1 s
        s.upload_bandwidth: 500,  # 2 s
        s.download_bandwidth: 100,  # 5 s
        s.read_bandwidth: 250,  # 4 s, then 12 s in the optimizer's step
        s.write_bandwidth: 500,  # 7 s
        s.update_bandwidth: 1000,  # 6 s, beside the disk
    }
    slow, fast = ({**VALUES, **rates, s.work: 60, s.peak: peak} for peak in (10, 20))  # 6 s, 3 s
    assert evaluate(times.serial, slow) == 6 + 1 + 2 + 5 + 4 + 19
    assert evaluate(times.overlapped, slow) == 6 + 19  # compute is the slowest
    assert evaluate(times.overlapped, fast) == 5 + 19  # the download is


def test_equation_2_is_the_serial_time_of_one_state():
    """With infinite bandwidth for all but one transfer, as the paper looks at them, efficiency is equation 2's."""
    times = step_time(bytes_moved("zero-3", recompute=True))
    others = (s.upload_bandwidth, s.download_bandwidth, s.read_bandwidth, s.write_bandwidth, s.update_bandwidth)
    serial = times.serial.subs({other: sympy.oo for other in others})
    ait = s.work / times.link / s.link_bandwidth
    assert sympy.simplify(times.compute / serial - ait * s.link_bandwidth / (ait * s.link_bandwidth + s.peak)) == 0
