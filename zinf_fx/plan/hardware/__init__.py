"""Descriptions of machines: what computes, what holds how much, and what moves how fast.

A description is a TOML file; those beside this one are found by name. `load` checks it strictly.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from zinf_fx.adam import UpdateForm
from zinf_fx.arguments import did_you_mean
from zinf_fx.config import Positive, parse_bytes, parse_positive, parse_rate, shortened
from zinf_fx.errors import ConfigError
from zinf_fx.regular_files import read_regular

SECONDS_PER_DAY = 86_400

THIS_MACHINE = "this-machine"
"""The name of no description: of the machine at hand, which is measured when it is asked for."""

# Bytes: a description has some lines.
_LARGEST_FILE = 1 << 20

# -- what a value may be ----------------------------------------------------------------------------------------------


def _number(value: object, name: str, wanted: str = "a positive number") -> float:
    if isinstance(value, str):
        raise ConfigError(f"{name}={shortened(value)} is not {wanted}")
    return parse_positive(value, name, wanted)


def _share(value: object, name: str) -> float:
    share = _number(value, name, "a number above 0 and up to 1")
    if share > 1:
        raise ConfigError(f"{name}={value!r} is not a number above 0 and up to 1")
    return share


def _lost_share(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name}={shortened(value)} is not a number from 0 to below 1")
    return float(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{name}={shortened(value)} is not a text of a line")
    return value


def _endurance(value: Any, name: str) -> int | None:
    return None if value == "unknown" else parse_bytes(value, name)


Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

# A field's type, and the function that makes it of a value and the field's name, or refuses the value.
_Bytes = Annotated[int, parse_bytes]
_Rate = Annotated[float, parse_rate]
_Number = Annotated[float, _number]
_Share = Annotated[float, _share]
_LostShare = Annotated[float, _lost_share]
_Text = Annotated[str, _text]
_Endurance = Annotated[int | None, _endurance]


# -- the description --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes that it holds, and bytes per second that are read from it and written to it."""

    capacity: _Bytes
    read: _Rate
    write: _Rate

    def seconds(self, read: float, written: float) -> float:
        """How long it takes to read and write so many bytes."""
        return read / self.read + written / self.write


@dataclass(frozen=True)
class Disks(Memory):
    """The NVMe drives of a node together.

    Attributes:
        endurance: bytes that may be written before they are worn (TBW), all drives'; None, in a file "unknown".
        read_load, write_load: the share of its speed that computing loses while the drives read, and while they write,
            because checksums and transfers take processors and memory's bandwidth. It counts where device and host are
            one memory, and then for all that is computed.
        start: seconds that the program takes to start a transfer, because what moves it needs a processor that computes
            at the time. It counts where device and host are one memory.
        beside: the share of their speed that the drives keep while something is computed, because what moves their
            bytes needs processors. It counts where device and host are one memory.
        depth: blocks that each rank has under way at a time; transfers share the drives' speed by theirs. 1: a transfer
            begins when the one before it is done.
        block: bytes of each.
        alone: the share of their speed that the drives have while one block is under way; with n of them it is
            (n / depth) ** p, where p follows from that. Where device and host are one memory it is measured beside
            computing, for which the thread that starts a block, and sees that it is done, has to wait, and counts
            throughout.
    """

    endurance: _Endurance
    read_load: _LostShare = 0.0
    write_load: _LostShare = 0.0
    start: _Number = 0.0
    beside: _Share = 1.0
    depth: Positive = 1
    block: _Bytes = 4 << 20
    alone: _Share = 1.0

    def blocks(self, nbytes: int) -> int:
        """Into how many so many bytes are divided."""
        return max(1, -(-nbytes // self.block))

    def days_until_worn(self, written_per_day: float) -> float | None:
        """Days until they are, when so many bytes are written per day; None where that isn't known, or none are."""
        return self.endurance / written_per_day if written_per_day and self.endurance is not None else None


@dataclass(frozen=True)
class Link:
    """Bytes per second in one direction, and seconds until the first byte arrives."""

    bandwidth: _Rate
    latency: _Number

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take."""
        return self.latency + nbytes / self.bandwidth if nbytes else 0.0


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes with equal devices.

    Attributes:
        nodes, ranks_per_node: a rank has one device.
        peak: FLOP per second of one device, by dtype, as its maker states it, without sparsity.
        achievable: the share of the peak that training reaches when it waits for no transfer.
        device: memory of one device.
        host, nvme: of one node, which its ranks share.
        upload, download: between host memory and one device, while all devices of the node use theirs.
        in_node, between_nodes: what a collective of all ranks of one node sees, and of several nodes.
        updates: parameters per second that one node's CPUs update by Adam's arithmetic, by the form of their states;
            where there is none of a form, as fast as host memory gives and takes the states.
        launch: seconds that the program takes to give a device one kernel, whatever that computes; 0 where operators
            are computed by the program itself.
        unified: device and host are one memory. Nothing is uploaded, and the device copies what leaves it.
    """

    name: _Text
    nodes: Positive
    ranks_per_node: Positive
    achievable: _Share
    peak: dict[Dtype, _Number]
    device: Memory
    host: Memory
    nvme: Disks
    upload: Link
    download: Link
    in_node: Link
    between_nodes: Link
    updates: dict[UpdateForm, _Number] = field(default_factory=dict)
    launch: _Number = 0.0
    unified: bool = False

    @property
    def ranks(self) -> int:
        """How many there are in all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def link(self) -> Link:
        """What a collective of all ranks sees."""
        return self.in_node if self.nodes == 1 else self.between_nodes

    def link_within(self, ranks: int) -> Link:
        """What a collective of each group of so many neighbouring ranks sees."""
        return self.in_node if self.ranks_per_node % ranks == 0 else self.between_nodes

    def link_across(self, ranks: int) -> Link:
        """What a collective of one rank of each group of so many neighbouring ranks sees, while the other ranks of the
        groups are in such ones too: all that are of a node share what leads out of it."""
        if self.nodes == 1:
            return self.in_node
        together = min(ranks, self.ranks_per_node)
        return replace(self.between_nodes, bandwidth=self.between_nodes.bandwidth / together)

    def with_ranks(self, ranks: int) -> Hardware:
        """Return a machine of as many such nodes as so many ranks fill; this one where they don't fill nodes."""
        if ranks % self.ranks_per_node or ranks <= self.ranks:
            return self
        nodes = ranks // self.ranks_per_node
        return replace(self, nodes=nodes, name=f"{nodes} x {self.name}" if self.nodes == 1 else self.name)

    def achieved(self, dtype: str) -> float:
        """FLOP per second of one device that waits for no transfer; of codes of 8 bits, which descriptions don't have,
        as many as of the fastest dtype. Raises: ConfigError for another dtype without a peak."""
        if dtype not in self.peak and dtype.startswith(("int8", "uint8", "float8")):
            return max(self.peak.values()) * self.achievable
        if dtype not in self.peak:
            raise ConfigError(f"{self.name} has no peak for {dtype}; it has: {', '.join(self.peak)}")
        return self.peak[dtype] * self.achievable


# -- loading ----------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The descriptions that come with the package."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if entry.name.endswith(".toml")
    )


def load(name: str) -> Hardware:
    """A description by its name, or from a TOML file.

    Raises: ConfigError: there is none, or it isn't one; the message names the field.
    """
    if name in names():
        return parse(files(__name__).joinpath(f"{name}.toml").read_text(), name)
    path = Path(name)
    if path.suffix != ".toml":
        meant = did_you_mean(name, [*names(), THIS_MACHINE])
        raise ConfigError(f"hardware {name!r} is unknown; accepted: {', '.join(names())}, or a file NAME.toml{meant}")
    try:
        return parse(read_regular(path, _LARGEST_FILE).decode(), name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware file {name} can't be read: {error}") from error


def parse(text: str, source: str) -> Hardware:
    """A description from TOML; `source` is named in errors. Raises: ConfigError."""
    from zinf_fx.plan.codec import decode  # it imports torch, which takes seconds, and `--help` needs names alone

    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of TOML, and for what it nests or counts too far
        raise ConfigError(f"hardware {source} is not TOML: {error}") from error
    return decode(Hardware, content, f"hardware {source}", ConfigError)
