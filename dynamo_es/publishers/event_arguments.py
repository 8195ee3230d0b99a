"""Argument checking of ``KvEventPublisher``: Dynamo's exception types and texts (spec/services c.4). Pure."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.publishers.engine_events import EngineEvent, EngineHash, MmHashes, Removed, Stored
from dynamo_es.router.hashing import to_unsigned
from dynamo_es.router.hashing_arguments import check_arguments
from dynamo_es.value_kinds import scalar_kind

_U32_LIMIT = 2**32
_I64_LIMIT = 2**63
_U64_LIMIT = 2**64
_STORED_REQUIRED = ("token_ids", "num_block_tokens", "block_hashes")
_STORED_FIELDS = (*_STORED_REQUIRED, "parent_hash", "block_mm_infos", "lora_name", "is_eagle", "cache_salt")
_REMOVED_FIELDS = ("block_hashes",)
_OUT_OF_RANGE = "out of range integral type conversion attempted"


def read_block_size(value: Any) -> int:
    """Raises OverflowError, TypeError, or Exception for 0 (exactly this class, as in Dynamo)."""
    block_size = read_u64("kv_block_size", value)
    if block_size == 0:
        raise Exception("kv_block_size cannot be 0")
    if block_size >= _U32_LIMIT:
        raise OverflowError(_OUT_OF_RANGE)
    return block_size


def read_u64(argument: str, value: Any) -> int:
    """Raises TypeError, OverflowError."""
    number = _read_index(argument, value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _U64_LIMIT:
        raise OverflowError("int too big to convert")
    return number


def read_u32(argument: str, value: Any) -> int:
    """Raises TypeError, OverflowError."""
    number = _read_index(argument, value)
    if not 0 <= number < _U32_LIMIT:
        raise OverflowError(_OUT_OF_RANGE)
    return number


def read_stored(
    kv_block_size: int,
    token_ids: Any,
    num_block_tokens: Any,
    block_hashes: Any,
    parent_hash: Any = None,
    block_mm_infos: Any = None,
    lora_name: Any = None,
    is_eagle: Any = None,
    cache_salt: Any = None,
) -> Stored:
    """A stored event. Only blocks count before the first whose token count is not ``kv_block_size``; the rest is cut.

    Raises:
        TypeError, OverflowError: An argument, or an item, is of the wrong type or out of range.
        Exception: ``block_mm_infos`` is malformed (exactly this class).
    """
    tokens = _read_tokens(token_ids)
    counts = [_read_index("num_block_tokens", count) for count in _read_sequence("num_block_tokens", num_block_tokens)]
    hashes = read_hashes(block_hashes)
    parent = None if parent_hash is None else _read_hash("parent_hash", parent_hash)
    _check_optional("lora_name", lora_name, str, "PyString")
    _check_optional("is_eagle", is_eagle, bool, "PyBool")
    _check_optional("cache_salt", cache_salt, str, "PyString")
    mm_hashes: MmHashes = ()
    if block_mm_infos is not None:
        mm_hashes = tuple(map(tuple, check_arguments((), 1, block_mm_infos, None, None, None)[2]))
    usable = 0
    for count, _ in zip(counts, hashes, strict=False):
        if count != kv_block_size:
            break
        usable += 1
    return Stored(
        tier="device",
        block_hashes=hashes[:usable],
        parent=parent,
        tokens=tokens,
        block_size=kv_block_size,
        lora_name=lora_name or None,
        cache_salt=cache_salt or None,
        mm_hashes=mm_hashes,
        is_eagle=bool(is_eagle),
    )


def read_hashes(block_hashes: Any) -> list[EngineHash]:
    """The engine's names of blocks: i64 (or bytes, beyond Dynamo). Raises TypeError, OverflowError."""
    return [_read_hash("block_hashes", value) for value in _read_sequence("block_hashes", block_hashes)]


def read_batch(kv_block_size: int, events: Any) -> list[EngineEvent]:
    """All events of a ``publish_batch`` call, or none.

    Raises:
        ValueError: ``invalid KV event batch: ...``.
    """
    try:
        if isinstance(events, Mapping) or not isinstance(events, Sequence) or isinstance(events, (str, bytes)):
            raise ValueError(f"unexpected type: '{_type_name(events)}' object cannot be converted to 'Sequence'")
        return [_read_event(kv_block_size, event) for event in events]
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"invalid KV event batch: {error}") from error


def _read_event(kv_block_size: int, event: Any) -> EngineEvent:
    if not isinstance(event, Mapping):
        raise ValueError(f"invalid type: {_serde_name(event)}, expected internally tagged enum KvEventInput")
    if "type" not in event:
        raise ValueError("missing field `type`")
    kind = event["type"]
    if kind not in ("stored", "removed"):
        raise ValueError(f"unknown variant `{kind}`, expected `stored` or `removed`")
    accepted, required = (_STORED_FIELDS, _STORED_REQUIRED) if kind == "stored" else (_REMOVED_FIELDS, _REMOVED_FIELDS)
    fields = {name: value for name, value in event.items() if name != "type"}
    for name in fields:
        if name not in accepted:
            one_of = "one of " if len(accepted) > 1 else ""
            raise ValueError(f"unknown field `{name}`, expected {one_of}{', '.join(f'`{item}`' for item in accepted)}")
    for name in required:
        if name not in fields:
            raise ValueError(f"missing field `{name}`")
    for name in required:
        if isinstance(fields[name], (str, int, float)) or fields[name] is None:
            raise ValueError(f"invalid type: {_serde_name(fields[name])}, expected a sequence")
    if kind == "removed":
        return Removed("device", read_hashes(fields["block_hashes"]))
    try:
        return read_stored(kv_block_size, **fields)
    except (ValueError, TypeError, OverflowError):
        raise
    except Exception as error:
        # Exactly this class is what malformed multimodal infos raise, as in Dynamo.
        raise ValueError(str(error)) from error


def _read_tokens(token_ids: Any) -> array[int]:
    values = _read_sequence("token_ids", token_ids)
    try:
        return array("I", list(values) if isinstance(values, (bytes, bytearray)) else values)
    except OverflowError as error:
        raise OverflowError(_OUT_OF_RANGE) from error
    except TypeError as error:
        raise TypeError(f"argument 'token_ids': {error}") from error


def _read_sequence(argument: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str):
        raise TypeError(f"argument '{argument}': Can't extract `str` to `Vec`")
    if not isinstance(value, Sequence):
        raise TypeError(f"argument '{argument}': '{_type_name(value)}' object cannot be converted to 'Sequence'")
    return value


def _read_hash(argument: str, value: Any) -> EngineHash:
    if isinstance(value, bytes) and value:
        return value
    number = _read_index(argument, value)
    if not -_I64_LIMIT <= number < _I64_LIMIT:
        raise OverflowError("Python int too large to convert to C long")
    return to_unsigned(number)


def _read_index(argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"argument '{argument}': {error}") from error


def _check_optional(argument: str, value: Any, kind: type, rust_name: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"argument '{argument}': '{_type_name(value)}' object cannot be converted to '{rust_name}'")


def _type_name(value: Any) -> str:
    return type(value).__name__


def _serde_name(value: Any) -> str:
    if value is None:
        return "unit value"
    return scalar_kind(value) or (f'string "{value}"' if isinstance(value, str) else "sequence")
