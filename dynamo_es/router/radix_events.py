"""The JSON events of ``RadixTree.apply_event`` (spec: router-core B.1).

```
{"event_id": u64,
 "data": "cleared" | {"cleared": null} | {"removed": {"block_hashes": [u64, ...]}} |
         {"stored": {"parent_hash": u64 | null, "start_position": u32 | null,
                     "blocks": [{"block_hash": u64, "tokens_hash": u64, "mm_extra_info": {...} | null}, ...]}},
 "dp_rank": u32}
```
``parent_hash``, ``start_position``, ``mm_extra_info`` and ``dp_rank`` may be absent; other members are ignored.

Two readers: a plain event, which is nearly every one, goes through msgspec. What msgspec refuses, or what it would
take although Dynamo does not, is read by the strict reader, which decides and words the refusal.
"""

from __future__ import annotations

from array import array
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from dynamo_es.router.json_scanner import JsonRefusal
from dynamo_es.router.strict_json import JsonCursor, Member, Shape, UnplacedRefusal, read_document

_QUOTE = ord('"')
_U32_LIMIT = 2**32
_U64_LIMIT = 2**64
_REFUSED = "Failed to deserialize KvCacheEvent: "


class StoredBlocks(NamedTuple):
    """Blocks that follow each other below ``parent``; as many block hashes as tokens hashes (packed, typecode Q)."""

    parent: int | None
    block_hashes: list[int]
    tokens_hashes: array[int]


class RemovedBlocks(NamedTuple):
    """Blocks that are gone, in the order of the event."""

    block_hashes: list[int]


class ClearedBlocks(NamedTuple):
    """All blocks are gone."""


class RadixEvent(NamedTuple):
    """What one data-parallel rank of a worker reports."""

    dp_rank: int
    data: StoredBlocks | RemovedBlocks | ClearedBlocks


def parse_event(data: bytes) -> RadixEvent:
    """The event in ``data``.

    Raises:
        ValueError: It is none, in Dynamo's words: ``Failed to deserialize KvCacheEvent: … at line L column C``.
    """
    event = _read_plain(data)
    if event is not None:
        return event
    try:
        return _to_event(*read_document(data, _read_event))
    except JsonRefusal as error:
        raise ValueError(f"{_REFUSED}{error}") from error


class _PlainBlock(Struct, forbid_unknown_fields=True, gc=False):
    block_hash: int
    tokens_hash: int
    mm_extra_info: UnsetType | None = UNSET


class _PlainStored(Struct, forbid_unknown_fields=True):
    blocks: list[_PlainBlock]
    parent_hash: UnsetType | int | None = UNSET
    start_position: UnsetType | int | None = UNSET


class _PlainRemoved(Struct, forbid_unknown_fields=True):
    block_hashes: list[int]


class _PlainData(Struct, forbid_unknown_fields=True):
    stored: _PlainStored | UnsetType = UNSET
    removed: _PlainRemoved | UnsetType = UNSET


class _PlainEvent(Struct, forbid_unknown_fields=True):
    event_id: int
    data: Literal["cleared"] | _PlainData
    dp_rank: int | UnsetType = UNSET


_PLAIN = msgspec.json.Decoder(_PlainEvent)


def _read_plain(data: bytes) -> RadixEvent | None:
    """The event, if it is certain that the strict reader would read the same; else None."""
    if b"-" in data:
        return None  # -0 is a float
    try:
        document = _PLAIN.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    read = _convert_plain(document)
    if read is None:
        return None
    event, members = read
    # Each member has one name, and there are no other strings: a name that is there twice shows in the quotes.
    names = 2 + (document.dp_rank is not UNSET)
    quotes = np.count_nonzero(np.frombuffer(data, np.uint8) == _QUOTE)
    if quotes == 2 * (names + members):
        return event
    # Blocks may have the member ``mm_extra_info``, which counts only if it is looked for.
    return event if quotes == 2 * (names + members + _count_infos(document)) else None


def _convert_plain(document: _PlainEvent) -> tuple[RadixEvent, int] | None:
    """The event, and how many strings its ``data`` has but for ``mm_extra_info``; None if a number is out of range."""
    dp_rank = 0 if document.dp_rank is UNSET else document.dp_rank
    if document.event_id >= _U64_LIMIT or dp_rank >= _U32_LIMIT:
        return None
    data = document.data
    if isinstance(data, str):
        return RadixEvent(dp_rank, ClearedBlocks()), 1
    if data.stored is not UNSET and data.removed is UNSET:
        read = _convert_plain_stored(data.stored)
        return None if read is None else (RadixEvent(dp_rank, read[0]), read[1])
    if data.removed is not UNSET and data.stored is UNSET:
        hashes = data.removed.block_hashes
        return None if max(hashes, default=0) >= _U64_LIMIT else (RadixEvent(dp_rank, RemovedBlocks(hashes)), 2)
    return None


def _count_infos(document: _PlainEvent) -> int:
    data = document.data
    if isinstance(data, str) or data.stored is UNSET:
        return 0
    return sum(block.mm_extra_info is None for block in data.stored.blocks)


def _convert_plain_stored(stored: _PlainStored) -> tuple[StoredBlocks, int] | None:
    block_hashes = [block.block_hash for block in stored.blocks]
    try:
        tokens_hashes = array("Q", [block.tokens_hash for block in stored.blocks])
    except OverflowError:
        return None
    parent = None if stored.parent_hash is UNSET else stored.parent_hash
    position = None if stored.start_position is UNSET else stored.start_position
    largest = max(max(block_hashes, default=0), parent or 0)
    if largest >= _U64_LIMIT or (position or 0) >= _U32_LIMIT:
        return None
    members = 2 + (stored.parent_hash is not UNSET) + (stored.start_position is not UNSET)
    members += 2 * len(stored.blocks)
    return StoredBlocks(parent, block_hashes, tokens_hashes), members


def _read_u64(cursor: JsonCursor) -> int:
    return cursor.read_integer("u64", _U64_LIMIT)


def _read_u32(cursor: JsonCursor) -> int:
    return cursor.read_integer("u32", _U32_LIMIT)


def _read_offsets(cursor: JsonCursor) -> list[Any]:
    return cursor.read_list(lambda pair: pair.read_tuple(lambda end: end.read_integer("usize", _U64_LIMIT), 2))


_MM_OBJECT = Shape("BlockMmObjectInfo", Member("mm_hash", _read_u64), Member("offsets", _read_offsets))
_EXTRA_INFO = Shape(
    "BlockExtraInfo", Member("mm_objects", lambda cursor: cursor.read_list(lambda item: item.read_struct(_MM_OBJECT)))
)
_BLOCK = Shape(
    "KvCacheStoredBlockData",
    Member("block_hash", _read_u64),
    Member("tokens_hash", _read_u64),
    Member(
        "mm_extra_info",
        lambda cursor: cursor.read_optional(lambda info: info.read_struct(_EXTRA_INFO)),
        default=None,
        list_default=None,
    ),
)
_STORED = Shape(
    "KvCacheStoreData",
    Member("parent_hash", lambda cursor: cursor.read_optional(_read_u64), default=None),
    Member("start_position", lambda cursor: cursor.read_optional(_read_u32), default=None, list_default=None),
    Member("blocks", lambda cursor: cursor.read_list(lambda block: block.read_struct(_BLOCK))),
)
_REMOVED = Shape("KvCacheRemoveData", Member("block_hashes", lambda cursor: cursor.read_list(_read_u64)))
_TAGS = ("stored", "removed", "cleared")


def _read_data(cursor: JsonCursor) -> StoredBlocks | RemovedBlocks | ClearedBlocks:
    return cursor.read_tagged(_TAGS, _read_variant)  # type: ignore[no-any-return]


def _read_variant(cursor: JsonCursor, tag: str, alone: bool) -> StoredBlocks | RemovedBlocks | ClearedBlocks:
    if tag == "cleared":
        if not alone:
            cursor.read_null("unit")
        return ClearedBlocks()
    if alone:
        raise UnplacedRefusal("invalid type: unit variant, expected newtype variant")
    if tag == "removed":
        return RemovedBlocks(*cursor.read_struct(_REMOVED))
    parent, _position, blocks = cursor.read_struct(_STORED)
    return StoredBlocks(parent, [block[0] for block in blocks], array("Q", [block[1] for block in blocks]))


_EVENT = Shape(
    "KvCacheEvent",
    Member("event_id", _read_u64),
    Member("data", _read_data),
    Member("dp_rank", _read_u32, default=0, list_default=0),
)


def _read_event(cursor: JsonCursor) -> list[Any]:
    return cursor.read_struct(_EVENT)


def _to_event(_event_id: int, data: StoredBlocks | RemovedBlocks | ClearedBlocks, dp_rank: int) -> RadixEvent:
    return RadixEvent(dp_rank, data)
