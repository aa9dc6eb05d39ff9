"""`zinf-fx bench-io` prints a table or JSON, and stores what the planner reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zinf_fx.cli import main
from zinf_fx.machine import fio
from zinf_fx.runtime.disk.measure import OPERATIONS, load_profile


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fio, "installed", lambda: False)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir()
    return path


FAST = ["--size", "8MiB", "--rounds", "1"]


def test_the_table_and_the_profile(store: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench-io", str(store), *FAST]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("zinf_fx aio", "zinf_fx threads", "(page cache)", "4096 KiB", *OPERATIONS))
    profile = load_profile(store)
    assert profile is not None and profile.provider in ("libaio", "aio", "threads") and profile.read > 0
    assert f"best: {profile.provider}, {profile.block >> 10} KiB x {profile.depth}" in text
    assert not list(store.iterdir())


def test_json(store: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench-io", str(store), "--json", "--no-store", "--provider", "aio", *FAST]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)[str(store)]
    assert captured.err == "" and load_profile(store) is None
    assert {row["by"] for row in report["rows"]} == {"zinf_fx aio"} and report["profile"]["provider"] == "aio"
    assert all(set(row["rates"]) == set(OPERATIONS) for row in report["rows"])


def test_rows_of_fio(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.undo()
    if not fio.installed():
        pytest.skip("fio is not installed")
    assert main(["bench-io", str(store), "--json", "--no-store", "--provider", "aio", *FAST]) == 0
    assert any(row["by"].startswith("fio ") for row in json.loads(capsys.readouterr().out)[str(store)]["rows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{store}", "{store}/missing"], "^zinf-fx: error: .* does not exist"),
        (["{store}", __file__], "^zinf-fx: error: store measure failed: .*/test_bench_io.py: it is no directory; name"),
        (["{store}", "--size", "much"], "'much' is not a size"),
        (["{store}", "--rounds", "0"], "at least one"),
        (["{store}", "--size", "1000000TiB"], "reserved|full|limit"),
    ],
)
def test_what_cannot_be_used(store: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    arguments = [argument.format(store=store) for argument in arguments]
    assert main(["bench-io", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and captured.out == "" and not list(store.iterdir())
