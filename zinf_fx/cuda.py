"""What zinf_fx asks of CUDA: the one module that calls `torch.cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch.cuda import Event, Stream

__all__ = ["Event", "Stream"]


def is_available() -> bool:
    """Whether there is a CUDA device."""
    return torch.cuda.is_available()


def devices() -> list[torch.device]:
    """Return the CUDA devices of this machine that the process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def current_index(device: torch.device) -> int:
    """Return the index of a CUDA device: of the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


def name(device: torch.device) -> str:
    """Return what the vendor calls a CUDA device."""
    return torch.cuda.get_device_name(device)


def version() -> str:
    """Return the version of CUDA that PyTorch was built with."""
    return str(torch.version.cuda)


# -- memory ------------------------------------------------------------------------------------------------------------


def total_memory(device: torch.device) -> int:
    """Return how many bytes of memory a CUDA device has."""
    return torch.cuda.get_device_properties(device).total_memory


def allocated_bytes(device: torch.device) -> int:
    """Return how many bytes of a CUDA device PyTorch's tensors have."""
    return torch.cuda.memory_allocated(device)


def peak_allocated_bytes(device: torch.device) -> int:
    """Return the most bytes of a CUDA device that PyTorch's tensors had at a time."""
    return torch.cuda.max_memory_allocated(device)


# -- streams -----------------------------------------------------------------------------------------------------------


def current_stream(device: torch.device | int | None) -> Stream:
    """Return the stream on which PyTorch queues what this thread computes."""
    return torch.cuda.current_stream(device)


def stream(of: Stream) -> AbstractContextManager[None]:
    """Return a block in which this thread queues on a stream."""
    return torch.cuda.stream(of)  # type: ignore[return-value]  # PyTorch's class has no base


def synchronize(device: torch.device) -> None:
    """Return when a device has done what is queued on it: the CPU, at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cudart() -> ModuleType:
    """Return the functions of CUDA's runtime."""
    runtime = torch.cuda.cudart()
    assert runtime is not None
    return runtime


# -- random numbers ----------------------------------------------------------------------------------------------------


def generator(device: torch.device) -> torch.Generator:
    """Return the generator that operations on a CUDA device draw from."""
    torch.cuda.init()
    return torch.cuda.default_generators[current_index(device)]


def random_states() -> list[torch.Tensor]:
    """Return the state of each CUDA device's generator; none where CUDA is not in use."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []


def set_random_states(states: list[torch.Tensor]) -> None:
    """Set the states of the generators of as many CUDA devices as there were and are."""
    for device, state in zip(devices(), states, strict=False):
        torch.cuda.set_rng_state(state, device)
