"""One way of saving of checkpoint.py, in a process of its own: a JSON request as argument, a JSON line as answer.

Before and after each save while nothing else runs, it says that it is idle, and waits for a line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, default_dtype
from resident import peak_resident_bytes
from train_step_variant import OPTIONS

import zinf_fx
from zinf_fx.checkpoint.catalog import STEP, name_of
from zinf_fx.checkpoint.files import wait_for_room
from zinf_fx.checkpoint.manifest import MANIFEST, manifest_of

IDLE = "idle\n"

MANAGED, COPYING = ("generations", "behind"), ("behind", "copies")


class Block(NamedTuple):
    """Of steps that follow each other: how many, and of one of them the seconds, and the bytes that the store moved."""

    steps: int
    step: float
    read: float
    written: float


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def idle() -> None:
    """Wait until what was replaced is given back to the disk, as it is long before the next save of a training, and let
    the disk be measured."""
    wait_for_room()
    sys.stdout.write(IDLE)
    sys.stdout.flush()
    sys.stdin.readline()


def measure(request: dict) -> dict:
    torch.manual_seed(0)
    config, way, target = GPTConfig(**request["model"]), request["way"], Path(request["target"])
    with default_dtype(torch.bfloat16), zinf_fx.offloading(store=request["store"], placement="nvme"):
        model = GPT(config)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), **OPTIONS)
    run = torch.compile(model, backend="zinf")
    data = random.Random(0)
    store = next(model.parameters()).stored.tiers.store

    def step() -> None:
        tokens = torch.tensor([[data.randrange(256) for _ in range(config.context)] for _ in range(request["batch"])])
        run(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    # Of one checkpoint after the other, the last is kept; saves wait for the steps that go on in the background.
    numbers = count(request["steps"])  # of the steps that are copied in the background: each copy is a new checkpoint
    last = request["steps"] + request["blocks"]
    manager = zinf_fx.CheckpointManager(target, model, optimizer, every_steps=1, keep=1)
    if way in COPYING:
        for volume in store.volumes:
            volume.device = -1  # no directory is on that, so all is copied

    def save_in_this_way() -> None:
        if way == "torch.save":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target / "checkpoint.pt")
            with (target / "checkpoint.pt").open("rb") as file:
                os.fsync(file.fileno())
        elif way == "copies":
            zinf_fx.save_checkpoint(target / "checkpoint", model, optimizer)
        elif way in MANAGED:
            manager.save(last)

    def plain_steps() -> int:
        for _ in range(request["steps"]):
            step()
        optimizer.finish()
        return request["steps"]

    def steps_with_saves() -> int:
        """Returns how many there were: those that were asked for, or as many as one copy goes on behind."""
        done = 0
        with manager:
            path = manager.after_step(next(numbers)) if way == "behind" else None
            while (done == 0 or not (path / MANIFEST).exists()) if path is not None else done < request["steps"]:
                step()
                done += 1
                if way == "generations":
                    manager.after_step(done)
                elif way != "behind":
                    save_in_this_way()
        optimizer.finish()
        return done

    def block(steps: Callable[[], int]) -> Block:
        before, started = store.counters(), time.perf_counter()
        done = steps()
        seconds, after = time.perf_counter() - started, store.counters()
        moved = [(after.bytes_read - before.bytes_read) / done, (after.bytes_written - before.bytes_written) / done]
        return Block(done, seconds / done, *moved)

    step()  # compiles
    plain_steps()
    peak_of_steps = peak_resident_bytes()
    if way not in ("nothing", "behind"):
        save_in_this_way()  # the first one has no room of an earlier one
    plain, saving = [block(plain_steps)], []
    for _ in range(request["blocks"]):
        saving.append(block(plain_steps if way == "nothing" else steps_with_saves))
        plain.append(block(plain_steps))
    saves = []
    if way != "nothing":
        idle()
        for _ in range(request["saves"]):
            saves.append(timed(save_in_this_way))
            idle()
    peak, loads, nbytes = peak_resident_bytes(), [], 0
    if way in (*MANAGED, "copies"):
        saved = target / ("checkpoint" if way == "copies" else name_of(last))
        given = {} if way == "copies" else {STEP: 0}
        loads.append(timed(lambda: zinf_fx.load_checkpoint(saved, model, optimizer, **given)))
        nbytes = manifest_of(saved).nbytes
    elif way == "torch.save":
        nbytes = (target / "checkpoint.pt").stat().st_size
    return {
        "plain": [measured._asdict() for measured in plain],
        "saving": [measured._asdict() for measured in saving],
        "saves": saves,
        "loads": loads,
        "nbytes": nbytes,
        "peak": peak,
        "grown": peak - peak_of_steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
