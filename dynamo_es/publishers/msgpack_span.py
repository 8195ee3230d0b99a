"""Where the first msgpack object of a buffer ends. msgspec refuses trailing bytes, some engines send them. Pure."""

from __future__ import annotations

# For each first byte: width of a length field, bytes beside that length, and objects for each unit of it (0: bytes).
_FIXED_BYTES = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
    0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_LENGTH_WIDTH = {
    0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4,
    0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4,
}  # fmt: skip
_EXT = frozenset({0xC7, 0xC8, 0xC9})
_CHILDREN_PER_UNIT = {0xDC: 1, 0xDD: 1, 0xDE: 2, 0xDF: 2}


def first_object(data: bytes) -> bytes | None:
    """The bytes of the first object; None if there is no whole one. Does not check what is inside of it."""
    position, wanted = 0, 1
    while wanted:
        if position >= len(data):
            return None
        first = data[position]
        position += 1
        wanted -= 1
        if 0x80 <= first < 0xC0:
            skip, children = _small(first)
        elif first in _LENGTH_WIDTH:
            width = _LENGTH_WIDTH[first]
            length = int.from_bytes(data[position : position + width], "big")
            children = _CHILDREN_PER_UNIT.get(first, 0) * length
            skip = width + (first in _EXT) + (0 if first in _CHILDREN_PER_UNIT else length)
        else:
            skip, children = _FIXED_BYTES.get(first, 0), 0
        position += skip
        wanted += children
    return data[:position] if position <= len(data) else None


def _small(first: int) -> tuple[int, int]:
    """Bytes and children of a map, array or string whose length is in the first byte."""
    if first < 0x90:
        return 0, 2 * (first & 0x0F)
    if first < 0xA0:
        return 0, first & 0x0F
    return first & 0x1F, 0
