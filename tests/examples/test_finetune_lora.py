"""The example that trains adapters over a quantised base on disk, as somebody runs it who makes mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="is installed with the clients")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_lora.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, EXAMPLE, *map(str, options)], capture_output=True, text=True, timeout=240)


def test_a_wrong_option_is_refused_before_a_base_is_made(tmp_path: Path) -> None:
    base, store = tmp_path / "base", tmp_path / "store"
    base.mkdir()
    store.mkdir()
    for option, value, said in (
        ("--rank", "0", "must be a whole number of at least 1"),
        ("--activations", "recomput", "accepted: 'keep'"),
        ("--length", "9999999999", "give a longer one"),
    ):
        found = run("--base", base, "--store", store, option, value)
        assert found.returncode == 2 and said in found.stderr, found.stderr
        assert not any(base.iterdir())
    found = run(tmp_path)
    assert found.returncode == 2 and "there is no checkpoint" in found.stderr, found.stderr


def test_a_base_that_was_not_kept_to_the_end_is_made_anew(tmp_path: Path) -> None:
    text, base = tmp_path / "text.txt", tmp_path / "base"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    options = ("--size", "tiny", "--steps", 1, "--batch", 1, "--length", 16, "--text", text, "--base", base)
    options += ("--store", tmp_path, "--output", tmp_path / "adapter")
    for _ in range(2):
        found = run(*options)
        assert found.returncode == 0, found.stderr
        (base / "manifest.json").unlink()
