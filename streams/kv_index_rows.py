"""Rows of the KV index in a state store.

Family ``kv-sources`` has one row a source; family ``kv-blocks`` has, under a source's row id, numbered chunks: each is
a run of segments (operation, tier, count, packed hashes), and the chunks in order give the source's blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from dynamo_es.store.base import StateRows
from schemas.kv_events import TIERS
from streams.block_table import MAX_COLUMN, BlockTable

SOURCES_FAMILY = "kv-sources"
BLOCKS_FAMILY = "kv-blocks"
STORED = 1
REMOVED = 0
_ROW_ID = struct.Struct(">I")
_CHUNK_KEY = struct.Struct(">IQ")
_SEGMENT = struct.Struct("<BBI")


class SourceRow(msgspec.Struct, array_like=True):
    """A source as it is stored; see ``Source``."""

    model: str
    worker_id: int
    dp_rank: int
    incarnation: int
    block_size: int
    next_seq: int
    exact: bool
    retired: bool
    fenced: list[int]


def source_key(row_id: int) -> bytes:
    """Key of a source's row; also the prefix of the keys of its chunks."""
    return _ROW_ID.pack(row_id)


def chunk_key(row_id: int, chunk: int) -> bytes:
    """Key of a source's chunk."""
    return _CHUNK_KEY.pack(row_id, chunk)


def chunk_number(key: bytes) -> int:
    """The chunk's number in its key."""
    number: int = _CHUNK_KEY.unpack(key)[1]
    return number


def scan_sources(rows: StateRows) -> Iterator[tuple[int, SourceRow]]:
    """Row ids and rows of all sources."""
    decoder = msgspec.msgpack.Decoder(SourceRow)
    for key, data in rows.scan(SOURCES_FAMILY):
        yield _ROW_ID.unpack(key)[0], decoder.decode(data)


def segment_head(operation: int, tier: int, column: bytes) -> bytes:
    """What goes before a column in a stored chunk: operation, tier, count."""
    return _SEGMENT.pack(operation, tier, len(column) // 8)


def unpack_segments(chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The pieces of a stored chunk: operation, tier, packed column."""
    offset = 0
    while offset < len(chunk):
        operation, tier, count = _SEGMENT.unpack_from(chunk, offset)
        offset += _SEGMENT.size
        yield operation, tier, chunk[offset : offset + 8 * count]
        offset += 8 * count


def merge_chunks(rows: StateRows, row_id: int, last: int | None = None) -> list[bytes]:
    """The blocks that a source's chunks (up to number ``last``) come to: a packed column for each tier, no order."""
    tables = [BlockTable() for _ in TIERS]
    waiting: list[list[tuple[bool, bytes]]] = [[] for _ in TIERS]
    sizes = [0] * len(TIERS)
    for key, chunk in rows.scan(BLOCKS_FAMILY, source_key(row_id)):
        if last is not None and chunk_number(key) > last:
            break
        for operation, tier, column in unpack_segments(chunk):
            waiting[tier].append((operation == STORED, column))
            sizes[tier] += len(column)
            if sizes[tier] >= 8 * MAX_COLUMN:
                _apply(tables[tier], waiting[tier])
                waiting[tier], sizes[tier] = [], 0
    for table, segments in zip(tables, waiting, strict=True):
        _apply(table, segments)
    return [table.blocks_of(0).astype("<u8", copy=False).tobytes() for table in tables]


def _apply(table: BlockTable, segments: Sequence[tuple[bool, bytes]]) -> None:
    keys = np.frombuffer(b"".join(column for _, column in segments), "<u8").astype(np.uint64, copy=False)
    stores = np.repeat(np.array([stored for stored, _ in segments], bool), [len(column) // 8 for _, column in segments])
    slots = np.zeros(len(keys), np.int64)
    for start in range(0, len(keys), MAX_COLUMN):
        part = slice(start, start + MAX_COLUMN)
        table.apply(keys[part], slots[part], stores[part])
