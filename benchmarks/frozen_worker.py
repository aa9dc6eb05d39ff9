"""One base of frozen.py, in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, default_dtype, example_batch
from resident import peak_resident_bytes

import zinf_fx
from zinf_fx.plan.memory.accounting import phases


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it, in fp32 as fine-tuning libraries make it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """Return the model, all of it frozen, with adapters beside the linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(part, name, Adapted(layer, rank))
    return model


def measure(request: dict) -> dict:
    torch.manual_seed(0)
    config, base = GPTConfig(**request["model"]), request["base"]
    options: dict[str, str] = {}
    if base == "memory":
        with default_dtype(torch.bfloat16):
            model = GPT(config)
    else:
        frozen = {} if base == "bf16" else {"frozen_dtype": base}
        with default_dtype(torch.bfloat16), zinf_fx.offloading(store=request["store"], placement="nvme", **frozen):
            model = GPT(config)
        options = {"activations": request["activations"]}
    model = adapt(model, request["rank"])
    run = model if base == "memory" else torch.compile(model, backend="zinf", options=options)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    batch = example_batch(config, request["batch"])

    def step() -> None:
        run(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    planned = 0
    if base == "memory":
        step()
    else:
        with zinf_fx.record(model) as recording:
            step()
        planned = sum(traffic.nvme_to_host for plan in recording.plans for _, traffic in phases(plan))
    seconds, before = [], zinf_fx.stats(model).bytes_read
    for _ in range(request["steps"]):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "step": median(seconds),
        "planned": planned,
        "read": (zinf_fx.stats(model).bytes_read - before) / request["steps"],
        "peak": peak_resident_bytes(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in trained),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
