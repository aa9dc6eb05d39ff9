from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import train_step
from train_step import compare_losses, main, summarise, table

TINY = {"layers": 1, "hidden": 16, "heads": 2, "context": 16, "batch": 2, "steps": 2, "warmup": 1, "repeats": 1}
TINY_FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]


def result(variant: str, step: list[float], peak: int, losses: list[float]) -> dict:
    return {
        "variant": variant,
        "losses": losses,
        "first_step": 9.0,
        "step": step,
        "forward": step,
        "backward": step,
        "optimizer": step,
        "peak_resident_bytes": peak,
        "rusage_maxrss_bytes": peak,
        "peak_device_bytes": 0,
        "read_per_parameter": 14.0,
        "written_per_parameter": 16.0,
    }


class TestSummaries:
    # The machine is twice as slow in the second round; zinf takes 1.5 times as long in both.
    rounds = (
        {"eager": result("eager", [1, 2, 3], 2**31, [5.0]), "zinf": result("zinf", [3, 3, 9], 2**30, [5.0])},
        {"eager": result("eager", [4, 4, 4], 2**31, [5.0]), "zinf": result("zinf", [6, 6, 6], 2**30, [5.0])},
    )

    def test_medians_and_ratios_within_rounds(self) -> None:
        summary = summarise(self.rounds, "zinf")
        assert summary["step"] == 6
        assert summary["fastest_step"] == 3
        assert summary["step_ratio"] == {"eager": 1.5, "zinf": 1.0}
        assert summary["peak_ratio"] == {"eager": 0.5, "zinf": 1.0}

    def test_table_has_a_row_per_variant_and_ratios_to_those_that_ran(self) -> None:
        text = table([summarise(self.rounds, variant) for variant in ("eager", "zinf")])
        eager, zinf = text.splitlines()[-2:]
        assert eager.split()[0] == "eager" and eager.split()[-2:] == ["-", "-"]
        assert zinf.split()[0] == "zinf" and zinf.split()[-5:] == ["1.50", "1.00", "0.50", "14.00", "16.00"]
        assert "compile" not in text


@pytest.mark.parametrize(
    ("variant", "losses", "passed", "words"),
    [
        ("zinf", [5.0, 4.0], True, "2 losses bitwise equal"),
        ("zinf", [5.0, 4.0000001], False, "first at step 1"),
        ("zinf", [5.0, float("nan")], False, "must be bitwise equal"),
        ("compile", [5.0, 4.0000001], True, "by at most 1e-07"),
        ("compile", [5.0, float("nan")], False, "by at most nan"),
    ],
)
def test_losses_are_compared_with_eager(variant: str, losses: list[float], passed: bool, words: str) -> None:
    rounds = [{"eager": result("eager", [1], 1, [5.0, 4.0]), variant: result(variant, [1], 1, losses)}]
    lines, all_passed = compare_losses(rounds)
    assert all_passed == passed
    assert words in lines[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heads", "7"], "--hidden (1024) must be a multiple of --heads (7)"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
        (["--variants", "deepspeed"], "invalid choice: 'deepspeed'"),
        (["--clip", "1", "--variants", "zinf-in-backward"], "leave one out"),
        (["--check", "--variants", "compile", "zinf"], "--check compares other variants with eager"),
    ],
)
def test_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(flags)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_json_of_plain_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY_FLAGS, "--variants", "eager", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (summary,) = answer["summaries"]
    (results,) = answer["rounds"]
    assert summary["variant"] == "eager"
    assert 0 < summary["forward"] < summary["step"]
    assert summary["peak_resident_bytes"] > 2**26
    assert len(results["eager"]["losses"]) == 3
    assert len(results["eager"]["step"]) == 2


def test_table_of_plain_variants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    about = {"gpu": "", "torch": "2", "threads": 1, "parameters": 2000}
    monkeypatch.setattr(train_step, "run_variant", lambda request: {**result("eager", [1.0], 1, [5.0]), **about})
    assert main([*TINY_FLAGS, "--variants", "eager"]) == 0
    printed = capsys.readouterr().out
    assert "GPT 1 x 16, 2,000 parameters" in printed
    assert printed.splitlines()[-2].startswith("eager")


def test_a_variant_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "WORKER", tmp_path / "worker.py")
    (tmp_path / "worker.py").write_text("raise SystemExit('no such placement')")
    with pytest.raises(SystemExit, match=r"^variant zinf ended with status 1:\nno such placement$"):
        main([*TINY_FLAGS, "--variants", "zinf"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zinf_is_bitwise_equal_to_eager(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["--variants", "eager", "zinf", "zinf-in-backward"]
    status = main([*TINY_FLAGS, *variants, "--dtype", dtype, "--check", "--json", "--store", str(tmp_path)])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    answer = json.loads(printed.out)
    assert answer["passed"]
    assert answer["rounds"][0]["zinf"]["written_per_parameter"] > 0
