"""Attempts at a job that share a store of torch.distributed, as those of torchrun do, resume what others saved."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import training
from ranks.launching import on_processes

import zinf_fx

STEPS = 24  # of a run by torchrun


def train(folder: str, end: int, killed_at: int | None = None, compiled: bool = True) -> tuple[int, list[torch.Tensor]]:
    """Return the step that this rank resumes after, and the parameters at the end. The last rank dies in a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = zinf_fx.offload(training.model(seed=rank), placement="infinity-nvme", collective_timeout=60.0)
    run = torch.compile(model, backend="zinf") if compiled else model
    optimizer = zinf_fx.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [step for (step,) in training.batches(end, rank, 1)]
    with zinf_fx.CheckpointManager(folder, model, optimizer, every_steps=2, keep=2) as checkpoints:
        first = checkpoints.resume()
        for step in range(first, end):
            run(*batches[step]).backward()
            if step == killed_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.after_step(step + 1)
    with zinf_fx.gathered(model) as values:
        return first, [value.clone() for value in values]


def attempt(rank: int, port: int, folder: str, end: int, killed_at: int | None) -> object:
    """With a store for what zinf_fx says that outlives the attempt. torch.distributed has one that doesn't: it finds
    its own keys of an earlier attempt there, and not always has the luck that others are in time."""
    shared = dist.TCPStore("127.0.0.1", port, is_master=False)
    with mock.patch("zinf_fx.runtime.rendezvous._get_default_store", lambda: shared):
        try:
            return train(folder, end, killed_at, compiled=False)
        except zinf_fx.errors.RanksError as error:
            return str(error)


def test_attempts_in_one_store_resume(tmp_path: Path):
    """With as many ranks, they resume bit for bit as without any end; and with more and fewer."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    told, _ = on_processes(2, attempt, port, str(tmp_path / "killed"), 4, 3, killed=[1])
    assert "rank 1 ended" in told, told
    resumed = on_processes(2, attempt, port, str(tmp_path / "killed"), 4, None)
    whole = on_processes(2, attempt, port, str(tmp_path / "whole"), 4, None)
    assert [first for first, _ in resumed] == [2, 2] and [first for first, _ in whole] == [0, 0]
    assert all(map(torch.equal, resumed[0][1], whole[0][1]))


@pytest.mark.slow
def test_attempts_with_other_numbers_of_ranks_resume(tmp_path: Path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = on_processes(2, attempt, store.port, str(tmp_path), 2, None)[0][1]
    for end, size in enumerate((1, 3, 2, 4), start=1):
        attempts = on_processes(size, attempt, store.port, str(tmp_path), 2 * end, None)
        assert [first for first, _ in attempts] == [2 * max(1, end - 1)] * size
        assert end > 1 or all(map(torch.equal, attempts[0][1], there))
        on_processes(size, attempt, store.port, str(tmp_path), 2 * end + 1, 2 * end, killed=[size - 1])


PROGRAM = """
import json, os, signal, sys, threading, time, torch, torch.distributed as dist
from ranks.test_restarts import STEPS, train

folder, kills = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, number = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if number < len(kills) and rank == kills[number][0]:
    threading.Timer(kills[number][1], os.kill, (os.getpid(), signal.SIGKILL)).start()
print("attempt", number, "rank", rank, "began", time.monotonic(), flush=True)
first, values = train(folder, STEPS)
print("attempt", number, "rank", rank, "resumed", first, "ended", time.monotonic(), flush=True)
if rank == 0:
    torch.save(values, folder + ".pt")
"""


def restarted(folder: Path, kills: list[tuple[int, float]]) -> str:
    """Return what torchrun prints, where at each attempt a rank is killed after so many seconds."""
    program = folder.with_suffix(".py")
    program.write_text(PROGRAM)
    store = folder.with_suffix(".store")
    store.mkdir()
    tests = str(Path(__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ZINF_STORE": str(store),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/checkpoints.md says why
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(program), str(folder), repr([list(kill) for kill in kills])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_torchrun_resumes_whenever_ranks_are_killed(tmp_path: Path):
    printed = restarted(tmp_path / "whole", [])
    begun, ended = (float(re.search(rf"{word} ([\d.]+)", printed)[1]) for word in ("began", "ended"))
    expected, chance = torch.load(tmp_path / "whole.pt"), random.Random(time.time_ns())
    resumed = []
    for number in range(10):
        kills = [(chance.randrange(2), chance.uniform(0.3, 1.0) * (ended - begun)) for _ in range(3)]
        printed = restarted(tmp_path / f"killed{number}", kills)
        values = torch.load(tmp_path / f"killed{number}.pt")
        assert all(map(torch.equal, values, expected)), kills
        resumed += map(int, re.findall(r"rank 0 resumed (\d+)", printed))
    assert any(resumed), "no attempt got as far as a checkpoint"
