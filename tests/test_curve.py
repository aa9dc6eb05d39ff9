"""Charts of bytes in text: heights, stacking, budgets, columns, axes."""

from __future__ import annotations

import pytest

from zinf_fx.plan.show.curve import ASCII, BLOCKS, Curve, Glyphs

MIB = 1 << 20
MARGIN = len(" 1023.9 MiB |")
WAVE = [0, 1, 2, 3, 4, 3, 2, 1]


def mib(*sizes: float) -> list[int]:
    return [round(size * MIB) for size in sizes]


def bars(text: str) -> list[str]:
    """Return the columns of a chart, each from its lowest cell up, without axis and labels."""
    rows = [
        line[MARGIN - 1 :].split(" budget")[0] for line in text.splitlines() if line[MARGIN - 2 : MARGIN - 1] in "|│"
    ]
    width = max(map(len, rows))
    return ["".join(column).rstrip() for column in zip(*(row.ljust(width) for row in reversed(rows)), strict=True)]


def test_a_chart_in_ascii():
    text = Curve(mib(*WAVE), above=mib(1, *[0] * 7), budget=5 * MIB, first=-1).draw(ASCII, 60)
    assert text.splitlines() == [
        "   5.0 MiB |------------------------ budget 5.0 MiB",
        "           |            ###",
        "           |         #########",
        "           |      ###############",
        "           |+++#####################",
        "         0 +------------------------",
        "               0  1  2  3  4  5  6",
    ]


def test_a_chart_in_blocks_of_another_height_with_marks():
    text = Curve(mib(*WAVE), budget=3 * MIB, marks="aaaabbbb").draw(BLOCKS, 40, rows=2)
    assert text.splitlines() == [
        "   4.0 MiB │╌╌╌▄█▄╌╌ budget 3.0 MiB",
        "           │ ▄█████▄",
        "         0 └────────",
        "            0    5",
        "            aaaabbbb",
    ]


@pytest.mark.parametrize("glyphs", [ASCII, BLOCKS])
def test_a_column_is_as_high_as_its_value(glyphs: Glyphs):
    """It is to the fraction of a cell that the glyphs can show, and never less."""
    levels, rows = len(glyphs.fills), 4
    values = list(range(1, rows * levels + 1))
    columns = bars(Curve(values).draw(glyphs, 200, rows=rows))
    repeated = len(columns) // len(values)
    assert repeated > 1 and columns == [column for column in columns[::repeated] for _ in range(repeated)]
    heights = [sum(1 + glyphs.fills.index(cell) for cell in column) for column in columns[::repeated]]
    assert heights == values


def test_the_smallest_value_shows_and_zero_does_not():
    columns = bars(Curve([0, 1, 1 << 30]).draw(ASCII, 36))
    assert [column[:1] for column in columns] == [""] * 2 + ["."] * 2 + ["#"] * 2


def test_of_many_values_a_column_shows_the_largest():
    values = [1] * 1000
    values[777] = 9
    columns = bars(Curve(values).draw(ASCII, 150, rows=3))
    high = [number for number, column in enumerate(columns) if len(column) == 3]
    assert high == [777 * len(columns) // 1000] and {len(c) for c in columns} == {1, 3}


@pytest.mark.parametrize("width", [50, 80, 160])
@pytest.mark.parametrize("count", [1, 4, 5, 100, 999])
def test_it_fits_the_width_and_numbers_stand_below_their_columns(width: int, count: int):
    text = Curve([i * MIB for i in range(1, count + 1)], budget=count * MIB).draw(ASCII, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and text.isascii() and not any(line.endswith(" ") for line in lines)
    axis, columns = lines[-1], lines[-2].count("-")
    assert axis.split()[0] == "0"
    for number in axis.split():
        at = axis.index(f" {number}") + 1 - (MARGIN - 1)
        assert at == -(-int(number) * columns // count)


def test_a_budget_out_of_sight_does_not_press_the_curve_flat():
    curve = Curve([MIB, MIB], budget=5 * MIB)
    text = curve.draw(ASCII, 100)
    assert not curve.budget_in_sight and "budget" not in text and bars(text)[0] == "#####"
    assert Curve([MIB, MIB], budget=4 * MIB).budget_in_sight


def test_a_curve_above_its_budget_crosses_the_line():
    text = Curve(mib(1, 4, 1), budget=2 * MIB).draw(ASCII, 40, rows=4).splitlines()
    assert text[:4] == [
        "   4.0 MiB |   ###",
        "           |---###--- budget 2.0 MiB",
        "           |   ###",
        "           |#########",
    ]


def test_nothing_is_drawn_of_nothing():
    assert Curve([]).draw(ASCII, 80) == Curve([0, 0], budget=MIB).draw(ASCII, 80) == ""


def test_peak_and_where():
    curve = Curve([1, 5, 2, 6], above=[0, 2, 5, 0])
    assert (curve.peak, curve.fullest) == (7, 1)


@pytest.mark.parametrize("field", ["above", "marks"])
def test_one_entry_for_each_value(field: str):
    with pytest.raises(ValueError, match=f"{field} has 1 entries for 2 values"):
        Curve([1, 2], **{field: "x" if field == "marks" else [1]})
