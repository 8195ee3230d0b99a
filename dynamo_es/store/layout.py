"""Keys that every backend uses for positions and identity. Big-endian, so that byte order is numeric order."""

from __future__ import annotations

import struct

from dynamo_es.log.base import TopicPartition

FORMAT_VERSION = 1
POSITIONS_FAMILY = "positions"
META_FAMILY = "meta"
FORMAT_KEY = b"format"
_SEPARATOR = b"\x00"
_PARTITION = struct.Struct(">I")
_OFFSET = struct.Struct(">Q")


def owner_prefix(owner: str) -> bytes:
    """Prefix of all keys of one owner in the positions and meta families."""
    return owner.encode() + _SEPARATOR


def position_key(owner: str, position: TopicPartition) -> bytes:
    """Key of one position."""
    return owner_prefix(owner) + position.topic.encode() + _SEPARATOR + _PARTITION.pack(position.partition)


def parse_position(owner: str, key: bytes, value: bytes) -> tuple[TopicPartition, int]:
    """The position that a row of the positions family holds."""
    rest = key[len(owner_prefix(owner)) :]
    topic, number = rest[: -_PARTITION.size - 1], rest[-_PARTITION.size :]
    return TopicPartition(topic.decode(), _PARTITION.unpack(number)[0]), _OFFSET.unpack(value)[0]


def pack_offset(offset: int) -> bytes:
    """Value of a row of the positions family."""
    return _OFFSET.pack(offset)


def prefix_end(prefix: bytes) -> bytes:
    """Smallest key above every key that starts with ``prefix``."""
    trimmed = prefix.rstrip(b"\xff")
    if not trimmed:
        return b"\xff" * 64
    return trimmed[:-1] + bytes((trimmed[-1] + 1,))
