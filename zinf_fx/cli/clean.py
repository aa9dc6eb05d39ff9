"""`zinf-fx clean [DIR]`: removes the scratch directories that dead jobs left behind."""

from __future__ import annotations

import argparse
from pathlib import Path

from zinf_fx.config import Config
from zinf_fx.runtime.disk.scratch import IN_USE, survey


def run(options: argparse.Namespace) -> None:
    """Print what was removed, and what stays. Raises: StoreError for a directory that can't be read."""
    if options.directory is not None:
        _clean(options.directory)
        return
    config = Config()
    for directory in config.stores:
        if directory.exists() or not config.store_is_default:
            _clean(directory)
        else:
            print(f"{directory}: nothing to clean, the default store was never used")


def _clean(directory: Path) -> None:
    found = survey(directory, remove=True)
    for path, stays in sorted(found.items(), key=lambda item: (item[1] is not None, item[0])):
        if stays is None:
            print(f"removed  {path}")
        elif stays == IN_USE:
            print(f"in use   {path}")
        else:
            print(f"stays    {path}: {stays}")
    if not found:
        print(f"{directory}: no scratch directories")
