"""Programs in processes of their own, forked from one that has imported PyTorch: importing it takes longer than most of
them run. Of what an interpreter does when it exits, they call the functions that wait for that."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from unittest import mock

# By the process that all others are forked from.
_IMPORTED_ONCE = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor.experimental",
    "torch._dynamo.backends.inductor",
    "torch._inductor.compile_fx",
    "torch.export._trace",
    "zinf_fx",
    "zinf_fx.frontend.backend",
    "zinf_fx.frontend.explain",
    "zinf_fx.observe",
    "zinf_fx.optim",
    "captured",
]


def forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):  # all that it looks for modules by
        ensure_running()
    return context


@dataclass(frozen=True)
class Ended:
    """Holds how a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Running:
    """Runs a program given as text, with its arguments in `sys.argv[1:]`; `stdout` is read while it runs."""

    def __init__(self, program: str, *arguments: object) -> None:
        context = forkserver()
        mine, theirs = context.Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile(mode="r")  # noqa: SIM115
        texts = [str(argument) for argument in arguments]
        self.process = context.Process(target=_run, args=(theirs, self._errors.name, program, texts), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        self.stdout = os.fdopen(os.dup(mine.fileno()))
        mine.close()

    def end(self, timeout: float = 120) -> Ended:
        """Wait for it, and read all."""
        printed = self.stdout.read()
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it runs for longer than {timeout} s"
        return Ended(self.process.exitcode, printed, self._errors.read())

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.stdout.close()


def run(program: str, *arguments: object) -> Ended:
    return Running(program, *arguments).end()


def _run(out: Connection, errors: str, program: str, arguments: list[str]) -> None:
    os.dup2(out.fileno(), 1)
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    out.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["-c", *arguments]
    gc.freeze()  # what was imported once is no garbage
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    finally:  # a process that was forked leaves out what ends an interpreter: its threads first
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
