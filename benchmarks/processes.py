"""Programs that measure something in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def answer_of(name: str, *command: str | Path, environment: Mapping[str, str] | None = None) -> dict:
    """Run a Python program with the arguments `command`, and return the JSON that it prints as its last line. Where it
    fails, this program ends too, with the complaints of the other, which it calls `name`."""
    whole = [sys.executable, *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Not subprocess.run: after Ctrl-C it kills the process at once, before that has removed its scratch store.
    with subprocess.Popen(whole, env=environment, **pipes) as process:
        answer, complaint = process.communicate()
    if process.returncode:
        sys.exit(f"{name} ended with status {process.returncode}:\n{complaint.strip()}")
    return json.loads(answer.splitlines()[-1])
