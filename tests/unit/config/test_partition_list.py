from __future__ import annotations

import pytest

from dynamo_es.config.partition_list import parse_partitions


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", {0}), ("0-3,6", {0, 1, 2, 3, 6}), (" 7 , 1-1 ", {1, 7}), ("2,2,1-3", {1, 2, 3}), ("0-7", set(range(8)))],
)
def test_numbers_and_ranges(text, found):
    assert parse_partitions(text, 8) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0-3,6"),
        ("a", "0-3,6"),
        ("1,", "0-3,6"),
        ("-1", "0-3,6"),
        ("1-2-3", "0-3,6"),
        ("٣", "0-3,6"),
        ("8", "there are partitions 0 to 7"),
        ("0-99999", "there are partitions 0 to 7"),
        ("3-1", "ends before it begins"),
    ],
)
def test_what_is_no_list_says_what_is_expected(text, why):
    with pytest.raises(ValueError, match=why):
        parse_partitions(text, 8)
