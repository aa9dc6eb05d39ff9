"""AdamW of other libraries on the CPU, of those that are installed, for update.py.

    pip install deepspeed==0.19.8 ninja bitsandbytes torchao

At its first use, DeepSpeed builds its kernel, which takes ninja and a C++ compiler; torchao compiles its step for each
shape and number of threads, by a C++ compiler as well.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MATRIX = 2048 * 2048
FP32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library.

    Attributes:
        package: which has to be installed.
        module: of the class.
        kind: the class.
        dtype: of parameters and gradients: none of these optimizers has masters.
        moments: in words.
        beside: the row of zinf_fx whose moments have as many bits, or None.
        options: what the class is given besides AdamW's.
        compiles: whether `step()` runs what torch.compile makes.
    """

    package: str
    module: str
    kind: str
    dtype: torch.dtype
    moments: str
    beside: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    compiles: bool = False

    @property
    def name(self) -> str:
        """Return what a table calls it."""
        library = "" if self.package in self.kind.lower() else f"{self.package} "
        return f"{library}{self.kind}, {'fp32' if self.dtype == FP32 else 'bf16'}, {self.moments} moments"

    @property
    def is_installed(self) -> bool:
        """Whether its package is."""
        return importlib.util.find_spec(self.package) is not None


_DEEPSPEED = ("deepspeed", "deepspeed.ops.adam", "DeepSpeedCPUAdam")
_SPLIT_8BIT = "bf16, split master, 8-bit moments"
# DeepSpeed's bf16 is what it does with `bf16_master_weights_and_grads`, and bf16 moments with `bf16_optimizer_states`.
PEERS: Sequence[Peer] = (
    Peer(*_DEEPSPEED, FP32, "fp32", "fp32"),
    Peer(*_DEEPSPEED, BF16, "fp32", "bf16, fp32 master"),
    Peer(*_DEEPSPEED, BF16, "bf16", "bf16, split master, bf16 moments", {"fp32_optimizer_states": False}),
    Peer("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", BF16, "8-bit", _SPLIT_8BIT),
    Peer("torchao", "torchao.optim", "AdamW8bit", BF16, "8-bit", _SPLIT_8BIT, compiles=True),
    Peer("torchao", "torchao.optim", "AdamW4bit", BF16, "4-bit", None, compiles=True),
)


def packages() -> tuple[list[str], list[str]]:
    """Return the peers' packages that are installed, with their versions, and the names of the others."""
    installed = {peer.package: peer.is_installed for peer in PEERS}
    versions = [f"{package} {importlib.metadata.version(package)}" for package, here in installed.items() if here]
    return versions, [package for package, here in installed.items() if not here]


def prepare(peer: Peer, count: int) -> tuple[str, Callable[[], object], float]:
    """Make so many parameters in matrices of 2048 x 2048, and a peer's optimizer of them, whose first step makes the
    states.

    Returns:
        The row's name, what steps once more, and the bytes of a parameter that an update of all that is kept reads and
        writes, however often the peer moves them.

    Raises: whatever the library does where it can't be built or doesn't run here.
    """
    parameters = []
    for matrix in torch.randn(count).to(peer.dtype).split(MATRIX):
        parameters.append(torch.nn.Parameter(matrix.clone()))
        parameters[-1].grad = torch.randn(len(matrix)).mul_(1e-3).to(peer.dtype)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):  # standard output is the table's
        kind = getattr(importlib.import_module(peer.module), peer.kind)
        optimizer: torch.optim.Optimizer = kind(parameters, **OPTIONS, **peer.options)
        name, step = _stepping(peer, optimizer)
    return name, step, _moved(optimizer) / count


def _stepping(peer: Peer, optimizer: torch.optim.Optimizer) -> tuple[str, Callable[[], object]]:
    try:
        optimizer.step()
        return peer.name, optimizer.step
    except Exception:
        if not peer.compiles:
            raise

    def eager() -> None:
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()

    eager()
    return f"{peer.name}, eager", eager


def _moved(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an update of what an optimizer keeps reads and writes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    changed = [*parameters]
    for parameter in parameters:
        for name, value in optimizer.state[parameter].items():
            changed += (tensor for tensor in _tensors(name, value) if tensor.ndim)  # numbers count steps
    return 2 * sum(tensor.nbytes for tensor in changed) + sum(parameter.grad.nbytes for parameter in parameters)


def _tensors(name: str, value: object) -> Iterator[torch.Tensor]:
    """Return the tensors that a state consists of, without tables of what codes stand for (`qmap`)."""
    if hasattr(value, "__tensor_flatten__"):  # a subclass that holds several, as torchao's
        for part in value.__tensor_flatten__()[0]:
            yield from _tensors(part, getattr(value, part))
    elif isinstance(value, torch.Tensor) and not name.startswith("qmap"):
        yield value


def said(error: BaseException) -> str:
    """Return the first line of what an error says, and of its cause."""
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"{line} ({said(error.__cause__)})" if error.__cause__ else line
