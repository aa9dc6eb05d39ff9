"""The command line, `zinf-fx`. Results go to stdout as plain text; errors and notes to stderr.

Exit codes: 0, 1 for a problem that `doctor` found, 2 for input that can't be used (a message says why), 130 when
interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from zinf_fx.cli.arguments import parser
from zinf_fx.errors import ZinfError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `arguments`: default those of the process."""
    options = parser().parse_args(arguments)
    try:
        command = import_module(f"zinf_fx.cli.{options.command.replace('-', '_')}")
        code = command.run(options)
        sys.stdout.flush()
    except ZinfError as error:
        if getattr(options, "traceback", False):
            raise
        print(f"zinf-fx: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        code = 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return code or 0
