"""The C files stand on floors: no header includes, and no source calls, what is above it."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

from zinf_fx.native import engine
from zinf_fx.native.build import HEADERS, SOURCES

NATIVE = Path(engine.__file__).parent
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DEFINED = re.compile(r"^\w[\w *]*?\b(zinf_\w+)\([^;{}]*\)\n\{|^const struct zinf_provider (zinf_\w+) =", re.MULTILINE)


def below(folder: Path) -> dict[str, set[str]]:
    """By file, the headers that it includes and the sources whose functions and tables it names."""
    texts = {path.name: COMMENT.sub("", path.read_text()) for path in sorted(folder.glob("*.[ch]"))}
    sources = {name: text for name, text in texts.items() if name.endswith(".c")}
    home = {
        name: file
        for file, text in sources.items()
        for definitions in DEFINED.findall(text)
        for name in definitions
        if name
    }
    includes = {file: set(re.findall(r'#include "(\w+\.h)"', text)) for file, text in texts.items()}
    for file, text in sources.items():
        includes[file] |= {home[name] for name in re.findall(r"\bzinf_\w+", text) if name in home} - {file}
    return includes


def test_no_circle():
    files = below(NATIVE)
    assert set(files) == {*SOURCES, *HEADERS}
    assert {"requests.c", "blocks.h"} <= files["blocks.c"] and "provider_threads.c" in files["engine.c"]
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def test_a_circle_is_found(tmp_path: Path):
    (tmp_path / "one.c").write_text('#include "one.h"\nint zinf_one(void)\n{\n    return zinf_other();\n}\n')
    (tmp_path / "other.c").write_text("int zinf_other(void)\n{\n    return zinf_one(); /* zinf_none() */\n}\n")
    assert below(tmp_path) == {"one.c": {"one.h", "other.c"}, "other.c": {"one.c"}}
