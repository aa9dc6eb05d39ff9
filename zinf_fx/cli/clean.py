"""`zinf-fx clean [DIR]`: removes the scratch directories that dead jobs left behind."""

from __future__ import annotations

import argparse
from pathlib import Path

from zinf_fx.config import Config
from zinf_fx.runtime.scratch import NAME
from zinf_fx.runtime.store import reclaim


def add_to(commands: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "clean",
        help="remove the scratch directories of dead jobs",
        description="Removes the scratch directories that jobs left behind when they were killed. Those of running "
        "jobs are locked and stay, and so does everything that isn't a scratch directory.",
    )
    parser.add_argument("directory", metavar="DIR", nargs="?", type=Path, help="the store; default: that of Config()")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print what was removed, and what stays. Raises: StoreError for a directory that can't be read."""
    if options.directory is not None:
        _clean(options.directory)
        return
    for directory in Config().stores:
        if directory.exists():
            _clean(directory)
        else:
            print(f"{directory}: nothing to clean, the default store was never used")


def _clean(directory: Path) -> None:
    removed = reclaim(directory)
    stay = sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))
    for path in removed:
        print(f"removed  {path}")
    for path in stay:
        print(f"in use   {path}")
    if not removed and not stay:
        print(f"{directory}: no scratch directories")
