"""Runs a function on one rank, which is this process, or on several: a process each, with gloo between them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from forked import forkserver

_HERE = "127.0.0.1"


def on_ranks(size: int, body: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Run `body(rank, *arguments)` on each rank, in a store of its own, and return the results. A single rank is this
    process, without a process group. `options` and errors of several ranks are those of `on_processes`."""
    return [_run_here(body, arguments)] if size == 1 else on_processes(size, body, *arguments, **options)


def on_processes(
    size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 240, killed: Collection[int] = ()
) -> list[Any]:
    """Run `body(rank, *arguments)` on each rank, a process with a store of its own in a process group, and return the
    results; None of those ranks that are to be killed.

    Raises: AssertionError with the traceback of failures, or for scratch that a rank left behind in its store.
    """
    context = forkserver()
    # As torchrun's, it outlives the ranks; a file in its place is looked at every 10 ms.
    store = dist.TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, folder, store.port, rank, size, body, arguments))
            process.daemon = True
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results = []
        for rank, pipe in enumerate(pipes):
            try:
                ready = pipe.poll(timeout)
                late = "failed", f"rank {rank} did not end within {timeout} s"
                results.append(pickle.loads(pipe.recv_bytes()) if ready else late)
            except EOFError:
                how = ("done", None) if rank in killed else ("failed", f"rank {rank} ended without a result")
                results.append(how)
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
        left = [str(path) for r in set(range(size)) - set(killed) for path in Path(folder, f"store{r}").iterdir()]
    failures = "\n".join(f"rank {rank}:\n{value}" for rank, (kind, value) in enumerate(results) if kind == "failed")
    assert not failures, failures
    assert not left, f"scratch was left behind: {left}"
    return [value for _, value in results]


def _run_here(body: Callable[..., Any], arguments: tuple) -> Any:
    torch.compiler.reset()  # as in a new process
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # scratch goes with the last tensor in it
        mock.patch.dict(os.environ, ZINF_STORE=folder),
    ):
        return body(0, *arguments)


def _run(
    pipe: Connection, folder: str, port: int, rank: int, size: int, body: Callable[..., Any], arguments: tuple
) -> None:
    os.environ["ZINF_STORE"] = str(Path(folder) / f"store{rank}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Path(os.environ["ZINF_STORE"]).mkdir()
    gc.freeze()  # what was imported once is no garbage
    try:
        torch.set_num_threads(1)
        store = dist.TCPStore(_HERE, port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        # Not `send`, which shares the memory of tensors: that is gone with this process.
        pipe.send_bytes(pickle.dumps(("done", body(rank, *arguments))))
        with contextlib.suppress(RuntimeError):  # another rank may have ended
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
    finally:
        atexit._run_exitfuncs()  # a process that was forked leaves them out
