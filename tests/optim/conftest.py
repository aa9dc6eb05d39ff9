"""The fixtures store a small set of parameters of awkward sizes, beside the same ones in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import zinf_fx
from zinf_fx.runtime.tensor.storage import new_storages

# A scalar, nothing at all, less than a chunk, chunks and a bit; few sizes are multiples of anything.
SHAPES = ((129, 257), (), (0,), (5,), (20011,), (3, 7), (4096,))


class Twins:
    """Holds stored parameters, and the masters of an explicit mixed-precision loop over the same values and
    gradients."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, **fields: object) -> None:
        self.random = torch.Generator().manual_seed(7)
        values = [torch.randn(shape, generator=self.random).to(dtype) for shape in shapes]
        self.module = torch.nn.ParameterList(torch.nn.Parameter(v.clone()) for v in values)
        zinf_fx.offload(self.module, **fields)
        self.stored = list(self.module)
        self.plain = values
        precise = dtype if dtype.itemsize >= 4 else torch.float32
        self.masters = [v.to(precise) if v.dtype != precise else v for v in values]

    def give_gradients(self, skip: tuple[int, ...] = ()) -> None:
        """Give new gradients, the same on both sides, in the parameters' dtype; None for the indices in `skip`."""
        for index, (stored, master) in enumerate(zip(self.stored, self.masters, strict=True)):
            gradient = torch.randn(stored.shape, generator=self.random).to(stored.dtype)
            stored.grad = None if index in skip else gradient
            master.grad = None if index in skip else gradient.to(master.dtype, copy=True)

    def give_stored_gradients(self) -> None:
        """Give the same, where backward would leave them."""
        self.give_gradients()
        for parameter in self.stored:
            value, parameter.grad = parameter.grad, None
            parameter.grad = zinf_fx.StoredTensor.of(
                new_storages([parameter.stored], "host")[0], parameter.shape, "cpu"
            )
            parameter.grad.copy_(value)

    def moved_by_a_step(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """Return bytes that the store reads and writes in the second step; the first makes the states."""
        store = self.stored[0].stored.tiers.store
        for _ in range(2):
            before = store.counters()
            self.give_gradients()
            optimizer.step()
        after = store.counters()
        return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written

    def train(self, optimizer: torch.optim.Optimizer, reference: torch.optim.Optimizer, steps: int = 3) -> None:
        """Steps on both sides, each followed by the check that every parameter is bitwise equal."""
        for _ in range(steps):
            self.give_gradients()
            optimizer.step()
            reference.step()
            self.check()

    def train_rounding(
        self,
        optimizer: torch.optim.Optimizer,
        reference: torch.optim.Optimizer,
        rounded: Callable[[str, torch.Tensor], torch.Tensor],
        steps: int,
    ) -> None:
        """Do the same; after each step the reference's states, by name, become what is left of them when stored."""
        for _ in range(steps):
            self.give_gradients()
            optimizer.step()
            reference.step()
            for master in self.masters:
                for state, value in reference.state[master].items():
                    if state not in ("step", "mu_product"):
                        value.copy_(rounded(state, value))
            self.check()

    def check(self) -> None:
        """Stored parameters equal the plain ones, which are the masters rounded."""
        for index, (stored, plain, master) in enumerate(zip(self.stored, self.plain, self.masters, strict=True)):
            plain.copy_(master)
            assert torch.equal(stored.full_tensor(), plain), f"parameter {index} of shape {tuple(plain.shape)} differs"


@pytest.fixture
def twins(tmp_path: Path) -> Callable[..., Twins]:
    """Makes twins; every call gets a store of its own."""
    made = 0

    def make(
        placement: object = "nvme",
        dtype: torch.dtype = torch.float32,
        shapes: tuple[tuple[int, ...], ...] = SHAPES,
        **fields: object,
    ) -> Twins:
        nonlocal made
        made += 1
        store = tmp_path / str(made)
        store.mkdir()
        return Twins(shapes, dtype, store=store, placement=placement, **{"chunk": "64KiB", **fields})

    return make


@pytest.fixture
def steps_in() -> Callable[..., Iterator[torch.dtype]]:
    """Steps of a stored model that is converted, beside masters that are rounded where its values were."""
    return _steps_in


def _steps_in(
    dtypes: tuple[torch.dtype, ...],
    model: torch.nn.Module,
    masters: list[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    reference: torch.optim.Optimizer,
) -> Iterator[torch.dtype]:
    """Yields each step's dtype after it, when all parameters were found equal to the masters in that dtype.

    `masters` are fp32. A conversion between fp32 and bf16, either way, leaves bf16's values.
    """
    before = torch.float32
    for step, dtype in enumerate(dtypes):
        optimizer.zero_grad()
        model.to(dtype)
        if dtype != before:
            for master in masters:
                master.copy_(master.to(torch.bfloat16))
        before = dtype
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = torch.randn(parameter.shape).to(dtype).float()
            parameter.grad = master.grad.to(dtype)
        optimizer.step()
        reference.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(parameter.full_tensor(), master.to(dtype)), step
        yield dtype
