"""Runs a function on several ranks: a process each, with gloo between them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import tempfile
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import forkserver


def on_ranks(
    size: int, body: Callable[..., Any], *arguments: Any, timeout: float = 240, killed: Collection[int] = ()
) -> list[Any]:
    """The results of `body(rank, *arguments)` on each rank; None of those that are to be killed.

    Raises: AssertionError with the traceback of failures, or for scratch that a rank left behind in its store.
    """
    context = forkserver()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_run, args=(theirs, folder, rank, size, body, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results = []
        for rank, pipe in enumerate(pipes):
            try:
                ready = pipe.poll(timeout)
                results.append(pipe.recv() if ready else ("failed", f"rank {rank} did not end within {timeout} s"))
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


def _run(pipe: Connection, folder: str, rank: int, size: int, body: Callable[..., Any], arguments: tuple) -> None:
    os.environ["ZINF_STORE"] = str(Path(folder) / f"store{rank}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Path(os.environ["ZINF_STORE"]).mkdir()
    gc.freeze()  # what was imported once is no garbage
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
        pipe.send(("done", body(rank, *arguments)))
        with contextlib.suppress(RuntimeError):  # another rank may have ended
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
    finally:
        atexit._run_exitfuncs()  # a process that was forked leaves them out
