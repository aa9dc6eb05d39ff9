"""`zinf-fx doctor [DIR...]`: what of this machine helps or hinders a store, and the line that fixes each problem."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from zinf_fx.cli.machine import stores_in_use
from zinf_fx.errors import StoreError
from zinf_fx.machine.diagnose import Finding, diagnose

_MARKS = {"ok": "ok", "warning": "WARN", "problem": "FAIL"}
_WIDTH = 100


def run(options: argparse.Namespace) -> int:
    """Print the findings. Returns 1 if one of them is a problem."""
    findings_of = _diagnosed(options.directories)
    if options.json:
        print(
            json.dumps(
                {name: [asdict(finding) for finding in findings] for name, findings in findings_of.items()}, indent=1
            )
        )
    else:
        for name, findings in findings_of.items():
            print(name)
            for finding in findings:
                print(_text(finding))
    return int(any(finding.status == "problem" for findings in findings_of.values() for finding in findings))


def _diagnosed(directories: Sequence[Path]) -> dict[str, list[Finding]]:
    try:
        return {str(directory): diagnose(directory) for directory in directories or stores_in_use()}
    except StoreError as error:  # the default store can't be made: `diagnose` raises none
        return {error.path: diagnose(Path(error.path), error)}


def _text(finding: Finding) -> str:
    head = f"  {_MARKS[finding.status]:4}  {finding.subject:12}  "
    text = textwrap.fill(finding.found, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    return text if finding.fix is None else f"{text}\n{' ' * len(head)}fix: {finding.fix}"
