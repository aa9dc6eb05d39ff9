"""Ctrl-C and time limits in saves, loads and exports: nothing of the process is left as it was in the middle."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gate import slow
from interrupting import interrupted_at, time_limit
from torch import nn

import zinf_fx

SIGNALS = [signal.SIGINT, signal.SIGALRM]


class Work:
    """A stored model with an optimizer that has stepped, and what is saved of both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = zinf_fx.offload(
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), store=folder, placement="nvme"
        )
        self.optimizer = zinf_fx.optim.AdamW(self.model.parameters())
        self.step()
        self.values = self.present()
        self.save()
        self.export()

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def present(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[p]["exp_avg"].clone() for p in self.model.parameters()]
        return [*(p.full_tensor() for p in self.model.parameters()), *states]

    def save(self) -> None:
        zinf_fx.save_checkpoint(self.folder / "checkpoint", self.model, self.optimizer)

    def load(self) -> None:
        zinf_fx.load_checkpoint(self.folder / "checkpoint", self.model, self.optimizer)

    def export(self) -> None:
        zinf_fx.export_safetensors(self.model, self.folder / "exported")

    def read(self) -> None:
        zinf_fx.load_safetensors(self.model, self.folder / "exported")


def descriptors() -> list[str]:
    """Return what this process has open."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(link) for link in links if os.path.lexists(link) and "/proc/" not in os.readlink(link))


def interrupt_lines(work: Work, call: Callable[[], object], sent: signal.Signals, first: int, stride: int) -> int:
    """Interrupt `call` at every `stride`-th line. Returns how many interrupts came out of it."""
    call()
    tiers = work.model[0].weight.stored.tiers
    tiers.drain()
    gc.collect()  # what other tests have open still
    at_rest, allocated, number, came_out, going = descriptors(), tiers.host.in_use, first, 0, True
    with time_limit():
        while going:
            came, lines = interrupted_at(number, call, sent)
            going = lines >= number
            came_out += came
            where = f"line {number}"
            assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), where
            tiers.drain()
            assert descriptors() == at_rest, where
            assert tiers.host.in_use == allocated, where
            assert came or not going, where
            number += stride
    for again in (work.load, work.read, work.export, work.save, work.load):
        again()
    assert all(map(torch.equal, work.present(), work.values))
    work.step()
    return came_out


EACH_LINE = [slow("export", 1), slow("read", 1), slow("save", 5), slow("load", 5)]


@pytest.mark.parametrize("sent", SIGNALS, ids=lambda sent: sent.name)
@pytest.mark.parametrize(("what", "stride"), [("export", 97), ("read", 53), ("save", 307), ("load", 307), *EACH_LINE])
def test_nothing_is_left(tmp_path: Path, what: str, stride: int, sent: signal.Signals):
    work = Work(tmp_path)
    assert interrupt_lines(work, getattr(work, what), sent, 1, stride) > 5
