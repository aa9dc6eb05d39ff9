"""Modules are where prose says."""

from __future__ import annotations

import re
from pathlib import Path

import zinf_fx

ROOT = Path(zinf_fx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def test_modules_that_prose_names_are_where_it_says():
    """It names them as `folder.module`, where some folder and some module are called so."""
    modules = [path.relative_to(ROOT).with_suffix("").parts for path in FILES]
    folders, names = {folder for module in modules for folder in module[:-1]}, {module[-1] for module in modules}
    ends = {module[start:] for module in modules for start in range(len(module))}
    lost = []
    for path in FILES:
        for named in re.findall(r"`(\w+(?:\.\w+)+)", path.read_text()):
            first, *others = parts = tuple(named.split("."))
            heads = {parts[:end] for end in range(2, len(parts) + 1)}
            if first in folders and names.intersection(others) and not ends & heads:
                lost.append(f"{path.name}: {named}")
    assert not lost
