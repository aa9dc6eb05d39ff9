"""The example that trains adapters over a quantised base on disk, as somebody runs it who makes mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="is installed with the clients")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_lora.py"
sys.path.insert(0, str(EXAMPLE.parent))


def test_a_wrong_option_is_refused_before_a_base_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import finetune_lora

    base, store, text = tmp_path / "base", tmp_path / "store", tmp_path / "text.txt"
    base.mkdir()
    store.mkdir()
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    options = ("--base", str(base), "--store", str(store), "--text", str(text))
    for given, said in (
        ((*options, "--rank", "0"), "must be a whole number of at least 1"),
        ((*options, "--activations", "recomput"), "accepted: 'keep'"),
        ((*options, "--length", "9999999999"), "give a longer one"),
        ((str(tmp_path),), "there is no checkpoint"),
    ):
        with pytest.raises(SystemExit) as exit:
            finetune_lora.main(given)
        assert exit.value.code == 2 and said in capsys.readouterr().err
        assert not any(base.iterdir())


def test_a_base_that_was_not_kept_to_the_end_is_made_anew(tmp_path: Path) -> None:
    import finetune_lora

    text, base = tmp_path / "text.txt", tmp_path / "base"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    options = ("--size", "tiny", "--steps", 1, "--batch", 1, "--length", 16, "--text", text, "--base", base)
    options += ("--store", tmp_path, "--output", tmp_path / "adapter")
    for _ in range(2):
        finetune_lora.main([str(option) for option in options])
        (base / "manifest.json").unlink()
