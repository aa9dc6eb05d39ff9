"""A training whose state tells how many steps were done, and of which a mixture can't be mistaken for another state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import zinf_fx
from zinf_fx.checkpoint.entries import state_entries
from zinf_fx.checkpoint.files import FILES, Files
from zinf_fx.checkpoint.save import save


class Counting:
    """A training in which all elements of each tensor are the same, and tell how many steps were done."""

    def __init__(self, store: Path, **fields: object) -> None:
        store.mkdir(exist_ok=True, parents=True)
        self.model = nn.Sequential(nn.Linear(40, 90), nn.Linear(90, 300)).to(torch.bfloat16)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        zinf_fx.offload(self.model, store=store, placement="nvme", **fields)
        self.optimizer = zinf_fx.optim.SGD(self.model.parameters(), lr=1.0, momentum=1.0)
        self.steps = 0

    def step(self) -> None:
        """The momentum is the number of steps, and the weights are the sum of all of these numbers."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.finish()
        self.steps += 1

    def save(self, directory: Path, files: Files = FILES) -> None:
        save(directory, state_entries(self.model, self.optimizer, {"steps": self.steps}), files)

    def load(self, directory: Path) -> int:
        self.steps = zinf_fx.load_checkpoint(directory, self.model, self.optimizer)["steps"]
        self.check()
        return self.steps

    def check(self) -> None:
        """Assert that it is the state after so many steps, in all elements."""
        total = self.steps * (self.steps + 1) / 2
        for parameter in self.model.parameters():
            assert (parameter.full_tensor() == total).all(), f"a mixture: {self.steps} steps"
            state = self.optimizer.state[parameter]
            assert (state["master"].full_tensor() == total).all(), f"a mixture: {self.steps} steps"
            assert (state["momentum_buffer"].full_tensor() == -self.steps).all(), f"a mixture: {self.steps} steps"
