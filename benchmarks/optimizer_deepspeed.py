"""DeepSpeed's ZeRO-3 optimizer step with parameters and states on NVMe, for optimizer.py, in a process of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from deepspeed_nvme import asked, configuration
from optimizer import OPTIONS, parameters_like_a_model


class Holder(torch.nn.Module):
    """One parameter, and a use of it that gives it a gradient."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().square().mean()


def measure(request: dict) -> list[float]:
    """Return the seconds of each step after the first."""
    dtype = getattr(torch, request["dtype"])
    config = configuration(request["store"], dtype == torch.bfloat16, OPTIONS)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Sequential(*map(Holder, parameters_like_a_model(request["count"], dtype)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    seconds = []
    for _ in range(request["rounds"] + 1):
        engine.backward(engine(torch.zeros(())))
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


if __name__ == "__main__":
    connection, asked_for = asked()
    connection.send(measure(asked_for))
