"""Where a model computes: a CPU, whose memory is host memory, or a CUDA device, which tiles are copied to and from.

[Note: order on a device]
Compute is queued on the device's current stream, and copies on two streams of their own, one per direction. A copy
follows the compute that was queued when it was asked for; what is queued after its `join` follows the copy. Memory on
the device belongs to the compute stream, and whoever drops it has joined the copies from and to it. So memory on the
device is bounded by the order in which the program queues its work, however far it runs ahead of the device. What
gathers shards is queued beside compute: it follows their copies, which compute has no need of.

PyTorch's allocator gives memory only to the stream that it had it from. A place in an arena goes to whoever comes next,
so the arena's memory belongs to one stream, too: that of the last `take_over`. This follows what was queued before on
the last owner, and what drops a place that other streams have used makes the owner follow these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock, Thread
from types import ModuleType
from typing import Protocol

import torch

from zinf_fx import cuda
from zinf_fx.errors import StoredTensorError
from zinf_fx.runtime.memory.host import slabs
from zinf_fx.runtime.memory.transfers import Ticket
from zinf_fx.runtime.recorder import RECORDER

# Bytes of values that may be on their way to host memory, whatever a plan has room for, before compute waits for the
# oldest; of large ones, twice the largest: the link is busy with that for longer than it takes to compute what comes
# next.
MAX_BYTES_OFFLOADING = 256 << 20


class Copy(Ticket, Protocol):
    """A copy between host and device memory, under way."""

    def join(self) -> None:
        """What the device computes from now on follows the copy."""


class Upload(Copy, Protocol):
    """A copy to the device, which is started when the elements are in host memory.

    Attributes:
        value: where they go, on the device; None after `drop`.
    """

    value: torch.Tensor | None

    def start(self, host: torch.Tensor) -> None:
        """Start to copy elements, flat, from host memory, which has to stay as it is until the copy is done."""

    def drop(self) -> None:
        """Forget the value: its memory may go to what the device computes from now on."""


class Device:
    """A device to compute on. This one computes in host memory: copies, where there are any, are over at once.

    Attributes:
        torch_device: as PyTorch names it.
        in_host_memory: whether it computes in host memory, so that nothing has to be copied.
        computes_apart: whether it computes while the CPU does something else.
    """

    torch_device = torch.device("cpu")
    in_host_memory = True
    computes_apart = False

    def thread(self, work: Callable[[], None]) -> Thread:
        """A thread for the CPU's work on what the device computes with, in the order of what is queued now."""
        return Thread(target=work, name="zinf-step")

    def beside_compute(self) -> AbstractContextManager[None]:
        """For a block in which what is queued follows what compute has queued by now, and holds none of it up. Memory
        is to be taken before, and compute has to wait for the result."""
        return nullcontext()

    def mark(self) -> Callable[[], bool]:
        """Mark what is queued on the current stream by now: whether the device has done that, asked in any thread."""
        return lambda: True

    def take_over(self, memory: torch.Tensor) -> None:
        """Before a place in the memory of an arena is used again, by what is queued on the current stream."""

    def upload(self, value: torch.Tensor) -> Upload:
        """A copy to `value`, flat and on the device, that follows what is queued now."""
        return _Copied(value)

    def download(self, value: torch.Tensor, host: torch.Tensor, after: Iterable[Ticket] = ()) -> Copy:
        """Start to copy `value`, of any shape, to host memory, flat, in the dtype that this has.

        The copy follows those in `after`. The caller may drop `value`, but not write to it before the copy is joined.
        """
        for transfer in after:
            transfer.wait()
        with RECORDER.work("offload", host.nbytes, self.torch_device):
            host.view(value.shape).copy_(value)
        return _Copied(value)

    def leave_room(self, nbytes: int) -> None:
        """From now on, there is room for so many bytes of values on their way to host memory."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Let the device copy from and to host memory directly: see `Registry`. Returns why it can't."""
        return None

    def unregister(self, address: int) -> None:
        """End what `register` began."""


class _Copied:
    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value

    def start(self, host: torch.Tensor) -> None:
        with RECORDER.work("upload", host.nbytes, host.device):
            assert self.value is not None
            self.value.copy_(host)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    join = wait

    def drop(self) -> None:
        self.value = None


CPU = Device()


class Cuda(Device):
    """A CUDA device: copies run beside compute, on streams of their own, from and to registered host memory."""

    in_host_memory = False
    computes_apart = True

    def __init__(self, torch_device: torch.device, api: ModuleType = cuda) -> None:
        """`api`: what has the device's streams and events, as `zinf_fx.cuda` has them."""
        self.torch_device, self.api = torch_device, api
        self.uploads = api.Stream(torch_device)
        self.downloads = api.Stream(torch_device)
        self._gathers = api.Stream(torch_device)
        self._offloads: deque[_CudaDownload] = deque()
        self._bytes_offloading = self._room = 0
        self._lock = Lock()  # of the two: the CPU's update of parameters has a thread of its own
        self._runtime = api.cudart()
        self._owner: cuda.Stream | None = None  # of the memory of arenas

    def thread(self, work: Callable[[], None]) -> Thread:
        stream = self.compute()  # of each thread, PyTorch has a current one

        def work_on_stream() -> None:
            with self.api.stream(stream):
                work()

        return super().thread(work_on_stream)

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        self._gathers.wait_event(self.compute().record_event())
        with self.api.stream(self._gathers):
            yield

    def mark(self) -> Callable[[], bool]:
        return self.compute().record_event().query

    def take_over(self, memory: torch.Tensor) -> None:
        stream, owner = self.compute(), self._owner
        if owner is not None and stream.cuda_stream != owner.cuda_stream:
            stream.wait_event(owner.record_event())
        self._owner = stream
        self.used_by(stream, memory)

    def used_by(self, stream: cuda.Stream, memory: torch.Tensor) -> None:
        """PyTorch's allocator gives the memory to nobody else before what is queued on `stream` by its end is done."""
        memory.record_stream(stream)

    def dropped_by(self, stream: cuda.Stream) -> None:
        """What was used by what is queued on `stream` by now is free: its next owner follows that."""
        owner = self._owner
        if owner is not None and stream.cuda_stream != owner.cuda_stream:
            owner.wait_event(stream.record_event())

    def upload(self, value: torch.Tensor) -> Upload:
        return _CudaUpload(self, value)

    def download(self, value: torch.Tensor, host: torch.Tensor, after: Iterable[Ticket] = ()) -> Copy:
        if value.device != self.torch_device:
            return CPU.download(value, host, after)
        copy = _CudaDownload(self, value.detach().reshape(-1).to(host.dtype), host, after)
        with self._lock:
            while self._offloads and self._offloads[0].done():
                self._bytes_offloading -= self._offloads.popleft().nbytes
            self._offloads.append(copy)
            self._bytes_offloading += copy.nbytes
            while self._bytes_offloading > max(MAX_BYTES_OFFLOADING, self._room):
                if self._bytes_offloading <= 2 * max(offload.nbytes for offload in self._offloads):
                    break
                first = self._offloads.popleft()
                first.join()
                self._bytes_offloading -= first.nbytes
        return copy

    def leave_room(self, nbytes: int) -> None:
        self._room = nbytes

    def compute(self) -> cuda.Stream:
        """The stream that compute is queued on at present."""
        return self.api.current_stream(self.torch_device.index)

    def register(self, address: int, nbytes: int) -> str | None:
        portable = 1  # known in every CUDA context
        error = int(self._runtime.cudaHostRegister(address, nbytes, portable))
        return f"cudaHostRegister of {nbytes} bytes gave error {error} (ulimit -l?)" if error else None

    def unregister(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)


class _CudaCopy:
    """What uploads and downloads have in common: the event after the copy, and the stream that owns the memory."""

    def __init__(self, device: Cuda) -> None:
        self._device = device
        self._owner = device.compute()
        self._queued = self._owner.record_event()
        self._copied: torch.Event | cuda.Event | None = None
        self._joined = False  # by the owner

    def _start(
        self, kind: str, stream: cuda.Stream, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor
    ) -> None:
        stream.wait_event(self._queued)
        address, itemsize = host.data_ptr(), host.dtype.itemsize
        with self._device.api.stream(stream), RECORDER.work(kind, host.nbytes, self._device.torch_device):
            for first, last in slabs(address, host.nbytes):
                part = slice((first - address) // itemsize, (last - address) // itemsize)
                target[part].copy_(source[part], non_blocking=True)
        self._copied = stream.record_event()

    def done(self) -> bool:
        return self._copied is not None and self._copied.query()

    def wait(self) -> None:
        assert self._copied is not None
        self._copied.synchronize()

    def join(self) -> None:
        if not self._joined:
            assert self._copied is not None
            self._owner.wait_event(self._copied)
            self._joined = True


class _CudaUpload(_CudaCopy):
    def __init__(self, device: Cuda, value: torch.Tensor) -> None:
        super().__init__(device)
        self.value: torch.Tensor | None = value
        self._users = {self._owner.cuda_stream: self._owner}

    def start(self, host: torch.Tensor) -> None:
        assert self.value is not None
        self._start("upload", self._device.uploads, self.value, host, host)

    def join(self) -> None:
        stream = self._device.compute()
        if stream.cuda_stream == self._owner.cuda_stream:
            super().join()
        elif stream.cuda_stream not in self._users:
            assert self._copied is not None and self.value is not None
            stream.wait_event(self._copied)
            if self.value.untyped_storage().resizable():  # else a part of an arena: the allocator knows only the whole
                self._device.used_by(stream, self.value)  # free for others only after what is queued there, too
            self._users[stream.cuda_stream] = stream

    def drop(self) -> None:
        if self._copied is not None:
            super().join()
        self.value = None
        while self._users:
            self._device.dropped_by(self._users.popitem()[1])


class _CudaDownload(_CudaCopy):
    """Keeps the value until the copy is known to be done, or joined."""

    def __init__(self, device: Cuda, value: torch.Tensor, host: torch.Tensor, after: Iterable[Ticket]) -> None:
        super().__init__(device)
        self.nbytes = value.nbytes
        self._value: torch.Tensor | None = value
        for transfer in after:
            if isinstance(transfer, _CudaCopy):
                device.downloads.wait_event(transfer._copied)
            else:
                transfer.wait()
        self._start("offload", device.downloads, host, value, host)

    def done(self) -> bool:
        if not super().done():
            return False
        self._value = None
        return True

    def wait(self) -> None:
        super().wait()
        self._value = None

    def join(self) -> None:
        super().join()
        self._value = None


@cache
def _cuda(index: int) -> Device:
    return Cuda(torch.device("cuda", index))


MAKERS: dict[str, Callable[[torch.device], Device]] = {
    "cpu": lambda device: CPU,
    "cuda": lambda device: _cuda(cuda.current_index(device)),
}
"""By PyTorch's types of devices, what computes on one."""


def device_of(device: torch.device) -> Device:
    """What computes on a device of PyTorch's. Raises: KeyError for a type of device that is not supported."""
    return MAKERS[device.type](device)


def check_device(device: torch.device, what: str) -> None:
    """Raises: StoredTensorError for a device that tiles can't be brought to."""
    if device.type not in MAKERS:
        raise StoredTensorError(
            f"{what} is on device '{device}': tiles are brought to the CPU and to CUDA devices only"
        )
