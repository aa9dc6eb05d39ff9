"""DeepSpeed's ZeRO-3 with parameters and optimizer states on NVMe, on one CPU: whether it is here, how it is told, and
a process that it runs in.

The first run builds DeepSpeed's operators, which takes ninja, libaio's headers and minutes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""In the environment of a process that is the only one."""

NUMEL = 30_000_000
"""Elements that the optimizer updates at a time, and that a buffer for parameters has room for."""


def installed() -> bool:
    """Whether there is a DeepSpeed to run."""
    return importlib.util.find_spec("deepspeed") is not None


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that is the only rank, and computes with so many threads."""
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # PyTorch's, one for each collective
    return os.environ | RANK | quiet | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)}


def configuration(
    store: str, bf16: bool, options: dict[str, Any], accumulate: int = 1, live: int = 1_000_000_000
) -> dict[str, Any]:
    """Return what DeepSpeed is given.

    Args:
        store: directory of the parameters and states.
        bf16: the parameters are, with fp32 masters.
        options: AdamW's.
        accumulate: micro-batches of a step.
        live: elements of parameters that may stay on the device until they are used again, and as many in host memory
            though they are on NVMe; by default DeepSpeed's own limits.
    """
    nvme = {"device": "nvme", "nvme_path": store, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": options},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": NUMEL,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "offload_param": {**nvme, "buffer_count": 6, "buffer_size": NUMEL, "max_in_cpu": live},
            "offload_optimizer": {**nvme, "buffer_count": 14, "pipeline_read": True, "pipeline_write": True},
        },
        "zero_allow_untested_optimizer": True,
    }


class Worker:
    """A program that runs DeepSpeed in a process of its own, and waits between what it is asked for.

    Its argument is the descriptor of a connection, from which it receives a request to begin with: `asked()`.
    """

    def __init__(self, program: Path, request: dict[str, Any], threads: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (is open as long as the process runs)
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno())],
            env=environment(threads),
            pass_fds=[theirs.fileno()],
            stdout=self._said,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self._connection.send(request)

    def ask(self, question: object) -> Any:
        """Ask, and return the answer."""
        with contextlib.suppress(BrokenPipeError):  # as is seen in a moment
            self._connection.send(question)
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer. Raises: RuntimeError where the process ended, with what it said."""
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip()
            raise RuntimeError(f"DeepSpeed ended with status {status}:\n{said[-2000:]}") from None

    def close(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.terminate()
        self._process.wait()
        self._said.close()


def asked() -> tuple[Connection, dict[str, Any]]:
    """Return a worker's connection, and what it received to begin with."""
    connection = Connection(int(sys.argv[1]))
    return connection, connection.recv()
