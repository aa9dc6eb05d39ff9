"""Every option, checked before anything is touched.

Users write one set of names (`Options`, `Config`). A model is stored with some of them (`StoreOptions`), and each graph
is planned with the others (`PlanOptions`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, Unpack, get_args

from zinf_fx.arguments import LARGEST, did_you_mean, shortened
from zinf_fx.environment import STORE, cache_directory, path_from, seen_in
from zinf_fx.errors import ConfigError
from zinf_fx.placement import (
    Chooser,
    Placement,
    PlacementRules,
    Stage,
    Tier,
    check_patterns,
    first_match,
    parsed_patterns,
    parsed_placement,
)

if TYPE_CHECKING:  # it takes seconds to import, and few options need it
    import torch
    import torch.distributed

Natural = Annotated[int, 0]  # with the least that it may be
Positive = Annotated[int, 1]

Activations = Literal["keep", "recompute", "offload", "auto"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
FrozenDtype = Literal["int8", "fp8", "fp8_block", "nf4", "mxfp4"]
FrozenPatterns = tuple[tuple[str, FrozenDtype | None], ...]
Compute = Literal["auto", "eager", "inductor"]
Partition = Literal["shards", "owner"]
Reduction = Literal["mean", "sum"]
LEAST_CHUNK = 1 << 16
MOST_THREADS = 1 << 10  # MOST in native/threads.c

Preset = Literal[
    "device",
    "host",
    "nvme",
    "dp",
    "zero-1",
    "zero-2",
    "zero-3",
    "zero-offload",
    "infinity-cpu",
    "infinity-nvme",
]
PRESETS: dict[Preset, Placement] = {
    # One tier for every model state.
    "device": Placement(),
    "host": Placement("host", "host", "host"),
    "nvme": Placement("nvme", "nvme", "nvme"),
    # ZeRO-Infinity, table 2. Partitioning needs many ranks; on one rank only the tiers differ.
    "dp": Placement(stage=0),
    "zero-1": Placement(stage=1),
    "zero-2": Placement(stage=2),
    "zero-3": Placement(),
    "zero-offload": Placement("device", "host", "host", stage=2),
    "infinity-cpu": Placement("host", "host", "host"),
    "infinity-nvme": Placement("nvme", "host", "nvme"),
}

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 1 << 10 * (i + 1) for i, p in enumerate("KMGTP")}}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGTP")}


def parse_bytes(value: int | str, name: str) -> int:
    """A size in bytes from an integer or a text such as "4GiB", "512 MiB" or "2GB"."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match and match[2] in _UNITS and 1 <= (nbytes := float(match[1]) * _UNITS[match[2]]) <= LARGEST:
        return int(nbytes)
    raise ConfigError(f"{name}={shortened(value)} is not a size: give bytes, or a text such as '4GiB' or '512MiB'")


def parse_rate(value: float | str, name: str) -> float:
    """Bytes per second from a number or a text such as "3GB/s" or "3 GiB/s"."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= LARGEST:
        return float(value)
    if isinstance(value, str):
        with contextlib.suppress(ConfigError):
            return float(parse_bytes(value.strip().removesuffix("/s"), name))
    raise ConfigError(f"{name}={shortened(value)} is not a bandwidth: give bytes per second, or a text such as '3GB/s'")


def parse_count(text: str, name: str) -> int:
    """A whole number of at least 1 from a text."""
    if text.isdecimal() and len(text) <= len(str(LARGEST)) and 1 <= int(text) <= LARGEST:
        return int(text)
    raise ConfigError(f"{name}={shortened(text)} is not a whole number of at least 1, below 2^63")


_LEAST = 1e-30


def parse_positive(value: object, name: str, wanted: str = "a positive number") -> float:
    """A number above 0 with which arithmetic neither overflows nor underflows, from a number or a text."""
    with contextlib.suppress(ValueError, OverflowError):
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else 0.0
        if _LEAST < number < 1 / _LEAST:
            return number
    raise ConfigError(f"{name}={shortened(value)} is not {wanted}")


def _default_store() -> Path | tuple[Path, ...]:
    if configured := os.environ.get(STORE):
        given = configured.split(os.pathsep) if os.pathsep in configured else configured
        return _parse_store(given, lambda: seen_in(STORE, configured))
    return cache_directory()


class PlacementOptions(TypedDict, total=False):
    """The entries of the option `placement`, where it is a mapping: see `StoreOptions`."""

    parameters: Tier | Sequence[tuple[str, Tier]] | Chooser
    gradients: Tier | Sequence[tuple[str, Tier]] | Chooser
    optimizer: Tier | Sequence[tuple[str, Tier]] | Chooser
    activations: Tier
    stage: Stage
    frozen: Tier | None


class Options(TypedDict, total=False):
    """All options by name, as users write them: sizes may be texts such as "4GiB". `Config` says what each means."""

    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    placement: Literal["auto"] | Preset | PlacementOptions | Mapping[str, object] | Placement | PlacementRules
    chunk: int | str
    frozen_dtype: FrozenDtype | Sequence[tuple[str, FrozenDtype | None]] | None
    checksum: bool
    strict_direct: bool
    update_threads: int | None
    process_group: torch.distributed.ProcessGroup | None
    mesh: torch.distributed.device_mesh.DeviceMesh | None
    partition: Partition
    gradient_reduction: Reduction
    reduce_dtype: torch.dtype | str | None
    collective_timeout: float
    device_memory: int | str | None
    host_memory: int | str | None
    prefetch: Sequence[int] | None
    residency: bool
    tile: int | str | None
    pack: int | str | None
    activations: Activations | int
    partition_activations: bool
    compute: Compute
    micro_batches: int | Literal["auto"]
    micro_batch_group: int | Literal["auto"]
    micro_batch_loss: Reduction


@dataclass(frozen=True)
class StoreOptions:
    """The options that a model is stored with: where its states live, in which format, and which ranks share them.

    A stored model keeps them, so the graphs that are compiled of it can't have others.

    Attributes:
        store: directory of the NVMe tier, which must exist, or several on different devices, over which the bytes are
            striped. A relative path is meant from the working directory when the options are given. None: `$ZINF_STORE`
            (several are separated by colons), else a folder (made on demand) in the user's cache directory.
        placement: where model states live: "auto", a preset's name, or a mapping of `parameters`, `gradients`,
            `optimizer`, `activations` to "device", "host" or "nvme" (kinds left out stay on the device), and `stage` to
            that of ZeRO: 0 to 3 (default). The first three may differ from parameter to parameter: in the place of a
            tier stands a list of patterns of qualified names with tiers, as [("*lora*", "device"), ("*", "nvme")], of
            which the first that matches decides, or a function of a name and its parameter that gives the tier. And
            `frozen` is the tier of parameters that don't train, where it isn't that of `parameters`.
        chunk: bytes of fp32 master weights per chunk of the optimizer step. Three are in memory at a time: one is read,
            one updated, and one written. Where the disk is the limit and would be idle in backward, there are up to
            sixteen, or as many as `host_memory` has room for: backward writes what forward left, and reads states
            ahead.
        frozen_dtype: format in which frozen matrices are stored, moved and gathered: "int8" (one scale per row), "fp8"
            (e4m3, one scale per row), "fp8_block" (e4m3, one scale per 128 values), "nf4" (QLoRA, section 3: 4 bits,
            one scale per 64 values), or "mxfp4" (OCP Microscaling Formats: e2m1, one power of two per 32 values). The
            graph makes values of them where it uses them. Embedding tables, and matrices with rows of less than 64
            values, stay as they are. `zinf_fx.offloading` freezes the matrices that it quantises. None: as they are,
            or come: `load_safetensors` keeps what is published in a format. A list of patterns of qualified names with
            these, as [("lm_head.*", None), ("*", "nf4")]: of which the first that matches decides.
        checksum: compare a crc32c of what is read from the store with that of what was written.
        strict_direct: refuse a store where direct I/O doesn't work, instead of using the page cache.
        update_threads: how many threads update a chunk on the CPU at the same time. Results don't depend on it. None:
            as many as PyTorch has (`torch.get_num_threads()` of the thread that steps), but no more than the cores that
            the process's affinity and control groups give it. Beside a GPU, one of more than two cores is left to the
            program that launches kernels.
        process_group: the ranks that train one model together; None: all of torch.distributed's, where that is
            initialised.
        mesh: a torch.distributed DeviceMesh in its place. With one dimension, model states are partitioned over it;
            with two (replicate, shard), over the second, and every index of the first has all of them.
        partition: how what is partitioned is divided: "shards", every parameter in equal parts over all ranks, so that
            each rank's disk and link works on every tile (bandwidth-centric partitioning; ZeRO-Infinity, section 6.1);
            "owner": every parameter is whole at one rank, which broadcasts it (ZeRO-Offload), to compare with.
        gradient_reduction: over the ranks: "mean", or "sum".
        reduce_dtype: of gradients while they are summed over ranks; None: their own.
        collective_timeout: seconds after which a collective that other ranks don't take part in is an error.
    """

    store: Path | tuple[Path, ...] | None = None
    placement: Placement | PlacementRules | Literal["auto"] = "auto"
    chunk: Annotated[int, LEAST_CHUNK] = 32 << 20
    frozen_dtype: FrozenDtype | FrozenPatterns | None = None
    checksum: bool = True
    strict_direct: bool = False
    update_threads: Positive | None = None
    process_group: torch.distributed.ProcessGroup | None = None
    mesh: torch.distributed.device_mesh.DeviceMesh | None = None
    partition: Partition = "shards"
    gradient_reduction: Reduction = "mean"
    reduce_dtype: torch.dtype | None = None
    collective_timeout: float = 600.0

    def __post_init__(self) -> None:
        import torch

        _set(self, "store", _default_store() if self.store is None else _parse_store(self.store))
        _set(self, "placement", _parse_placement(self.placement))
        _set(self, "chunk", parse_bytes(self.chunk, "chunk"))
        if self.chunk < LEAST_CHUNK:
            raise ConfigError(f"chunk={self.chunk} bytes is too small: the least is {LEAST_CHUNK >> 10}KiB")
        if isinstance(self.frozen_dtype, (list, tuple)):
            wanted = (
                "a format, or a list of patterns of names with formats, such as [('lm_head.*', None), ('*', 'nf4')]"
            )
            formats = parsed_patterns("frozen_dtype", self.frozen_dtype, (None, *get_args(FrozenDtype)), wanted)
            _set(self, "frozen_dtype", formats)
        else:
            patterns = "a list of patterns of names with these, such as [('lm_head.*', None), ('*', 'nf4')]"
            _check(self, "frozen_dtype", (None, *get_args(FrozenDtype)), patterns)
        for name in ("checksum", "strict_direct"):
            _check(self, name, (True, False))
        if type(self.update_threads) is not int or not 1 <= self.update_threads <= MOST_THREADS:
            _check(self, "update_threads", (None,), f"a whole number from 1 to {MOST_THREADS}")
        _check(self, "partition", get_args(Partition))
        _check(self, "gradient_reduction", get_args(Reduction))
        if isinstance(self.reduce_dtype, str):
            _set(self, "reduce_dtype", getattr(torch, self.reduce_dtype, self.reduce_dtype))
        _check(self, "reduce_dtype", (None, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        if not (isinstance(self.collective_timeout, (int, float)) and 0 < self.collective_timeout < math.inf):
            raise ConfigError(f"collective_timeout={self.collective_timeout!r} is not accepted; give seconds, above 0")
        _check_ranks(self.process_group, self.mesh)

    @property
    def stores(self) -> tuple[Path, ...]:
        """The directories of the NVMe tier."""
        assert self.store is not None
        return self.store if isinstance(self.store, tuple) else (self.store,)

    @property
    def store_is_default(self) -> bool:
        """Whether the store is the default folder, which is made on demand. One that the user names must exist, so that
        a typing error is noticed."""
        return not os.environ.get(STORE) and self.store == _default_store()

    @property
    def stage(self) -> Stage:
        """The stage of ZeRO, which says what is partitioned."""
        return 3 if self.placement == "auto" else self.placement.stage

    @property
    def own_placement(self) -> Placement:
        """The placement of one parameter, whose options these are: it is decided, and has no rules."""
        assert isinstance(self.placement, Placement)
        return self.placement

    @property
    def on_nvme(self) -> bool:
        """Whether any model state may live there."""
        return self.placement != "auto" and self.placement.on_nvme

    def frozen_dtype_of(self, name: str) -> FrozenDtype | None:
        """The format of a frozen matrix of this name. Raises: ConfigError where no pattern matches it."""
        if isinstance(self.frozen_dtype, tuple):
            return first_match("frozen_dtype", self.frozen_dtype, name, value="format")
        return self.frozen_dtype

    def check_names(self, names: Collection[str], tied_names: Collection[str] = ()) -> None:
        """Check that patterns of names are for a model whose parameters have these, and `tied_names`, where they are
        tied. Raises: ConfigError."""
        if isinstance(self.placement, PlacementRules):
            self.placement.check_model(names)
        if isinstance(self.frozen_dtype, tuple):
            check_patterns("frozen_dtype", self.frozen_dtype, names, "format", tied_names)


@dataclass(frozen=True)
class PlanOptions:
    """The options that a graph is planned with: budgets, and how it is scheduled and computed.

    Those that a model is offloaded with are the defaults of its graphs, which may have others.

    Attributes:
        device_memory: budget for the states that live on the device, the activations that stay there from forward to
            backward, and tiles and gradients in flight, in bytes or as "4GiB". None: no limit.
        host_memory: budget of the host tier, in bytes or as "4GiB". None: the machine's memory, or what its control
            group allows the process, such as a container's.
        prefetch: how many operators ahead of its use a tile's all-gather, upload and fetch start (ZeRO-Infinity,
            section 6.2); in inference, fetches so early that up to 128 MiB are under way. None: each starts when it is
            needed.
        residency: keep tiles in memory between uses where the budgets leave room, those first that are used next;
            without a budget, tiles of norms and biases alone. False: every use moves its tile again.
        tile: bytes, or a text such as "64MiB", above which a parameter is divided into tiles (ZeRO-Infinity, section
            5.1.3: memory-centric tiling). "auto": tiles as large as fit the budgets; without a budget, or where one
            tile per parameter fits it, as None: one tile per parameter. Where parameters are divided over ranks, shards
            consist of tiles, and the option is for where the model is offloaded.
        pack: bytes, or a text such as "16MiB", up to which small parameters of one kind move together, as one tile
            (ZeRO, section 6.2: constant-size buffers); "auto": 4 MiB, or 32 MiB where they are copied to a GPU, and a
            64th of a budget at most. None: each parameter moves by itself. Over ranks, one collective moves a pack.
        activations: "keep": what eager PyTorch saves; "recompute": backward computes them again from a few checkpoints,
            chosen for the least peak; a number: from a checkpoint before every so many layers (ZeRO-Infinity,
            equation 3: ci); "offload": what eager PyTorch saves leaves the device; "auto": each is kept, recomputed or
            offloaded, for the least time within device_memory. What is saved lives where `placement` says; "offload"
            and "auto", where that says "device", use NVMe if any state lives there, and else host memory.
            `torch.utils.checkpoint` in the model is respected in any case.
        partition_activations: with tensor parallelism, each rank keeps its part only of what is saved for backward and
            equal on all ranks that divide parameters; it is all-gathered when backward needs it (ZeRO, section 6.1:
            Pa; with activations on "host" or "nvme", Pa+cpu).
        compute: "eager": an operator's operations run one after the other, by PyTorch's own kernels, so that results
            are those of plain PyTorch to the bit; "inductor": Inductor compiles them together, for which it needs a C++
            compiler, and for a GPU Triton. "auto": Inductor where a GPU computes and has these, else PyTorch's own
            kernels; a plan says which.
        micro_batches: into how many equal parts the batch of a training step is divided along its first dimension.
            All of them run an operator, or a group of these, before the next one begins, so that parameters and
            gradients move once per step, and every result is that of a loop over the parts. "auto": a number that
            divides the batch, and groups of operators for it, with which a step fits the budgets and memories and is
            simulated to take the least time; of those that take as long, the fewest. Takes sizes that Dynamo leaves
            open: `dynamic=True`.
        micro_batch_group: what a micro-batch runs before the next one does: so many consecutive operators or, with
            "auto", groups of them that end where least is handed on. What is computed and used up within a group is in
            memory of one micro-batch at a time; the tiles of a group are there until all micro-batches have run it.
            With micro_batches="auto", 1 leaves the choice between 1 and "auto" open.
        micro_batch_loss: what the loss of the batch is of those of its micro-batches: "mean", or "sum".
    """

    device_memory: Positive | None = None
    host_memory: Positive | None = None
    prefetch: tuple[Natural, Natural, Natural] | None = (1, 2, 3)
    residency: bool = True
    tile: Positive | Literal["auto"] | None = "auto"
    pack: Positive | Literal["auto"] | None = "auto"
    activations: Activations | Positive = "keep"
    partition_activations: bool = False
    compute: Compute = "auto"
    micro_batches: Positive | Literal["auto"] = 1
    micro_batch_group: Positive | Literal["auto"] = 1
    micro_batch_loss: Reduction = "mean"

    def __post_init__(self) -> None:
        _set(self, "prefetch", _parse_prefetch(self.prefetch))
        no_sizes: dict[str, tuple[object, ...]] = dict.fromkeys(("device_memory", "host_memory"), (None,))
        no_sizes |= dict.fromkeys(("tile", "pack"), (None, "auto"))
        for name, accepted in no_sizes.items():
            if (value := getattr(self, name)) not in accepted:
                _set(self, name, parse_bytes(value, name))
        for name in ("residency", "partition_activations"):
            _check(self, name, (True, False))
        if type(self.activations) is not int or self.activations < 1:
            _check(self, "activations", ACTIVATIONS, "the number of layers between two checkpoints")
        _check(self, "compute", get_args(Compute))
        for name in ("micro_batches", "micro_batch_group"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= LARGEST:
                _check(self, name, ("auto",), "a whole number of at least 1")
        if self.micro_batches == 1 and self.micro_batch_group != 1:
            raise ConfigError(
                f"micro_batch_group={self.micro_batch_group!r} says what one of several micro-batches runs before the "
                "next one does, and the batch isn't divided: give micro_batches too, or leave it out"
            )
        _check(self, "micro_batch_loss", get_args(Reduction))

    @property
    def in_groups(self) -> bool:
        """Whether what is used up within a group of operators is there of one micro-batch at a time."""
        return self.micro_batch_group != 1


@dataclass(frozen=True)
class Config(PlanOptions, StoreOptions):
    """All options of zinf_fx, under one set of names: those of `StoreOptions`, which a model is stored with, and those
    of `PlanOptions`, which each of its graphs is planned with.

    Every option is also a keyword argument of the functions that take a `config`, and an entry of the `options` of
    `torch.compile`.

    Attributes:
    """

    if TYPE_CHECKING:  # what is given may be a text, such as "4GiB"; what is read are the fields' types

        def __init__(self, **options: Unpack[Options]) -> None: ...

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        PlanOptions.__post_init__(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Config:
        """Return this object: it doesn't change, and Dynamo, which meets it as a part of every stored tensor, would
        copy a process group or a mesh, of which there are no copies."""
        return self

    @property
    def micro_batch_count(self) -> int:
        """How many micro-batches a batch is divided into, which is decided."""
        assert self.micro_batches != "auto"
        return self.micro_batches

    @property
    def activation_tier(self) -> Tier:
        """Where saved activations live between forward and backward."""
        placement = self.placement
        if placement == "auto":  # only a model without stored parameters is planned with "auto"
            return "device"
        if self.activations not in ("offload", "auto") or placement.activations != "device":
            return placement.activations
        return "nvme" if self.on_nvme else "host"

    @classmethod
    def of(cls, config: Config | None, options: Mapping[str, object]) -> Config:
        """`config` with `options` replaced; unknown names are refused with the accepted ones."""
        accepted = option_names()
        if unknown := sorted(set(options) - set(accepted)):
            meant = "".join(did_you_mean(name, accepted) for name in unknown)
            raise ConfigError(f"unknown option {', '.join(map(repr, unknown))}; accepted: {', '.join(accepted)}{meant}")
        if config is None:
            return cls(**options)  # type: ignore[arg-type]
        if not isinstance(config, cls):
            raise ConfigError(f"config must be a zinf_fx.Config, found {type(config).__name__}{_instead_of(config)}")
        return replace(config, **options)  # type: ignore[arg-type]


def _attributes_of(options: type) -> str:
    return (options.__doc__ or "").partition("Attributes:\n")[2].rstrip()


# So that `help(zinf_fx.Config)` has each option.
Config.__doc__ = "\n".join([(Config.__doc__ or "").rstrip(), _attributes_of(StoreOptions), _attributes_of(PlanOptions)])


def option_names() -> list[str]:
    """The names of all options, in the order in which people look for them."""
    return [option.name for option in fields(Config)]


def _set(options: StoreOptions | PlanOptions, name: str, value: object) -> None:
    object.__setattr__(options, name, value)


def _check(options: StoreOptions | PlanOptions, name: str, accepted: Sequence[object], *described: str) -> None:
    """Raises: ConfigError for an option that is none of the accepted values. `described`: what else is, in words."""
    given = getattr(options, name)
    if not any(isinstance(given, type(value)) and given == value for value in accepted):  # 1 is not True
        allowed = ", ".join([*map(repr, accepted), *described])
        meant = did_you_mean(given, [value for value in accepted if isinstance(value, str)])
        raise ConfigError(f"{name}={shortened(given)} is not accepted; accepted: {allowed}{meant}")


def _check_ranks(group: object, mesh: object) -> None:
    """Raises: ConfigError for what says no, or twice, which ranks train together."""
    import torch

    available = torch.distributed.is_available()  # without it, there are no such classes either
    if group is not None and not (available and isinstance(group, torch.distributed.ProcessGroup)):
        raise ConfigError(f"process_group={group!r} is not a torch.distributed.ProcessGroup: see new_group()")
    if mesh is None:
        return
    if group is not None:
        raise ConfigError("mesh and process_group both say which ranks train together: give one of them")
    if not (available and isinstance(mesh, torch.distributed.device_mesh.DeviceMesh)):
        raise ConfigError(f"mesh={mesh!r} is not a torch.distributed DeviceMesh: see init_device_mesh()")
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            f"mesh={mesh!r} has {mesh.ndim} dimensions; accepted: one (shard), or two (replicate, shard). Of a "
            "larger one, give a part, as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"mesh={mesh!r} is one that this process is not in: give each rank a mesh of its own")


def _instead_of(config: object) -> str:
    """What to give in the place of what is no Config, if that can be said."""
    if isinstance(config, Mapping):
        known = {*option_names()}.issuperset(config)
        return ": give its entries by name, as **options" if known else ": its entries are no options of zinf_fx"
    if isinstance(config, (str, os.PathLike)):
        return f" {shortened(str(config))}: files with options aren't read; give options by name, such as placement=..."
    return ": give one, or options by name, such as placement='nvme'"


def _parse_store(value: object, start: Callable[[], str] = os.getcwd) -> Path | tuple[Path, ...]:
    """The directories, which are absolute from now on. `start`: that from which relative ones are meant."""
    if isinstance(value, (str, os.PathLike)):
        value = (value,)
    if not (
        isinstance(value, (tuple, list))
        and value
        and all(isinstance(directory, (str, os.PathLike)) for directory in value)
    ):
        raise ConfigError(f"store={value!r} is not a path: give one directory on the NVMe file system, or several")
    if not all(os.fspath(directory) for directory in value):
        raise ConfigError(
            f"store={list(map(str, value))} has an empty path: name each directory, such as '.' for this one"
        )
    try:
        paths = tuple(path_from(start, given) for given in value)
    except FileNotFoundError as error:
        raise ConfigError(
            f"store={list(map(str, value))} is relative, and the working directory is gone: name it from the root"
        ) from error
    if len({*paths}) < len(paths):
        raise ConfigError(f"store={list(map(str, paths))} names a directory twice")
    return paths[0] if len(paths) == 1 else paths


def _parse_placement(value: object) -> Placement | PlacementRules | Literal["auto"]:
    if isinstance(value, (Placement, PlacementRules)):
        value = {state.name: getattr(value, state.name) for state in fields(value)}
    if isinstance(value, str):
        if value == "auto":
            return "auto"
        if value not in PRESETS:
            accepted = ["auto", *PRESETS]
            raise ConfigError(
                f"placement={value!r} is unknown; accepted: {', '.join(map(repr, accepted))}"
                f"{did_you_mean(value, accepted)}"
            )
        return PRESETS[value]
    if not isinstance(value, Mapping):
        raise ConfigError(f"placement={value!r} is neither a preset's name nor a mapping of states to tiers")
    return parsed_placement(value)


def _parse_prefetch(value: object) -> tuple[int, int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, (tuple, list)) and len(value) == 3 and all(isinstance(d, int) and d >= 0 for d in value)):
        raise ConfigError(f"prefetch={value!r} is not accepted; give three distances such as (1, 2, 3), or None")
    allgather, upload, fetch = value
    if not allgather <= upload <= fetch:
        raise ConfigError(
            f"prefetch={value!r}: a tile is fetched, then uploaded, then all-gathered, so the distances "
            "(all-gather, upload, fetch) must not fall"
        )
    return (allgather, upload, fetch)
