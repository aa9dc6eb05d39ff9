"""Runs real client libraries on offloaded models, and writes docs/clients.md from what was found.

    pip install -e '.[test,clients]'
    python tests/clients [--core] [pytest options]

Every test is a row of the page. `--core` runs those of torch and transformers alone, for a torch that the other
libraries aren't there for. Results are kept in docs/clients.json by version of torch, and the page is made from all of
them. A run replaces those of its own version; with `-k`, those of the rows that it ran. What fails stands there too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import page
import pytest
from rows import Row

FOLDER = Path(__file__).resolve().parent
CORE = ("test_torch_modules.py", "test_transformers_models.py")


class Keep:
    """Keeps the rows of a run, and writes the page."""

    def __init__(self) -> None:
        self.found: dict[str, Row] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = dict(report.user_properties).get("row")
        if report.when != "call" or row is None:
            return
        test = report.nodeid.rpartition("/")[2]
        self.found[test] = Row(**row)
        if report.failed:
            self.found[test].results = ["**fails**: " + report.longrepr.reprcrash.message.splitlines()[0]]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not hasattr(
            session.config, "workerinput"
        ):
            page.keep(self.found, replace=not session.config.option.keyword)
            page.write()


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument != "--core"]
    files = [FOLDER / name for name in CORE] if "--core" in arguments else [FOLDER]
    return int(pytest.main([*map(str, files), "--show-capture=no", "--tb=short", "-v", *options], plugins=[Keep()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
