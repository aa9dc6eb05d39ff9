"""A small training that uses everything that has to be saved, and stops anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zinf_fx

MICRO_BATCHES = 2


class Net(nn.Module):
    """Some layers with dropout, tied weights, a buffer that counts, and a frozen parameter."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 131)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x + self.frozen)))
        x = self.dropout(self.tied(x))
        return self.last(x).float().square().mean() * self.scale.float()


@dataclass
class Job:
    """A training, by all ranks that there are, over the same data. `seed`: of the initial values; what is loaded makes
    it not matter."""

    store: Path | None
    seed: int
    placement: Any = "nvme"
    dtype: torch.dtype = torch.bfloat16
    optimizer: type[torch.optim.Optimizer] = zinf_fx.optim.AdamW
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    scales: bool = True
    compiled: bool = False
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.store is not None:
            self.store.mkdir(exist_ok=True)
        torch.manual_seed(self.seed)
        self.model = Net().to(self.dtype)
        if self.tensor_parallel:
            divide(self.model)
        zinf_fx.offload(self.model, store=self.store, placement=self.placement, **self.fields)
        self.adam = self.optimizer(self.model.parameters(), lr=0.01, **self.options)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.adam, [1, 2, 4], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2, enabled=self.scales)
        self.call = torch.compile(self.model, backend="zinf") if self.compiled else self.model
        self.done = 0

    @property
    def extra(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "scaler": self.scaler}

    def save(self, directory: Path, **more: Any) -> None:
        zinf_fx.save_checkpoint(directory, self.model, self.adam, **self.extra, done=self.done, **more)

    def load(self, directory: Path, **more: Any) -> dict[str, Any]:
        """Load all that `save` saved. Returns the plain values among `more`."""
        values = zinf_fx.load_checkpoint(directory, self.model, self.adam, **self.extra, **more)
        self.done = values.pop("done")
        return values

    def loss(self, number: int) -> Tensor:
        """Return the loss of a micro-batch."""
        data = torch.Generator().manual_seed(number)
        return self.call(torch.randn(8, 48, generator=data).to(self.dtype))

    def train(self, until: int) -> list[float]:
        """Train on micro-batches up to number `until`; every second one is followed by a step. Return the losses."""
        losses = []
        micro_batches = 1 if self.options.get("step_in_backward") else MICRO_BATCHES
        while self.done < until:
            loss = self.loss(self.done)
            self.scaler.scale(loss).backward()
            self.done += 1
            losses.append(loss.item())
            if self.done % micro_batches == 0:
                self.scaler.step(self.adam)
                self.scaler.update()
                self.schedule.step()
                self.adam.zero_grad()
        return losses

    def values(self) -> dict[str, Tensor]:
        """Return every tensor of the model, its gradients, and of the optimizer."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"grad.{name}": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for index, entry in self.adam.state_dict()["state"].items():
            tensors |= {f"state.{index}.{name}": value for name, value in entry.items() if isinstance(value, Tensor)}
        return {name: value_of(tensor) for name, tensor in tensors.items()}


def divide(model: Net) -> None:
    """Apply tensor parallelism over all ranks, by columns and by rows."""
    columns, rows = ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"first": columns, "tied": columns, "last": rows})
    model.tied.weight = model.first.weight  # each got one of its own


def value_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        with zinf_fx.gathered(tensor) as whole:
            return (whole.full_tensor() if isinstance(whole, DTensor) else whole).detach().clone()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [
        n for n, value in actual.items() if value.dtype != expected[n].dtype or not torch.equal(value, expected[n])
    ]
    assert not different
