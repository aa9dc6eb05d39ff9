"""The command line, `zinf-fx`. Results go to stdout as plain text; errors and notes to stderr.

Exit codes: 0, 1 for a problem that `doctor` found, 2 for input that can't be used (one line says why), 130 when
interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zinf_fx.cli import bench_io, clean, doctor, estimate, export_plan, show_schedule, simulate
from zinf_fx.errors import ZinfError

_COMMANDS = (show_schedule, export_plan, simulate, estimate, bench_io, doctor, clean)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `arguments`: default those of the process."""
    parser = argparse.ArgumentParser(
        prog="zinf-fx", description="Plans of models whose states live in device memory, host memory and NVMe."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
        sys.stdout.flush()
    except ZinfError as error:
        if getattr(options, "traceback", False):
            raise
        print(f"zinf-fx: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        code = 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return code or 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
