"""Stand in for a CUDA device: kernels and copies take the time that a description says, and the queue notes when the
program launched each.

Tensors of the device are tensors of the CPU that nobody computes: their memory is never touched, so a model may be far
larger than this machine. The program is the one that runs on a GPU: the runtime's `Cuda`, over streams and events that
are modelled (modelled_time.py), and the operations of the graph, of which each is a launch. Its time is the processor
time of its thread. What the stand-in itself takes doesn't count; in its place, a launch takes `launch` seconds: what
PyTorch and the driver take for one. Where the program waits for the disk or for the device, its time goes on to when
that is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import median
from threading import Thread
from typing import Any

import torch
from modelled_time import Clock, Disk, Stream, Streams
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from zinf_fx.native import kernels
from zinf_fx.optim import step
from zinf_fx.optim.kernels import has_kernel
from zinf_fx.optim.threads import BackgroundThread
from zinf_fx.plan import packs
from zinf_fx.plan.hardware import Hardware, Link, Memory
from zinf_fx.runtime.disk.store import Store
from zinf_fx.runtime.memory.device import MAKERS, Cuda

aten = torch.ops.aten
# These return their argument's memory, or memory without values, and launch nothing.
_NOT_LAUNCHED = {
    aten._unsafe_view.default,
    aten._local_scalar_dense.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten.resize_.default,
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Bytes of the modelled disk: address space, of which no byte exists.
_DISK = 1 << 44
# Bytes of an element that is kept in each of a native kernel's ways, without scales.
_ITEMSIZES = {kernels.FP32: 4, kernels.BF16: 2, kernels.FP16: 2, kernels.CODES: 1, kernels.SPLIT: 2}
# Elements of tensors that are computed: an optimizer's numbers.
_FEW = 16
# Seconds between two looks at the other thread's clock.
_NAP = 1e-4
# An operation's way here is measured by so many calls, so often.
_CALLS, _TIMES = 500, 5


@dataclass(frozen=True)
class Launch:
    """A launch is a kernel or a copy: it says when the program launched it, from when on the device could have run it,
    and when it ran.

    Attributes:
        ready: when all that ran before it on the stream, and all that the stream waits for, is done.
        free: when all that ran before it on the stream is done.
        places: addresses of the memory that it reads or writes, as (begin, end).
    """

    name: str
    launched: float
    free: float
    ready: float
    start: float
    end: float
    places: tuple[tuple[int, int], ...]

    @property
    def late(self) -> float:
        """Return the seconds for which the device had nothing to do because the program had not come so far."""
        return self.start - self.ready


class StandIn(Cuda):
    """Run the runtime's device on modelled streams. `on_host` is the mode in which a thread computes on the host."""

    def __init__(self, torch_device: torch.device, streams: Streams, on_host: OnHost) -> None:
        super().__init__(torch_device, streams)
        self._on_host = on_host

    def thread(self, work: Callable[[], None]) -> Thread:
        began, on_host = self._on_host.clock.now(), self._on_host

        def in_its_time() -> None:
            on_host.clock.begin(began)
            with on_host:
                work()

        return Thread(target=in_its_time)

    def used_by(self, stream: Stream, memory: torch.Tensor) -> None:
        """Do nothing: the memory is the CPU's, whose allocator knows no streams."""


class OnHost(TorchDispatchMode):
    """Stands for the CPU in the thread beside the one that launches: it computes nothing, and takes the time that its
    memory would take.

    Attributes:
        seconds: for how long it computed.
    """

    def __init__(self, clock: Clock, memory: Memory) -> None:
        super().__init__()
        self.clock, self._memory = clock, memory
        self.seconds = 0.0
        self.beside: StandInThread | None = None  # the thread that this is on in
        self._made: dict[object, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began, kwargs = time.thread_time(), kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = _tensors_in(flat)
        plain = all(type(tensor) in _PLAIN for tensor in tensors)
        if not _is_launched(func) or not plain or all(tensor.numel() <= _FEW for tensor in tensors):
            result = func(*args, **kwargs)
            self.clock.spend(began - time.thread_time())  # most of it is the way here
            return result
        result, written = self._result_of(func, flat, args, kwargs)
        read = sum(tensor.nbytes for tensor in tensors) - (written if func is aten.copy_.default else 0)
        self._spend(read, written, began)
        return result

    def update(self, operands: Sequence[Any]) -> None:
        """Take the time that a native kernel takes for `struct zinf_operands`."""
        began, read, written = time.thread_time(), 0, 0
        for of_parameter in operands:
            gradient, weight = of_parameter.gradient, of_parameter.weight
            kept = [state for state in (of_parameter.master, *of_parameter.states) if state.values]
            nbytes = of_parameter.count * sum(_ITEMSIZES[array.kind] for array in kept)
            rounded = of_parameter.count * _ITEMSIZES[weight.kind] if weight.values else 0
            read += nbytes + of_parameter.count * _ITEMSIZES[gradient.kind]
            read += rounded if of_parameter.master.kind == kernels.SPLIT else 0
            written += nbytes + rounded
        self._spend(read, written, began)

    def _spend(self, read: int, written: int, began: float) -> None:
        """Spend the time of bytes that are read and written. What the stand-in took since `began` doesn't count."""
        seconds = self._memory.seconds(read, written)
        self.seconds += seconds
        self.clock.spend(seconds + began - time.thread_time())
        if self.beside is not None:
            self.beside.keep_step()

    def _result_of(self, func: Any, flat: list[Any], args: tuple, kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Return what an operation returns, without values, and the bytes that it writes."""
        if func._schema.is_mutable:
            given = zip(func._schema.arguments, args, strict=False)
            named = (
                (argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs
            )
            changed = [
                value for argument, value in (*given, *named) if argument.alias_info and argument.alias_info.is_write
            ]
            result = kwargs.get("out", args[0] if args else None) if func._schema.returns else None
            return result, sum(tensor.nbytes for tensor in _tensors_in(changed))
        key = (func, *(_described(value) for value in flat))
        if key not in self._made:
            self._made[key] = _made_on_meta(func, args, kwargs)
        made = tree_map(lambda value: _empty_like(value) if isinstance(value, torch.Tensor) else value, self._made[key])
        return made, sum(tensor.nbytes for tensor in _tensors_in(made))


class StandInThread(BackgroundThread):
    """Keep the runtime's background thread in step with the one that launches: its work is done when the clock of the
    launching thread says so, and who waits for it waits until its own clock says so."""

    def __init__(self, device: StandIn, go_on: Callable[[], bool]) -> None:
        super().__init__(device, self._go_on_and_look)
        self._step, self._clock = go_on, device._on_host.clock
        self._awaited: Callable[[], bool] | None = None
        self._came = self._ended = 0.0  # when the awaited state came, and when the last part of the work ended
        device._on_host.beside = self

    def wait(self, is_so: Callable[[], bool]) -> bool:
        if is_so():
            return True
        self._came, self._awaited = 0.0, is_so
        try:
            if is_so():  # since the line before
                self._came = self._ended
                return True
            return super().wait(lambda: self._came > 0) or is_so()
        finally:
            self._awaited = None
            self._clock.wait(self._came, "the optimizer")

    def keep_step(self) -> None:
        """Wait until the launching thread has come to this moment, or waits for this one."""
        with self._clock.stopped():
            while self._awaited is None and self._clock.of_launching() < self._clock.now():
                time.sleep(_NAP)

    def _go_on_and_look(self) -> bool:
        more = self._step()
        self._ended = self._clock.now()
        if (awaited := self._awaited) is not None and awaited():
            self._awaited, self._came = None, self._ended  # from here on, this thread keeps step again
        return more


class LaunchQueue(TorchDispatchMode):
    """While this is on, operations on CPU tensors are launches on a device, and compute nothing.

    Attributes:
        launches: all kernels, in order.
        copies: the uploads and downloads, in order.
    """

    def __init__(self, hardware: Hardware, counter: Callable[[], float] = time.thread_time) -> None:
        """`counter` counts the program's seconds, as for `Clock`."""
        super().__init__()
        self.clock = Clock(counter)
        self.launches: list[Launch] = []
        self.copies: list[Launch] = []
        self.streams = Streams(self.clock)
        self.on_host = OnHost(self.clock, hardware.host)
        self.device = StandIn(torch.device("cpu"), self.streams, self.on_host)
        self.disk = Disk(self.clock, *(rate / hardware.ranks_per_node for rate in _rates(hardware)))
        self._links: dict[Stream, tuple[str, Link]] = {
            self.device.uploads: ("upload", hardware.upload),
            self.device.downloads: ("download", hardware.download),
        }
        self._hardware = hardware
        self._known: dict[object, tuple[float, Any]] = {}  # seconds and results of kernels
        self._entry = 0.0  # seconds that it takes an operation to come here, and back

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that Dynamo captures as it does without this mode."""
        return True

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Open a block in which this device computes with stored tensors of the CPU."""
        before, alone, beside = MAKERS["cpu"], packs.IN_HOST_MEMORY, step.BackgroundThread
        native_update = kernels.update
        for of_torch in (torch.optim.Adam, torch.optim.AdamW):  # compares values, of which there are none here
            has_kernel(of_torch([torch.nn.Parameter(torch.zeros(1))], fused=True))

        def update(options: Any, operands: Any, instructions: int, threads: int) -> None:
            mode = _get_current_dispatch_mode()
            if isinstance(mode, OnHost):
                mode.update(operands)
            else:
                native_update(options, operands, instructions, threads)

        MAKERS["cpu"] = lambda torch_device: self.device
        packs.IN_HOST_MEMORY, step.BackgroundThread, kernels.update = frozenset(), StandInThread, update
        try:
            with self:
                self._entry = self._measured_entry()
                yield
        finally:
            MAKERS["cpu"], packs.IN_HOST_MEMORY, step.BackgroundThread = before, alone, beside
            kernels.update = native_update

    def _measured_entry(self) -> float:
        """Return how many seconds longer an operation that isn't launched takes in this mode than without it, as the
        clock sees it."""
        value = torch.empty(1)

        def seconds() -> float:
            began = self.clock.now()
            for _ in range(_CALLS):
                value.view(1)
            return self.clock.now() - began

        here = [seconds() for _ in range(_TIMES)]
        with _disable_current_modes():
            elsewhere = [seconds() for _ in range(_TIMES)]
        return (median(here) - median(elsewhere)) / _CALLS

    def serve(self, store: Store) -> None:
        """Model the disk of a store, of which nothing is read, written or reserved any more."""
        (volume,) = store.volumes
        volume.file.detach()
        volume._file = self.disk
        volume._space.extend(volume.size, _DISK)
        volume.size += _DISK

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        began, now = time.thread_time(), self.clock.now() - self._entry
        result = self._called(func, args, kwargs or {}, now)
        self.clock.spend(began - time.thread_time() - self._entry)
        return result

    def _called(self, func: Any, args: tuple, kwargs: dict[str, Any], now: float) -> Any:
        if not _is_launched(func):
            return func(*args, **kwargs)
        flat, _ = tree_flatten((args, kwargs))
        tensors = _tensors_in(flat)
        if any(type(tensor) not in _PLAIN or tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        stream = self.streams.current
        if stream in self._links:
            name, link = self._links[stream]
            seconds, result = link.seconds(tensors[0].nbytes), args[0]
            kept = self.copies
        else:
            name, kept = str(func), self.launches
            seconds, result = self._result_of(func, flat, args, kwargs)
        free, ready, start = stream.put(seconds, now)
        used = [tensor for tensor in (*tensors, *_tensors_in(result)) if tensor.nbytes]
        places = tuple((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in used)
        kept.append(Launch(name, now, free, ready, start, stream.end, places))
        self.clock.spend(self._hardware.launch)
        return result

    def _result_of(self, func: Any, flat: list[Any], args: tuple, kwargs: dict[str, Any]) -> tuple[float, Any]:
        """Return the seconds of a kernel, and what it returns, without values."""
        key = (func, *(_described(value) for value in flat))
        if key not in self._known:
            self._known[key] = self._modelled(func, args, kwargs)
        seconds, made = self._known[key]
        if func._schema.is_mutable:
            return seconds, None if not func._schema.returns else kwargs.get("out", args[0] if args else None)
        return seconds, tree_map(lambda value: _empty_like(value) if isinstance(value, torch.Tensor) else value, made)

    def _modelled(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[float, Any]:
        made = _made_on_meta(func, args, kwargs)
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=made) if count is not None else 0
        seconds = sum(tensor.nbytes for tensor in _tensors_in((args, kwargs, made))) / self._hardware.device.read
        if flops:
            dtype = _tensors_in(made)[0].dtype
            seconds = max(seconds, flops / self._hardware.achieved(str(dtype).removeprefix("torch.")))
        return seconds, made


def _rates(hardware: Hardware) -> tuple[float, float]:
    return hardware.nvme.read, hardware.nvme.write


@cache
def _is_launched(func: Any) -> bool:
    """Whether an operation computes something."""
    if not isinstance(func, torch._ops.OpOverload) or func in _NOT_LAUNCHED or func.namespace not in ("aten", "prims"):
        return False
    return func._schema.is_mutable or not any(returned.alias_info for returned in func._schema.returns)


def _tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _described(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return str(value)


def _on_meta(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _made_on_meta(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns, on the meta device."""
    args, kwargs = tree_map(_on_meta, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)


def _empty_like(made: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype)
