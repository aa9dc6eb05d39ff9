"""Fingerprints name what differs, and of a long line, what is around the difference."""

from __future__ import annotations

import pytest

from zinf_fx.errors import PlanError
from zinf_fx.passes.ir.fingerprint import check_same
from zinf_fx.plan.plan import Fingerprint


def of(*lines: str) -> Fingerprint:
    return Fingerprint("2", "0", lines, tuple(range(len(lines))))


def refusal(plan: Fingerprint, actual: Fingerprint) -> str:
    with pytest.raises(PlanError) as error:
        check_same(plan, actual)
    return str(error.value)


def test_a_difference_is_named():
    assert refusal(of("input 0: f32[2]"), of("input 0: f32[4]")) == (
        "node 0 of the captured graph is: input 0: f32[4]; that of the plan: input 0: f32[2]"
    )
    assert "node 1 of the captured graph is: nothing; that of the plan: return []" in refusal(
        of("a", "return []"), of("a")
    )


def test_of_long_lines_the_difference_is_shown():
    line = [f"-{n}" for n in range(3000)]
    other = [*line[:2000], "None", *line[2001:]]
    text = refusal(of(f"return [{', '.join(line)}]"), of(f"return [{', '.join(other)}]"))
    assert "-1999, None, -2001" in text and "-1999, -2000, -2001" in text and len(text) < 800
