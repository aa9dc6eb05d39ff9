"""One way of saving of checkpoint.py, in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, default_dtype
from resident import peak_resident_bytes
from train_step_variant import OPTIONS

import zinf_fx


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(request: dict) -> dict:
    torch.manual_seed(0)
    config, target = GPTConfig(**request["model"]), Path(request["target"])
    with default_dtype(torch.bfloat16), zinf_fx.offloading(store=request["store"], placement="nvme"):
        model = GPT(config)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), **OPTIONS)
    run = torch.compile(model, backend="zinf")
    data = random.Random(0)

    def step() -> None:
        tokens = torch.tensor([[data.randrange(256) for _ in range(config.context)] for _ in range(request["batch"])])
        run(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def save() -> None:
        if request["way"] == "torch.save":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, target / "checkpoint.pt")
            with (target / "checkpoint.pt").open("rb") as file:
                os.fsync(file.fileno())
        else:
            zinf_fx.save_checkpoint(target / "checkpoint", model, optimizer)

    step()  # compiles
    steps, saves, loads = [], [], []
    for _ in range(request["steps"]):
        steps.append(timed(step))
        if request["way"] != "nothing":
            optimizer.finish()  # what is left of the step is the step's, and not the save's
            saves.append(timed(save))
    trained = peak_resident_bytes()
    if request["way"] == "save_checkpoint":
        loads.append(timed(lambda: zinf_fx.load_checkpoint(target / "checkpoint", model, optimizer)))
    nbytes = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "steps": steps,
        "saves": saves,
        "loads": loads,
        "nbytes": nbytes,
        "peak": trained,
        "peak_with_load": peak_resident_bytes(),
        "parameters": parameters,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
