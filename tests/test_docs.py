"""The README and the pages in docs/: what they link to and name exists, and their commands and options are accepted."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pytest

import zinf_fx
from zinf_fx.cli.arguments import parser
from zinf_fx.config import option_names

ROOT = Path(zinf_fx.__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "clients.md")]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OFFLOADING = ("offload", "offloading", "export_plan", "Config")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages."""
    return [text for language, text in _FENCE.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[tuple[Path, str]]:
    """Return files that a page links to, each with the heading in it, or ""."""
    targets = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", prose(page))
    return [((page.parent / path) if path else page, heading) for path, heading in targets if "://" not in path]


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def shell_lines(page: Path, program: str) -> list[list[str]]:
    """Return the command lines of a program in shell blocks, as lists of words."""
    lines = "\n".join(blocks(page, "sh", "")).replace("$ ", "").splitlines()
    texts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(text, comments=True) for text in texts if text.startswith(f"{program} ")]


def mentions(page: Path, program: str) -> list[list[str]]:
    """Its command lines between backticks, which may leave out what they are for."""
    texts = re.findall(r"`([^`]+)`", prose(page).replace("\n", " "))
    return [shlex.split(text) for text in texts if text.startswith(f"{program} ")]


def subcommands() -> dict[str, set[str]]:
    """Return the options of each command of `zinf-fx`."""
    (action,) = parser()._subparsers._group_actions
    options = {name: set(command._option_string_actions) for name, command in action.choices.items()}
    (actions,) = action.choices["checkpoint"]._subparsers._group_actions
    options["checkpoint"] |= {
        option for command in actions.choices.values() for option in command._option_string_actions
    }
    return options


@every_page
def test_links_lead_to_files_and_headings(page: Path):
    broken = [
        (str(path), heading)
        for path, heading in links(page)
        if not path.exists() or (heading and heading not in anchors(path))
    ]
    assert not broken


def test_the_readme_leads_to_every_page():
    assert {path.resolve() for path, _ in links(README)} >= set(PAGES[1:])


@every_page
def test_files_that_are_named_exist(page: Path):
    named = re.findall(r"`(?:python )?((?:benchmarks|docs|examples|tests|zinf_fx)/[\w/.]*)[` :]", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


@every_page
def test_python_uses_names_and_options_that_there_are(page: Path):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name.startswith("zinf_fx.") and not name.startswith("zinf_fx.integrations."):
                attrgetter(name.removeprefix("zinf_fx."))(zinf_fx)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zinf_fx."):
                assert (ROOT / node.module.replace(".", "/")).with_suffix(".py").exists()
            if isinstance(node, ast.Call) and ast.unparse(node.func) in [f"zinf_fx.{name}" for name in _OFFLOADING]:
                assert {keyword.arg for keyword in node.keywords} <= {"config", *option_names()}
            if isinstance(node, ast.keyword) and node.arg == "options":
                assert {key.value for key in node.value.keys} <= {"plan", *option_names()}


@every_page
def test_names_of_the_package_in_the_text_exist(page: Path):
    for name in re.findall(r"`(?:with |class \w+\()?zinf_fx\.([\w.]+)", prose(page)):
        if not name.startswith("integrations"):
            attrgetter(name)(zinf_fx)


@every_page
def test_the_command_line_accepts_its_commands(page: Path):
    for _, *words in shell_lines(page, "zinf-fx"):
        parser().parse_args(words)
    accepted = subcommands()
    for _, command, *words in mentions(page, "zinf-fx"):
        if command != "COMMAND":
            assert {word for word in words if word.startswith("-")} <= accepted[command], command


@every_page
def test_programs_have_the_options_they_are_called_with(page: Path):
    sources = chain(*((ROOT / folder).glob("*.py") for folder in ("benchmarks", "examples")))
    text = "".join(path.read_text() for path in sources)
    for _, program, *words in shell_lines(page, "python") + mentions(page, "python"):
        if program.startswith(("benchmarks/", "examples/")):
            named = [word for word in words if word.startswith("--")]
            # argparse makes --no-x of --x where that is a switch
            assert not [w for w in named if f'"{w}"' not in text and f'"--{w.removeprefix("--no-")}"' not in text], (
                program
            )


def test_every_option_is_in_the_table_of_options_with_its_default():
    table = (ROOT / "docs" / "using.md").read_text()
    defaults = {field.name: field.default for field in fields(zinf_fx.Config)}
    assert not [option for option in defaults if f"`{option}`" not in table]
    named = re.findall(r"^\| `(\w+)` \| `([^`$]+)` \|", table, re.MULTILINE)
    assert len(named) > 4 and not [(name, text) for name, text in named if ast.literal_eval(text) != defaults[name]]
