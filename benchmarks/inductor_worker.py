"""Compiles a GPT for inductor.py, in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch._dynamo.utils import compilation_time_metrics, counters

import zinf_fx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, example_batch

_PHASE = "compile_fx_inner"  # PyTorch's own clock of what Inductor does


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.compile(lambda x: torch.tanh(x).exp())(torch.ones(64))  # the compiler is looked for, and headers are compiled
    compilation_time_metrics.clear()
    counters.clear()
    torch.manual_seed(0)
    config = GPTConfig(layers=request["layers"], hidden=64, heads=4, context=32)
    model, batch = GPT(config), example_batch(config, 2)
    if request["name"] == "torch.compile":
        call = torch.compile(model)
    else:
        zinf_fx.offload(model, placement=request["name"], store=request["store"])
        call = torch.compile(model, backend="zinf", options={"compute": "inductor"})
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        call(*batch).backward()
        seconds.append(time.perf_counter() - started)
    phases = compilation_time_metrics.get(_PHASE, [])  # none where PyTorch finds a whole graph in its files
    compiling = sum(phases)
    counts = counters["inductor"]
    answer = {
        "compiling": compiling,
        "rest": seconds[0] - seconds[1] - compiling,
        "compiled": counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"],
        "calls": len(phases),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
