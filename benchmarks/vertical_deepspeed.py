"""DeepSpeed's ZeRO-3 with everything on NVMe, for vertical.py, in a process of its own: for each number of steps that
it receives, it answers with the seconds of a step and the bytes per parameter that one moves."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from deepspeed_nvme import asked, configuration
from gpt import GPT, GPTConfig, default_dtype, example_batch

TRANSFERS = Path("/proc/self/io")


class Training:
    """A GPT in bfloat16, trained with batches of `count` micro-batches by a loop over them."""

    def __init__(self, request: dict) -> None:
        config, count = GPTConfig(**request["model"]), request["count"]
        told = configuration(request["store"], True, request["options"], count, request["live"])
        torch.manual_seed(0)
        with default_dtype(torch.bfloat16), deepspeed.zero.Init(config_dict_or_path=told):
            model = GPT(config)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=told)
        self._parameters = sum(parameter.ds_numel for parameter in model.parameters())
        batch = example_batch(config, count * request["micro_batch"])
        self._parts = list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))

    def turn(self, steps: int) -> tuple[float, float | None]:
        """Return the seconds of a step, and bytes per parameter that it moves: the means of some after one that isn't
        counted."""
        self._step()
        before, start = moved(), time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds, after = (time.perf_counter() - start) / steps, moved()
        if before is None or after is None:
            return seconds, None
        return seconds, (after - before) / steps / self._parameters

    def _step(self) -> None:
        for part in self._parts:
            self._engine.backward(self._engine(*part))  # divides by the number of micro-batches
            self._engine.step()  # of the optimizer, after the last


def moved() -> int | None:
    """Return the bytes that this process had read from disks and written to them so far; None where the kernel doesn't
    say."""
    if not TRANSFERS.exists():
        return None
    counts = dict(line.split(": ") for line in TRANSFERS.read_text().splitlines())
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def main() -> None:
    connection, request = asked()
    deepspeed.init_distributed(dist_backend="gloo")
    training = Training(request)
    connection.send("ready")
    while steps := connection.recv():
        connection.send(training.turn(steps))


if __name__ == "__main__":
    main()
