"""Reading the dicts that the selection service is asked with: same order, same texts as Dynamo. Pure.

Dynamo deserializes them in Rust, in two ways. A member of the request itself is converted from Python directly
(``read_…``). The members of a prompt are collected first and converted afterwards (``take_…``), which words refusals
differently. All refusals are ValueError; scripts and tests match on their texts, so they are part of the contract.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")
_U32_LIMIT = 2**32
_I64_LIMIT = 2**63
_U64_LIMIT = 2**64
_U128_LIMIT = 2**128
Reader = Callable[[Any], T]
_DESCRIPTIONS: tuple[tuple[Any, str], ...] = (
    (NoneType, "unit value"),
    (bool, "boolean `{}`"),
    (int, "integer `{}`"),
    (float, "floating point `{}`"),
    (str, 'string "{}"'),
    (bytes | bytearray, "byte array"),
    (Mapping, "map"),
)


def read_mapping(value: Any) -> Mapping[Any, Any]:
    """A dict."""
    if not isinstance(value, Mapping):
        raise _unexpected(value, "Mapping")
    return value


def read_text(value: Any) -> str:
    """A str."""
    if not isinstance(value, str):
        raise _unexpected(value, "PyString")
    return value


def read_real(value: Any) -> float:
    """A float, or what converts to one."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"TypeError: must be real number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"OverflowError: {error}") from error


def read_u64(value: Any) -> int:
    """An integer of 0 to 2^64 - 1."""
    number = _to_integer(value)
    if number < 0:
        raise ValueError("OverflowError: can't convert negative int to unsigned")
    if number >= _U64_LIMIT:
        raise ValueError("OverflowError: int too big to convert")
    return number


def read_u32(value: Any) -> int:
    """An integer of 0 to 2^32 - 1."""
    number = _to_integer(value)
    if not -_I64_LIMIT <= number < _I64_LIMIT:
        raise ValueError("OverflowError: Python int too large to convert to C long")
    if not 0 <= number < _U32_LIMIT:
        raise ValueError("OverflowError: out of range integral type conversion attempted")
    return number


def read_boolean(value: Any) -> bool:
    """Whether the value is true in Python's sense."""
    return bool(value)


def read_list(reader: Reader[T]) -> Reader[list[T]]:
    """A sequence; a str is one of its characters."""

    def read(value: Any) -> list[T]:
        if not isinstance(value, Sequence):
            raise _unexpected(value, "Sequence")
        return [reader(item) for item in value]

    return read


def read_map(key: Reader[str] | Reader[int], reader: Reader[T]) -> Reader[dict[Any, T]]:
    """A dict with keys and values of these kinds."""

    def read(value: Any) -> dict[Any, T]:
        return {key(name): reader(item) for name, item in read_mapping(value).items()}

    return read


def member(request: Mapping[Any, Any], name: str, reader: Reader[T]) -> T:
    """A member that must be there."""
    if name not in request:
        raise ValueError(f"missing field `{name}`")
    return reader(request[name])


def optional_member(request: Mapping[Any, Any], name: str, reader: Reader[T]) -> T | None:
    """A member that may be missing or None."""
    value = request.get(name)
    return None if value is None else reader(value)


def member_or(request: Mapping[Any, Any], name: str, reader: Reader[T], default: T) -> T:
    """A member that may be missing, but not None."""
    return reader(request[name]) if name in request else default


def take_text(value: Any) -> str:
    """A str."""
    if isinstance(value, str):
        return value
    raise _invalid_type(value, "a string")


def take_boolean(value: Any) -> bool:
    """A bool."""
    if isinstance(value, bool):
        return value
    raise _invalid_type(value, "a boolean")


def take_size(value: Any) -> int:
    """An integer of 0 to 2^64 - 1."""
    return _take_integer(value, 0, _U64_LIMIT, "usize")


def take_list(reader: Reader[T]) -> Reader[list[T]]:
    """A list, tuple or range."""

    def take(value: Any) -> list[T]:
        return [reader(item) for item in _take_sequence(value)]

    return take


def take_tokens(value: Any) -> Sequence[int]:
    """Token ids, each a u32."""
    items = _take_sequence(value)
    try:
        return array("I", items)
    except (TypeError, OverflowError):
        return [_take_integer(item, 0, _U32_LIMIT, "u32") for item in items]


def take_signed_hashes(value: Any) -> list[int]:
    """Hashes as i64; returned as u64 with the same bits."""
    return [_take_integer(item, -_I64_LIMIT, _I64_LIMIT, "i64") % _U64_LIMIT for item in _take_sequence(value)]


def take_mm_infos(value: Any) -> list[list[int]]:
    """For block i the hashes of its multimodal objects (u64); offsets are checked and otherwise ignored."""
    return [[] if item is None else _take_block_info(item) for item in _take_sequence(value)]


def _take_block_info(value: Any) -> list[int]:
    if not isinstance(value, Mapping):
        raise _invalid_type(value, "struct BlockExtraInfo")
    return [_take_mm_object(item) for item in _take_sequence(member(value, "mm_objects", lambda found: found))]


def _take_mm_object(value: Any) -> int:
    if not isinstance(value, Mapping):
        raise _invalid_type(value, "struct BlockMmObjectInfo")
    mm_hash = member(value, "mm_hash", lambda found: _take_integer(found, 0, _U64_LIMIT, "u64"))
    for pair in _take_sequence(member(value, "offsets", lambda found: found)):
        ends = _take_sequence(pair)
        if len(ends) != 2:
            raise ValueError(f"invalid length {len(ends)}, expected a tuple of size 2")
        for end in ends:
            take_size(end)
    return mm_hash


def take_struct(value: Any, name: str) -> Mapping[Any, Any]:
    """A dict that stands for a struct of this name."""
    if not isinstance(value, Mapping):
        raise _invalid_type(value, f"struct {name}")
    return value


def _take_sequence(value: Any) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    raise _invalid_type(value, "a sequence")


def _take_integer(value: Any, low: int, end: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid_type(value, expected)
    if low <= value < end:
        return value
    if not -_I64_LIMIT <= value < _U64_LIMIT:
        if -_U128_LIMIT < value < _U128_LIMIT:
            width = "i128" if value < 0 else "u128"
            raise ValueError(f"invalid type: integer `{value}` as {width}, expected any value")
        raise ValueError("OverflowError: Python int too large to convert to C long")
    raise ValueError(f"invalid value: integer `{value}`, expected {expected}")


def _to_integer(value: Any) -> int:
    if isinstance(value, int):
        return int(value)
    raise ValueError(f"TypeError: '{type(value).__name__}' object cannot be interpreted as an integer")


def _unexpected(value: Any, wanted: str) -> ValueError:
    return ValueError(f"unexpected type: '{type(value).__name__}' object cannot be converted to '{wanted}'")


def _invalid_type(value: Any, expected: str) -> ValueError:
    return ValueError(f"invalid type: {_described(value)}, expected {expected}")


def _described(value: Any) -> str:
    """A value as Rust's serde names it."""
    shown = next((shown for kind, shown in _DESCRIPTIONS if isinstance(value, kind)), "sequence")
    if isinstance(value, bool):
        return shown.format(str(value).lower())
    # Of a text only the beginning: it may be a prompt.
    return shown.format(value[:64] if isinstance(value, str) else value) if "{" in shown else shown
