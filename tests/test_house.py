"""How large a file and a class of the product may be."""

from __future__ import annotations

import ast
from pathlib import Path

import zinf_fx

LINES, ATTRIBUTES = 450, 20

FILES = sorted(Path(zinf_fx.__file__).parent.rglob("*.py"))


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
