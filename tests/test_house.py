"""How large a file and a class of the product may be, and that modules are where prose says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import zinf_fx

LINES, ATTRIBUTES = 450, 20

ROOT = Path(zinf_fx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def attributes_of(definition: ast.ClassDef) -> set[str]:
    """What instances of a class have: annotated fields that are no class variables, and what is assigned to `self`."""
    names = {
        statement.target.id
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    }
    for node in ast.walk(definition):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(node.attr)
    return names


def test_no_file_is_long_and_no_class_has_many_attributes():
    long = {}
    for path in FILES:
        text = path.read_text()
        if (lines := text.count("\n")) > LINES:
            long[path.name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and len(found := attributes_of(node)) > ATTRIBUTES:
                long[f"{path.name}: {node.name}"] = len(found)
    assert not long


def test_modules_that_prose_names_are_where_it_says():
    """Of `folder.module`, where some folder and some module are called so."""
    modules = [path.relative_to(ROOT).with_suffix("").parts for path in FILES]
    folders, names = {folder for one in modules for folder in one[:-1]}, {one[-1] for one in modules}
    ends = {one[start:] for one in modules for start in range(len(one))}
    lost = []
    for path in FILES:
        for named in re.findall(r"`(\w+(?:\.\w+)+)", path.read_text()):
            first, *others = parts = tuple(named.split("."))
            heads = {parts[:end] for end in range(2, len(parts) + 1)}
            if first in folders and names.intersection(others) and not ends & heads:
                lost.append(f"{path.name}: {named}")
    assert not lost
