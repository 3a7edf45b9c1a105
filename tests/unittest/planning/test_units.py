# SPDX-License-Identifier: Apache-2.0
"""Amounts of memory, read and written."""

import pytest

from tensorrt_llm.planning.units import human, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("15.35GiB", 16_481_936_998),
        ("180GB", 180 * 10**9),
        ("180 gb", 180 * 10**9),
        (".5MiB", 1 << 19),
        ("64kib", 1 << 16),
        ("1TiB", 1 << 40),
        ("640B", 640),
        ("640", 640),
    ],
)
def test_amounts_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_no_memory_is_an_amount_where_it_may_be() -> None:
    assert parse_bytes("0GB", least=0) == 0
    with pytest.raises(ValueError, match="'-1B' is -1 bytes"):
        parse_bytes("-1B", least=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5GX", "unknown unit 'GX': use one of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB"),
        ("-5GB", "'-5GB' is -5000000000 bytes: give a positive amount of memory, such as 15.35GiB"),
        ("0", "'0' is 0 bytes: give a positive amount"),
        ("0.1B", "is 0 bytes"),
        ("a lot", "'a lot' is not an amount of memory: give a number and a unit"),
        ("1e3GB", "is not an amount of memory"),
        ("nan", "is not an amount of memory"),
        ("", "is not an amount of memory"),
        ("5 GB GB", "is not an amount of memory"),
    ],
)
def test_other_words_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (141 * 10**9, "141 GB"),
        (16_481_936_998, "16.48 GB"),
        (1_559_965_598_080, "1,559.97 GB"),
        (44_513_280, "44.5 MB"),
        (-5_000_000, "-5 MB"),
        (4_096, "4,096 B"),
        (0, "0 B"),
    ],
)
def test_amounts_are_written(size: int, text: str) -> None:
    assert human(size) == text
