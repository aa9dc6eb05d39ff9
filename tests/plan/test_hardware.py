"""Hardware descriptions of the package load, and others are checked."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from zinf_fx.errors import ConfigError
from zinf_fx.plan import hardware
from zinf_fx.plan.hardware import Link, Memory

TEXT = files(hardware).joinpath("dgx-2.toml").read_text()


def test_every_description_of_the_package_loads():
    assert hardware.names() == ["a100", "dgx-2", "dgx-a100", "dgx-h100", "rtx-4090"]
    for name in hardware.names():
        described = hardware.load(name)
        assert described.name and described.ranks == described.nodes * described.ranks_per_node
        # Each memory is larger and slower than the one above it, for all devices of a node together.
        devices = described.ranks_per_node
        assert devices * described.device.capacity < described.host.capacity < described.nvme.capacity
        assert devices * described.device.read > described.host.read > described.nvme.read
        assert described.nvme.endurance > 100 * described.nvme.capacity


def test_as_many_nodes_as_ranks_fill():
    node = hardware.load("dgx-2")
    cluster = node.with_ranks(512)
    assert (cluster.nodes, cluster.ranks, cluster.name) == (32, 512, "32 x NVIDIA DGX-2")
    assert cluster.link == node.between_nodes and node.link == node.in_node
    assert node.with_ranks(24) is node and node.with_ranks(16) is node and node.with_ranks(1) is node


def test_the_dgx_2_is_that_of_figure_2b():
    described = hardware.load("dgx-2")
    assert (described.ranks, described.host.capacity, described.nvme.capacity) == (16, int(1.5 * 2**40), 28 * 10**12)
    assert described.device == Memory(32 << 30, 900e9, 900e9)
    assert described.upload == Link(3e9, 10e-6) and described.nvme.read == 16 * 1.6e9
    assert described.achieved("float16") == pytest.approx(70e12)
    assert described.link == described.in_node


def test_a_file(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("nodes = 1", "nodes = 4", 1))
    described = hardware.load(str(path))
    assert described.ranks == 64 and described.link == described.between_nodes


def test_a_disk_costs_computing_nothing_unless_it_is_said():
    plain = hardware.parse(TEXT, "x").nvme
    assert (plain.read_load, plain.write_load, plain.start) == (0, 0, 0)
    assert (plain.beside, plain.depth, plain.alone) == (1, 1, 1)
    more = 'read_load = 0\nwrite_load = 0.3\nstart = 2e-4\nbeside = 0.9\ndepth = 16\nblock = "1MiB"\nalone = 0.6'
    loaded = hardware.parse(TEXT.replace('endurance = "56000TB"', f'endurance = "56000TB"\n{more}'), "x").nvme
    assert (loaded.read_load, loaded.write_load, loaded.start) == (0, 0.3, 2e-4)
    assert (loaded.beside, loaded.depth, loaded.block, loaded.alone) == (0.9, 16, 1 << 20, 0.6)


def test_what_a_disk_moves_consists_of_blocks():
    assert [hardware.parse(TEXT, "x").nvme.blocks(count << 20) for count in (0, 1, 4, 5, 12)] == [1, 1, 1, 2, 3]


def test_an_endurance_may_be_unknown():
    assert hardware.parse(TEXT.replace('"56000TB"', '"unknown"'), "x").nvme.endurance is None


def test_what_a_description_may_leave_out():
    plain = hardware.parse(TEXT, "x")
    assert plain.updates == {} and not plain.unified
    assert plain.launch == 5e-6 and hardware.parse(TEXT.replace("launch = 5e-6", ""), "x").launch == 0
    more = 'nodes = 1\nupdates = {float32 = 1.5e9, "split, 8bit" = 2e9}\nunified = true'
    described = hardware.parse(TEXT.replace("nodes = 1", more, 1), "x")
    assert described.updates == {"float32": 1.5e9, "split, 8bit": 2e9} and described.unified


def test_what_there_is_not():
    with pytest.raises(ConfigError, match=r"hardware 'dgx-3' is unknown; accepted: a100, .*, or a file NAME\.toml"):
        hardware.load("dgx-3")
    with pytest.raises(ConfigError, match=r"hardware file gone\.toml can't be read: .*No such file"):
        hardware.load("gone.toml")
    with pytest.raises(ConfigError, match="NVIDIA DGX-2 has no peak for bfloat16; it has: float16, float32"):
        hardware.load("dgx-2").achieved("bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"])
def test_codes_of_8_bits_are_computed_as_fast_as_the_fastest_dtype(dtype: str):
    machine = hardware.load("dgx-2")
    assert machine.achieved(dtype) == machine.achieved("float16") > machine.achieved("float32")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nodes = 1", "nodes = ", "hardware x is not TOML: "),
        ("nodes = 1", "", "hardware x: 'nodes' is missing; needed: name, nodes"),
        ("nodes = 1", "nodes = 1\nupdates = {8bit = -1}", "updates.8bit=-1 is not a positive number"),
        ("nodes = 1", "nodes = 1\nupdates = {4bit = 1e9}", "updates"),
        ("launch = 5e-6", "launch = -1", "launch=-1 is not a positive number"),
        ("nodes = 1", "nodes = 1\nunified = 1", "unified=1 is not true or false"),
        ("nodes = 1", "nodes = 1\nracks = 2", "unknown field 'racks'; accepted: name, nodes"),
        ("nodes = 1", "nodes = 0", "nodes=0 is less than 1"),
        ("nodes = 1", "nodes = 1.5", "nodes=1.5 is not a whole number"),
        ("nodes = 1", "nodes = true", "nodes=True is not a whole number"),
        ("nodes = 1", f"nodes = {2**63}", "nodes=a number beyond 2^63 is out of range"),
        ("nodes = 1", "nodes = " + "9" * 5000, "hardware x is not TOML: "),
        ("nodes = 1", "nodes = " + "[" * 5000, "hardware x is not TOML: "),
        ('name = "NVIDIA DGX-2"', "name = 2", "name=2 is not a text"),
        ('name = "NVIDIA DGX-2"', 'name = "\\u001b[2J"', "is not a text of a line"),
        ("achievable = 0.56", "achievable = 56", "achievable=56 is not a number above 0 and up to 1"),
        ("achievable = 0.56", "achievable = -0.5", "achievable=-0.5 is not a number above 0 and up to 1"),
        ("float16 = 125e12", "float16 = -125e12", "peak.float16=-125000000000000.0 is not a positive number"),
        ("float16 = 125e12", "float16 = " + "9" * 400, "peak.float16=a number beyond 2^63 is not a positive number"),
        ("float16 = 125e12", "float16 = 1e-320", "peak.float16=1e-320 is not a positive number"),
        ("float16 = 125e12", "float16 = nan", "peak.float16=nan is not a positive number"),
        ("float16 = 125e12", 'float16 = "125 TFLOP"', "peak.float16='125 TFLOP' is not a positive number"),
        ("float16 = 125e12\nfloat32 = 15.7e12\n", "", "peak={...} is not a table of float32, float16, bfloat16"),
        ('name = "NVIDIA DGX-2"', 'name = ""', "name='' is not a text of a line"),
        ("float16 = 125e12", "half = 125e12", "peak: unknown field 'half'; accepted: float32, float16, bfloat16"),
        ('capacity = "32GiB"', 'capacity = "32 gigs"', "device.capacity='32 gigs' is not a size"),
        ('capacity = "32GiB"', "capacity = -1", "device.capacity=-1 is not a size"),
        ('capacity = "32GiB"', 'size = "32GiB"', "device: unknown field 'size'; accepted: capacity, read, write"),
        ('bandwidth = "150GB/s"', 'bandwidth = "fast"', "in_node.bandwidth='fast' is not a bandwidth"),
        ('bandwidth = "150GB/s"', "bandwidth = 1e-9", "in_node.bandwidth=1e-09 is not a bandwidth"),
        ('bandwidth = "150GB/s"', 'bandwidth = "0.5B/s"', "in_node.bandwidth='0.5B/s' is not a bandwidth"),
        ('bandwidth = "150GB/s"', "bandwidth = -3", "in_node.bandwidth=-3 is not a bandwidth"),
        ("latency = 20e-6", "latency = -20e-6", "between_nodes.latency=-2e-05 is not a positive number"),
        ("latency = 20e-6", "", "between_nodes: 'latency' is missing; needed: bandwidth, latency"),
        ('endurance = "56000TB"', 'endurance = "long"', "nvme.endurance='long' is not a size"),
        ('endurance = "56000TB"', "", "nvme: 'endurance' is missing"),
        (
            'endurance = "56000TB"',
            'endurance = "1TB"\nread_load = 1.5',
            "nvme.read_load=1.5 is not a number from 0 to below 1",
        ),
        (
            'endurance = "56000TB"',
            'endurance = "1TB"\nwrite_load = -1',
            "nvme.write_load=-1 is not a number from 0 to below 1",
        ),
    ],
)
def test_a_description_is_checked(before: str, after: str, message: str):
    assert before in TEXT
    with pytest.raises(ConfigError) as raised:
        hardware.parse(TEXT.replace(before, after, 1), "x")
    assert message in str(raised.value) and str(raised.value).startswith("hardware x"), raised.value


def test_a_table_that_is_a_value():
    head, _, rest = TEXT.partition("[upload]")
    _, _, rest = rest.partition("[download]")
    with pytest.raises(ConfigError, match="upload=3 is not a table of bandwidth, latency"):
        hardware.parse(f"upload = 3\n{head}[download]{rest}", "x")
    head, _, rest = TEXT.partition("[peak]")
    _, _, rest = rest.partition("[device]")
    with pytest.raises(ConfigError, match="peak=125 is not a table of float32, float16, bfloat16"):
        hardware.parse(f"peak = 125\n{head}[device]{rest}", "x")
