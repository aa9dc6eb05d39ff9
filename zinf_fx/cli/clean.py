"""`zinf-fx clean [DIR ...]`: gives back what dead jobs left behind in stores and in the files of checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from zinf_fx.config import Config
from zinf_fx.runtime.disk.scratch import IN_USE, survey
from zinf_fx.sizes import in_words


def run(options: argparse.Namespace) -> None:
    """Print what was removed or freed, and what stays. Raises: ZinfError for a directory that can't be read."""
    directories = options.directories or _stores()
    said = {directory: _clean(directory) for directory in directories}
    for directory in directories:  # a checkpoint's file may have had another name in a store
        if not (_give_back(directory) or said[directory]):
            print(f"{directory}: no scratch directories")


def _stores() -> list[Path]:
    config = Config()
    used = [directory for directory in config.stores if directory.exists() or not config.store_is_default]
    for directory in config.stores:
        if directory not in used:
            print(f"{directory}: nothing to clean, the default store was never used")
    return used


def _clean(directory: Path) -> bool:
    """Clean a store. Returns whether there was anything to say."""
    surveyed = survey(directory, remove=True)
    for path, stays in sorted(surveyed.items(), key=lambda item: (item[1] is not None, item[0])):
        if stays is None:
            print(f"removed  {path}")
        elif stays == IN_USE:
            print(f"in use   {path}")
        else:
            print(f"stays    {path}: {stays}")
    return bool(surveyed)


def _give_back(directory: Path) -> bool:
    """Free what is in no checkpoint of a directory. Returns whether there was anything to say."""
    from zinf_fx.checkpoint.catalog import (
        checkpoints_in,  # it takes a second to import PyTorch
        give_back_unnamed,
    )

    given = give_back_unnamed(checkpoints_in(directory))
    for path, nbytes in given.items():
        print(f"freed    {in_words(nbytes)} of {path}, which are in no checkpoint")
    return bool(given)
