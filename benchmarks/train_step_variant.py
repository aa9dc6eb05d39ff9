"""One variant of train_step.py, in a process of its own: a JSON request as argument, a JSON line as answer."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, default_dtype, example_batch
from master_adamw import adamw
from resident import peak_resident_bytes

OPTIONS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True)
class Variant:
    model: GPT
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizer
    traffic: Callable[[], tuple[int, int]]
    """Bytes read from and written to the store so far."""


def plain(config: GPTConfig, dtype: torch.dtype, device: torch.device, compiled: bool) -> Variant:
    with default_dtype(dtype), device:
        model = GPT(config)
    optimizer = adamw(model.parameters(), dtype, **OPTIONS)
    return Variant(model, torch.compile(model) if compiled else model, optimizer, traffic=lambda: (0, 0))


def zinf(
    config: GPTConfig, dtype: torch.dtype, device: torch.device, offloading: dict[str, str], options: dict[str, bool]
) -> Variant:
    import zinf_fx

    with default_dtype(dtype), device, zinf_fx.offloading(**offloading):
        model = GPT(config)
    optimizer = zinf_fx.optim.AdamW(model.parameters(), **options, **OPTIONS)

    def traffic() -> tuple[int, int]:
        stats = zinf_fx.stats(model)
        return stats.bytes_read, stats.bytes_written

    return Variant(model, torch.compile(model, backend="zinf"), optimizer, traffic)


def timed_step(variant: Variant, batch: Sequence[Tensor], clip: float | None) -> dict[str, float]:
    begin = time.perf_counter()
    loss = variant.loss(*batch)
    value = loss.item()
    after_forward = time.perf_counter()
    loss.backward()
    finish(loss.device)
    after_backward = time.perf_counter()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(variant.model.parameters(), clip)
    variant.optimizer.step()
    variant.optimizer.zero_grad()
    finish(loss.device)
    end = time.perf_counter()
    return {
        "loss": value,
        "step": end - begin,
        "forward": after_forward - begin,
        "backward": after_backward - after_forward,
        "optimizer": end - after_backward,
    }


def finish(device: torch.device) -> None:
    """Until what was queued on a CUDA device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(request: dict) -> dict:
    torch.manual_seed(request["seed"])
    dtype, device = getattr(torch, request["dtype"]), torch.device(request["device"])
    config = GPTConfig(**request["model"])
    name = request["variant"]
    if name.startswith("zinf"):
        variant = zinf(config, dtype, device, request["offloading"], request["optimizer"])
    else:
        variant = plain(config, dtype, device, compiled=name == "compile")
    torch.manual_seed(request["seed"])  # the batch must not depend on how construction used the generator
    batch = [tensor.to(device) for tensor in example_batch(config, request["batch"])]

    warmup = [timed_step(variant, batch, request["clip"]) for _ in range(request["warmup"])]
    before = variant.traffic()
    measured = [timed_step(variant, batch, request["clip"]) for _ in range(request["steps"])]
    read, written = (now - then for now, then in zip(variant.traffic(), before, strict=True))
    moved = request["steps"] * (parameters := sum(p.numel() for p in variant.model.parameters()))
    return {
        "variant": name,
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "gpu": f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else "",
        "losses": [step["loss"] for step in warmup + measured],
        "first_step": (warmup + measured)[0]["step"],
        **{part: [step[part] for step in measured] for part in ("step", "forward", "backward", "optimizer")},
        "peak_resident_bytes": peak_resident_bytes(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "rusage_maxrss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "read_per_parameter": read / moved,
        "written_per_parameter": written / moved,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
