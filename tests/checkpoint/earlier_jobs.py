"""The trainings whose checkpoints lie in `earlier/`, as the version that saved them wrote them.

`python tests/checkpoint/earlier_jobs.py NAME` adds another: it trains the job of that name, saves it, and packs the
checkpoint, together with the digests of all values, into `earlier/NAME.tar.xz`. A file that is there is never made
anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zinf_fx

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does

from jobs import Job, value_of
from ranks.launching import on_ranks

EARLIER = Path(__file__).parent / "earlier"
DIGESTS = "digests.json"


class Adapted(nn.Module):
    """Adds adapters to two frozen layers in nf4."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(64, 64).requires_grad_(False) for _ in range(2))
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.base:
            x = torch.tanh(layer(x) + self.up(self.down(x)))
        return x.square().mean()


class AdapterJob(Job):
    """Trains the adapters alone."""

    def __post_init__(self) -> None:
        self.store.mkdir(exist_ok=True)
        torch.manual_seed(self.seed)
        self.model = Adapted()
        zinf_fx.offload(self.model, store=self.store, placement="nvme", frozen_dtype="nf4")
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.adam = zinf_fx.optim.AdamW(trained, lr=0.01)
        self.done = 0

    extra: dict[str, Any] = {}  # noqa: RUF012

    def train(self, until: int) -> list[float]:
        losses = []
        while self.done < until:
            data = torch.Generator().manual_seed(self.done)
            loss = self.model(torch.randn(8, 64, generator=data))
            loss.backward()
            self.adam.step()
            self.adam.zero_grad()
            losses.append(loss.item())
            self.done += 1
        return losses


class ManagedJob(Job):
    """A training whose checkpoint a manager saves and loads."""

    def save(self, directory: Path) -> None:
        with self._manager(directory) as checkpoints:
            checkpoints.save(self.done)

    def load(self, directory: Path) -> None:
        with self._manager(directory) as checkpoints:
            self.done = checkpoints.resume()

    def _manager(self, directory: Path) -> zinf_fx.CheckpointManager:
        return zinf_fx.CheckpointManager(directory, self.model, self.adam, every_steps=1, keep=1, **self.extra)


JOBS: dict[str, tuple[int, type[Job], dict[str, Any]]] = {
    # ranks that saved it, and how the job is made; 5 micro-batches of 2 leave an accumulated gradient
    "masters-in-the-store": (1, Job, {}),
    "copied-from-the-host": (1, Job, {"placement": "host"}),
    "eight-bit-and-split": (1, Job, {"options": {"state_dtype": "8bit", "master_dtype": "split"}}),
    "bf16-moments": (1, Job, {"options": {"state_dtype": torch.bfloat16}}),
    "momentum": (1, Job, {"dtype": torch.float32, "optimizer": zinf_fx.optim.SGD, "options": {"momentum": 0.9}}),
    "packs": (1, Job, {"placement": "infinity-nvme", "compiled": True, "fields": {"pack": "64KiB"}}),
    "adapters-over-nf4": (1, AdapterJob, {}),
    "managed": (1, ManagedJob, {}),
    "two-ranks": (2, Job, {"placement": "infinity-nvme"}),
}


def digests_of(job: Job) -> dict[str, str]:
    """Return a checksum of the bytes of each value."""
    return {name: _digest(value) for name, value in job.values().items()}


def _digest(tensor: Tensor) -> str:
    octets = value_of(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(octets.numpy().tobytes()).hexdigest()[:16]}"


def saved(rank: int, name: str, directory: Path, store: Path) -> dict[str, str]:
    """Return the digests of a job's values, after it is trained and saved."""
    _, kind, how = JOBS[name]
    job = kind(store / str(rank), 3, **how)
    job.train(5)
    job.save(directory)
    return digests_of(job)


def main(name: str) -> None:
    archive = EARLIER / f"{name}.tar.xz"
    ranks, _, _ = JOBS[name]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "x:xz") as packed:
        directory, store = Path(folder, "checkpoint"), Path(folder, "store")
        store.mkdir()
        digests = on_ranks(ranks, saved, name, directory, store)[0] if ranks > 1 else saved(0, name, directory, store)
        for lock in directory.rglob("lock"):
            lock.unlink()
        (directory / DIGESTS).write_text(json.dumps(digests, indent=0))
        packed.add(directory, ".")


if __name__ == "__main__":
    main(sys.argv[1])
