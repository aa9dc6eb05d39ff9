"""benchmarks/roundpipe.py runs with a small model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import roundpipe
from llama import LlamaConfig
from roundpipe import Choice, Model, machine, plans_of, rows_of, simulated, table

SMALL = Model("small", LlamaConfig(5, 64, 96, 4, 2, 128, head=32, normalised=True), 8, published=1000.0)
CHOICE = Choice(2)
CONTEXT = 16


def test_rows_say_what_limits_and_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundpipe, "DEPTHS", (1,))
    plans = 2 * plans_of(SMALL, CHOICE, CONTEXT)  # what a further layer adds is another test's subject
    monkeypatch.setattr(roundpipe, "DEPTHS", (1, 2))
    monkeypatch.setattr(roundpipe, "plans_of", lambda model, choice, context: plans)
    monkeypatch.setattr(roundpipe, "OTHER_STATES", ())
    rows = rows_of(SMALL, [CHOICE], CONTEXT)
    assert [(row["peak"], row["share"]) for row in rows] == [
        (165.2e12, 0.5),
        (330.3e12, 0.5),
        (165.2e12, 1.0),
        (330.3e12, 1.0),
    ]
    for row in rows:
        assert row["passes"] == 4
        assert row["tokens"] == pytest.approx(8 * CONTEXT / row["seconds"])
        assert row["ratio"] == pytest.approx(row["tokens"] / 1000)
        assert row["limit"] == max(row["busy"], key=row["busy"].get) and max(row["busy"].values()) <= 1

    hardware = machine()
    slow = replace(hardware, upload=replace(hardware.upload, bandwidth=1e6))
    assert simulated(SMALL, CHOICE, plans, slow, CONTEXT)["limit"] == "upload link"
    slow = replace(hardware, updates=dict.fromkeys(hardware.updates, 1e6))
    assert simulated(SMALL, CHOICE, plans, slow, CONTEXT)["limit"] == "host update"
    small = replace(hardware, device=replace(hardware.device, capacity=1 << 10))
    refused = simulated(SMALL, CHOICE, plans, small, CONTEXT)
    assert refused["tokens"] is None and refused["limit"] == "memory"
    printed = table([*rows, refused])
    assert "small, 1 x 2 sequences, recomputed, fp32 states: device memory" in printed
    assert printed.count("recomputed") == 5  # the fastest plan at two shares of two peaks, and what is left out


@pytest.mark.slow
def test_each_further_layer_adds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    extended = simulated(SMALL, CHOICE, plans_of(SMALL, CHOICE, CONTEXT), machine(), CONTEXT)
    monkeypatch.setattr(roundpipe, "DEPTHS", (5, 6))
    whole = simulated(SMALL, CHOICE, plans_of(SMALL, CHOICE, CONTEXT), machine(), CONTEXT)
    for name in ("seconds", "device_memory", "host_memory"):
        assert extended[name] == pytest.approx(whole[name], rel=0.02)


def test_a_parameter_is_updated_as_fast_as_host_memory_moves_its_states() -> None:
    bytes_each = {"float32": 12, "bfloat16": 8, "split, 8bit": 4}
    assert machine().updates == pytest.approx({form: 80e9 / (2 * nbytes) for form, nbytes in bytes_each.items()})


def test_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        roundpipe.main(["--context", "0"])
    assert "--context must be at least 1" in capsys.readouterr().err
