"""DeepSpeed's ZeRO-3 optimizer step with parameters and states on NVMe, for optimizer.py, in a process of its own.

A JSON request as argument, a JSON line as answer. The first run builds DeepSpeed's operators, which takes ninja,
libaio's headers and minutes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1"}
os.environ.setdefault("MASTER_PORT", "29517")

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from optimizer import OPTIONS, parameters_like_a_model


class Holder(torch.nn.Module):
    """One parameter, and a use of it that gives it a gradient."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.float().square().mean()


def measure(request: dict) -> list[float]:
    """Seconds of each step after the first."""
    dtype = getattr(torch, request["dtype"])
    nvme = {"device": "nvme", "nvme_path": request["store"], "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": OPTIONS},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 30_000_000,
            "offload_param": {**nvme, "buffer_count": 6, "buffer_size": 30_000_000},
            "offload_optimizer": {**nvme, "buffer_count": 14, "pipeline_read": True, "pipeline_write": True},
        },
        "zero_allow_untested_optimizer": True,
    }
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
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
