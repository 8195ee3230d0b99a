"""Decoding of KV-event batches as vLLM and SGLang send them (spec/router-core C.2 to C.6). Pure.

A batch is msgpack ``[timestamp, [event, ...], dp_rank]``. An event is a map with a ``type`` or an array that begins
with its tag. Each event is decoded on its own: what is wrong with one costs that one, and is handed back as
``Rejected``. Departures from Dynamo, on purpose: hashes may be bytes; a batch without the rank (some engines omit it)
is taken as one whose rank is nil; keys of multimodal objects, and every key that is not understood, enter the block's
hash, because a missed hit is cheap and a wrong one is not; an event that has only an adapter's number is refused.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from dynamo_es.publishers.msgpack_span import first_object
from dynamo_es.router.hashing import mm_identifier_hash, to_unsigned
from schemas.kv_events import Tier

EngineHash = int | bytes
MmHashes = tuple[tuple[int, ...], ...]

CACHE_SALT_PREFIX = "dynamo-cache-salt:"
MAX_LEARNT_GROUPS = 1024
_TIER_OF_MEDIUM: dict[str | None, Tier] = {
    None: "device", "": "device", "GPU": "device", "DEVICE": "device",
    "CPU": "host_pinned", "CPU_PINNED": "host_pinned", "CPU_TIER1": "host_pinned",
    "CPU_TIER2": "disk", "DISK": "disk", "NVME": "disk", "STORAGE": "disk",
    "EXTERNAL": "external", "NETWORK": "external", "REMOTE": "external", "SHARED": "external",
}  # fmt: skip
_FULL_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
)  # fmt: skip
_STORED_TRAILING = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "source_kind")
_REMOVED_FIELDS = (
    "block_hashes",
    "medium",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, TypeError, OverflowError)


@dataclass(slots=True)
class Stored:
    """Blocks that form one chain, with what their hashes are made of.

    Attributes:
        block_hashes: The engine's own names of the blocks, in chain order.
        parent: Its name of the block before the first one.
        tokens: Token ids of all blocks, u32; may be short or empty (an offloaded block that was announced before).
        block_size: Tokens a block, as the engine says.
        mm_hashes: For block i the hashes of its multimodal objects; may be shorter than the blocks.
        is_eagle: Windows are one token longer than their stride.
    """

    tier: Tier
    block_hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: array[int]
    block_size: int
    lora_name: str | None = None
    cache_salt: str | None = None
    mm_hashes: MmHashes = ()
    is_eagle: bool = False


@dataclass(slots=True)
class Removed:
    """Blocks that left one tier."""

    tier: Tier
    block_hashes: list[EngineHash]


@dataclass(slots=True)
class Cleared:
    """The rank's cache is empty, in all tiers."""


EngineEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class Rejected:
    """An event (or a whole batch) that could not be used.

    ``reason`` is of a bounded set and fit for a metric label: ``undecodable_batch``, ``undecodable_event``,
    ``unknown_event``, ``bad_field``, ``lora_without_name``, ``missing_rank``, ``too_many_ranks``. ``data`` is the raw
    msgpack; it holds token ids and must not be logged or published.
    """

    reason: str
    detail: str
    data: bytes


@dataclass(slots=True)
class EngineBatch:
    """A decoded batch.

    Attributes:
        dp_rank: As the engine says; None if it does not.
        events: What is left, in order.
        rejected: What was bad.
        filtered: Well-formed events that are none of ours, by reason: ``medium``, ``locality``, ``group``, ``source``,
            ``ignored``.
        lost: The batch itself could not be read, so anything may have been in it.
    """

    dp_rank: int | None = None
    events: list[EngineEvent] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    lost: bool = False


class _BadEvent(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Filtered(Exception):
    pass


class EngineEventDecoder:
    """Decodes the batches of one engine. Keeps only which cache groups hold whole prefixes (C.6), at most 1024."""

    def __init__(self) -> None:
        self._batch = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._kinds: dict[tuple[int | None, int], str] = {}

    def decode(self, payload: bytes) -> EngineBatch:
        """Events of a payload; never raises for bad input."""
        batch = EngineBatch()
        try:
            raw_events = self._decode_envelope(payload, batch)
        except _DECODE_ERRORS as error:
            batch.rejected.append(Rejected("undecodable_batch", _describe(error), payload))
            batch.lost = True
            return batch
        for raw in raw_events:
            try:
                self._decode_event(raw, batch)
            except _Filtered as filtered:
                batch.filtered[str(filtered)] += 1
            except _BadEvent as error:
                batch.rejected.append(Rejected(error.reason, str(error), bytes(raw)))
            except _DECODE_ERRORS as error:
                batch.rejected.append(Rejected("undecodable_event", _describe(error), bytes(raw)))
        return batch

    def _decode_envelope(self, payload: bytes, batch: EngineBatch) -> list[msgspec.Raw]:
        try:
            parts = self._batch.decode(payload)
        except msgspec.DecodeError:
            trimmed = first_object(payload)
            if trimmed is None or len(trimmed) == len(payload):
                raise
            parts = self._batch.decode(trimmed)
        if len(parts) not in (2, 3):
            raise ValueError(f"a batch has 3 elements, this one has {len(parts)}")
        timestamp = msgspec.msgpack.decode(parts[0])
        if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
            raise ValueError(f"timestamp is {type(timestamp).__name__}, not a number")
        rank = msgspec.msgpack.decode(parts[2]) if len(parts) == 3 else None
        if rank is not None:
            if isinstance(rank, bool) or not isinstance(rank, int) or not -(2**31) <= rank < 2**31:
                raise ValueError("data-parallel rank is no 32-bit integer")
            rank &= 0xFFFFFFFF
        batch.dp_rank = rank
        return self._batch.decode(parts[1])

    def _decode_event(self, raw: msgspec.Raw, batch: EngineBatch) -> None:
        event = msgspec.msgpack.decode(raw)
        tag, fields = _open_event(event)
        if tag == "BlockStored":
            batch.events.append(self._read_stored(fields, batch.dp_rank))
        elif tag == "BlockRemoved":
            self._read_removed(fields, batch, raw)
        elif tag == "AllBlocksCleared":
            if fields.get("source_kind_of_array") is not None:
                raise _Filtered("source")
            batch.events.append(Cleared())
        elif tag == "Ignored":
            raise _Filtered("ignored")
        else:
            raise _BadEvent("unknown_event", f"unknown event {str(tag)[:40]!r}")

    def _read_stored(self, fields: dict[str, Any], rank: int | None) -> Stored:
        hashes = [_read_hash(value) for value in _read_list(fields, "block_hashes")]
        parent = fields.get("parent_block_hash")
        tokens, is_eagle = _read_tokens(_read_list(fields, "token_ids"))
        block_size = fields.get("block_size")
        if isinstance(block_size, bool) or not isinstance(block_size, int):
            raise _BadEvent("bad_field", f"block_size is {type(block_size).__name__}, not int")
        lora_name = _read_text(fields, "lora_name")
        lora_id = fields.get("lora_id")
        keys = _read_extra_keys(fields.get("extra_keys"))
        stored = Stored(
            tier="device",
            block_hashes=hashes,
            parent=None if parent is None else _read_hash(parent),
            tokens=tokens,
            block_size=block_size,
            lora_name=lora_name,
            cache_salt=_read_text(fields, "cache_salt") or _find_salt(keys, lora_name),
            mm_hashes=_read_mm_infos(fields.get("block_mm_infos")) or _hash_extra_keys(keys, lora_name, lora_id),
            is_eagle=is_eagle,
        )
        self._check_group(fields, rank, learn=True)
        stored.tier = _read_tier(fields)
        if lora_id and lora_name is None:
            raise _BadEvent("lora_without_name", f"lora_id {lora_id!r} without lora_name: its adapter is unknown")
        return stored

    def _read_removed(self, fields: dict[str, Any], batch: EngineBatch, raw: msgspec.Raw) -> None:
        good: list[EngineHash] = []
        bad: _BadEvent | None = None
        for value in _read_list(fields, "block_hashes"):
            try:
                good.append(_read_hash(value))
            except _BadEvent as error:
                bad = error
        self._check_group(fields, batch.dp_rank, learn=False)
        tier = _read_tier(fields)
        # The good ones did leave the cache; to drop them too would leave blocks in the index that nobody removes.
        batch.events.append(Removed(tier, good))
        if bad is not None:
            batch.rejected.append(Rejected(bad.reason, str(bad), bytes(raw)))

    def _check_group(self, fields: dict[str, Any], rank: int | None, *, learn: bool) -> None:
        """Let only groups pass whose blocks stand for the whole prefix (C.6)."""
        if fields.get("source_kind_of_array") is not None:
            raise _Filtered("source")
        group, kind = fields.get("group_idx"), fields.get("kv_cache_spec_kind")
        if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
            raise _BadEvent("bad_field", f"group_idx is {type(group).__name__}, not int")
        if kind is None:
            if not group:
                return
            kind = self._kinds.get((rank, group))
        elif learn and group is not None and len(self._kinds) < MAX_LEARNT_GROUPS:
            self._kinds[rank, group] = str(kind)
        if kind not in _FULL_PREFIX_KINDS:
            raise _Filtered("group")


def _open_event(event: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(event, dict):
        if "type" not in event:
            raise _BadEvent("bad_field", "event without type")
        return event["type"], event
    if not isinstance(event, list) or not event:
        raise _BadEvent("bad_field", f"event is {type(event).__name__}, not a map or a non-empty array")
    tag = event[0]
    if tag == "BlockStored":
        fields = dict(zip(_STORED_FIELDS, event[1:9], strict=False))
        _read_trailing(fields, event[9:])
    elif tag == "BlockRemoved":
        fields = dict(zip(_REMOVED_FIELDS, event[1:], strict=False))
    else:
        fields = {"source_kind_of_array": event[1]} if len(event) > 1 else {}
    return tag, fields


def _read_trailing(fields: dict[str, Any], trailing: Sequence[Any]) -> None:
    """Fewer than four trailing fields are told apart by their types, four and more have fixed places (C.3)."""
    if len(trailing) >= 4:
        fields.update(zip(_STORED_TRAILING[:4], trailing, strict=False))
        if len(trailing) > 4:
            fields["source_kind_of_array"] = trailing[4]
        return
    for value in trailing:
        if isinstance(value, str):
            fields["kv_cache_spec_kind"] = value
        elif isinstance(value, list):
            fields["block_mm_infos"] = value
        elif isinstance(value, int) and "group_idx" not in fields:
            fields["group_idx"] = value


def _read_hash(value: Any) -> EngineHash:
    if isinstance(value, bytes) and value:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return to_unsigned(value)
    raise _BadEvent("bad_field", f"block hash is {type(value).__name__}, not int or bytes")


def _read_list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise _BadEvent("bad_field", f"{name} is missing" if value is None else f"{name} is no list")
    return value


def _read_text(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _BadEvent("bad_field", f"{name} is {type(value).__name__}, not str")
    return value or None


def _read_tokens(values: list[Any]) -> tuple[array[int], bool]:
    """Tokens, and whether they came as bigrams ``(t0, t1), (t1, t2), ...`` (EAGLE)."""
    try:
        if values and isinstance(values[0], list):
            firsts = array("I", [first for first, _ in values])
            firsts.append(values[-1][1])
            return firsts, True
        return array("I", values), False
    except (TypeError, ValueError, OverflowError) as error:
        raise _BadEvent("bad_field", "token_ids holds something that is no u32") from error


def _read_tier(fields: dict[str, Any]) -> Tier:
    locality, medium = fields.get("locality"), fields.get("medium")
    if locality is not None and locality != "LOCAL":
        raise _Filtered("locality")
    if medium is not None and not isinstance(medium, str):
        raise _BadEvent("bad_field", f"medium is {type(medium).__name__}, not str")
    tier = _TIER_OF_MEDIUM.get(medium)
    if tier is None:
        raise _Filtered("medium")
    return tier


def _read_extra_keys(value: Any) -> list[list[Any] | None]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _BadEvent("bad_field", f"extra_keys is {type(value).__name__}, not a list")
    for keys in value:
        if keys is not None and (not isinstance(keys, list) or None in keys):
            raise _BadEvent("bad_field", "extra_keys of a block is neither nil nor a list of keys")
    return value


def _find_salt(keys: list[list[Any] | None], lora_name: str | None) -> str | None:
    """The salt that the first block's keys carry (C.5)."""
    if not keys or not keys[0]:
        return None
    texts = [key for key in keys[0] if isinstance(key, str)]
    if texts and texts[0] == lora_name:
        texts = texts[1:]
    for text in texts:
        if text.startswith(CACHE_SALT_PREFIX):
            return text[len(CACHE_SALT_PREFIX) :] or None
    return None


def _hash_extra_keys(keys: list[list[Any] | None], lora_name: str | None, lora_id: Any) -> MmHashes:
    if not any(keys):
        return ()
    return tuple(_hash_keys(block, lora_name, lora_id) if block else () for block in keys)


def _hash_keys(keys: list[Any], lora_name: str | None, lora_id: Any) -> tuple[int, ...]:
    hashes = []
    for key in keys:
        # A multimodal key is an identifier, or an identifier with the object's offset in the block.
        name = key[0] if isinstance(key, list) and key and isinstance(key[0], str) else key
        if isinstance(name, str):
            if name == lora_name or name.startswith(CACHE_SALT_PREFIX):
                continue
            value = mm_identifier_hash(name)
        elif isinstance(name, bytes):
            value = xxh3_64_intdigest(name, 0)
        elif lora_name is not None and name == lora_id and not isinstance(name, bool):
            continue
        else:
            value = xxh3_64_intdigest(f"{type(name).__name__}:{name!r}".encode(), 0)
        if value is not None:
            hashes.append(value)
    return tuple(hashes)


def _read_mm_infos(value: Any) -> MmHashes:
    if value is None:
        return ()
    try:
        return tuple(
            () if info is None else tuple(_read_mm_hash(item["mm_hash"]) for item in info["mm_objects"])
            for info in value
        )
    except (KeyError, TypeError) as error:
        raise _BadEvent("bad_field", "block_mm_infos is malformed") from error


def _read_mm_hash(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise _BadEvent("bad_field", "mm_hash is no u64")
    return value


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
