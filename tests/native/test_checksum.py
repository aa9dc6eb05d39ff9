"""crc32c has the published values, by instruction and by table, and the seeds tell contents apart."""

from __future__ import annotations

import random

import pytest
from zinf_fx.native._engine import ffi, lib

from zinf_fx.native.engine import PageSums, crc32c

PAGE = 4096

# RFC 3720, appendix B.4, and the polynomial's usual check value.
VECTORS = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
    (b"", 0),
]


@pytest.mark.parametrize("compute", [lib.zinf_crc32c, lib.zinf_crc32c_by_table], ids=["best", "table"])
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_values(compute, data: bytes, expected: int):
    assert compute(0, data, len(data)) == expected


def test_table_and_instruction_agree_at_every_length_and_alignment():
    data = random.Random(1).randbytes(200)
    for start in range(8):
        for length in range(150):
            piece = data[start : start + length]
            assert lib.zinf_crc32c(7, piece, length) == lib.zinf_crc32c_by_table(7, piece, length)


def test_a_checksum_can_be_continued():
    data = random.Random(2).randbytes(1000)
    assert lib.zinf_crc32c(lib.zinf_crc32c(0, data[:333], 333), data[333:], 667) == lib.zinf_crc32c(0, data, 1000)


def page_sums(data: bytes, offset: int = 0, generation: int = 1) -> list[int]:
    sums = ffi.new("uint32_t[]", len(data) // PAGE)
    lib.zinf_page_sums(data, len(data), offset, generation, sums)
    return list(sums)


@pytest.mark.parametrize("pages", range(1, 10))
def test_pages_summed_together_have_the_sums_of_pages_alone(pages: int):
    data = random.Random(pages).randbytes(pages * PAGE)
    alone = [page_sums(data[i * PAGE : (i + 1) * PAGE], i * PAGE)[0] for i in range(pages)]
    assert page_sums(data) == alone


def test_a_sum_fits_one_content_one_place_and_one_generation():
    page = random.Random(3).randbytes(PAGE)
    flipped = bytes([page[0] ^ 1]) + page[1:]
    sums = [
        page_sums(content, offset, generation)[0]
        for content in (page, flipped)
        for offset in (0, PAGE, 1 << 40)
        for generation in (1, 2, 1 << 33)
    ]
    assert len(set(sums)) == len(sums) and 0 not in sums


@pytest.mark.parametrize("pages", [1, 3, 8])
def test_pages_have_the_checksum_of_the_table(pages: int):
    """Up to what the seed contributes, which is the same for every content."""
    data, offset = random.Random(pages).randbytes(pages * PAGE), 5 * PAGE

    def by_table(data: bytes) -> list[int]:
        return [lib.zinf_crc32c_by_table(0, data[i : i + PAGE], PAGE) for i in range(0, len(data), PAGE)]

    def differences(content: list[int], zeros: list[int]) -> list[int]:
        return [page_sum ^ other for page_sum, other in zip(content, zeros, strict=True)]

    zeros = bytes(len(data))
    expected = differences(by_table(data), by_table(zeros))
    assert differences(page_sums(data, offset), page_sums(zeros, offset)) == expected


def test_the_seed_contributes_the_same_to_every_content():
    page, other = (random.Random(number).randbytes(PAGE) for number in (4, 5))
    assert page_sums(page)[0] ^ page_sums(page, PAGE)[0] == page_sums(other)[0] ^ page_sums(other, PAGE)[0]


@pytest.mark.parametrize("pages", [1, 2, 37])
def test_checksums_of_pages_are_joined_without_the_data(pages: int):
    data, offset, generation = random.Random(pages).randbytes(pages * PAGE), 9 * PAGE, 1 << 40 | 3
    sums = PageSums(pages, generation)
    lib.zinf_page_sums(data, len(data), offset, generation, sums.table)
    assert sums.joined(0, pages, offset) == crc32c(data)
    for first in range(pages):
        crc = sums.joined(0, first, offset)
        assert sums.joined(first, pages - first, offset + first * PAGE, crc) == crc32c(data)
    assert sums.joined(pages - 1, 1, offset + (pages - 1) * PAGE) == crc32c(data[-PAGE:])
    assert sums.joined(0, pages, offset + PAGE) != crc32c(data)  # others' seeds


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_page_without_a_checksum_of_its_own_has_none_to_join(unknown: int):
    sums = PageSums(3, 7)
    lib.zinf_page_sums(bytes(3 * PAGE), 3 * PAGE, 0, 7, sums.table)
    sums.table[1] = unknown
    assert sums.joined(0, 3, 0) is None and sums.joined(0, 1, 0) == crc32c(bytes(PAGE))
