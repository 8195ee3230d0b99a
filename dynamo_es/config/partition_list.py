"""Partitions as people type them: ``0-3,6``. Pure: no I/O."""

from __future__ import annotations

import re

_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_partitions(text: str, count: int) -> frozenset[int]:
    """The partitions of a list of numbers and ranges, of a topic that has ``count``.

    Raises:
        ValueError: Says what is expected.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError("expected partitions and ranges of them: 0-3,6")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"{part.strip()}: the range ends before it begins")
        if last >= count:
            raise ValueError(f"{part.strip()}: there are partitions 0 to {count - 1}")
        found.update(range(first, last + 1))
    return frozenset(found)
