"""Where stores are in a state folder, and keys that every backend uses for positions and identity.

Keys are big-endian, so that byte order is numeric order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from dynamo_es.log.base import TopicPartition

FORMAT_VERSION = 1
POSITIONS_FAMILY = "positions"
META_FAMILY = "meta"
FORMAT_KEY = b"format"
# The own store of a process that has a store for each partition beside it.
PROCESS_FOLDER = "process"
_SEPARATOR = b"\x00"
_PARTITION = struct.Struct(">I")
_OFFSET = struct.Struct(">Q")


def process_folder(state_dir: Path, index: int) -> Path:
    """Folder of the store of one of several processes that were started as one."""
    return state_dir / f"{PROCESS_FOLDER}-{index}"


def process_folders(state_dir: Path) -> Mapping[int, Path]:
    """Folders of all such stores that are there, by process."""
    return _numbered(state_dir, PROCESS_FOLDER)


def partition_folder(state_dir: Path, topic: str, partition: int) -> Path:
    """Folder of the store of one partition (``topic`` with its namespace)."""
    return state_dir / f"{topic}-{partition}"


def partition_folders(state_dir: Path, topic: str) -> Mapping[int, Path]:
    """Folders of all stores of partitions of ``topic`` that are there, by partition."""
    return _numbered(state_dir, topic)


def _numbered(state_dir: Path, name: str) -> Mapping[int, Path]:
    found = {
        int(number): folder
        for folder in state_dir.glob(f"{name}-*")
        if (number := folder.name.removeprefix(f"{name}-")).isdecimal()
    }
    return dict(sorted(found.items()))


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
