"""Members of a prompt, read as Dynamo reads them: first collected, whatever they are, then converted. Pure.

What cannot be collected at all is refused at its place in the request, before anything is converted: an object that is
no plain data, an integer beyond 64 bits. ``collect`` gives what is left in few kinds (``Content``); the ``take_…``
functions convert that. All refusals are ValueError, with serde's texts.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any, TypeVar

from dynamo_es.router.json_scanner import show_text

T = TypeVar("T")
Content = Any
"""None, bool, int of 64 bits, float, str, bytes, dict, list; ints that all fit into u32 or i64 are an array instead."""
MAX_DEPTH = 64
SHOWN_CHARS = 64
_U8_LIMIT = 2**8
_U32_LIMIT = 2**32
_I64_LIMIT = 2**63
_U64_LIMIT = 2**64
_U128_LIMIT = 2**128
_NONE = object()
# A value that a struct need not have: what stands for it.
Default = Any
Taker = Callable[[Content], T]


def check_encodable(text: str) -> None:
    """Refuse lone surrogates, which UTF-8 cannot hold."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"UnicodeEncodeError: {error}") from error


def collect(value: Any, depth: int = 0) -> Content:
    """Whatever the value is, as plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _collect_integer(value)
    if isinstance(value, str):
        check_encodable(value)
        return value
    if isinstance(value, bytes | float):
        return value
    if isinstance(value, bytearray):
        raise ValueError("unexpected type: 'bytearray' object cannot be converted to 'PyBytes'")
    if depth == MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Sequence | set | frozenset):
        return _collect_items(value, depth)
    if isinstance(value, Mapping):
        return {_collect_key(key, depth): collect(item, depth + 1) for key, item in value.items()}
    raise ValueError(f"unsupported type {type(value).__qualname__}")


def take_optional(taker: Taker[T]) -> Taker[T | None]:
    """A taker that also takes None."""
    return lambda value: None if value is None else taker(value)


def take_text(value: Content) -> str:
    """A str, or bytes that are UTF-8."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise _invalid_type(value, "a string")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError("invalid value: byte array, expected a string") from error


def take_boolean(value: Content) -> bool:
    """A bool."""
    if isinstance(value, bool):
        return value
    raise _invalid_type(value, "a boolean")


def take_size(value: Content) -> int:
    """An integer of 0 to 2^64 - 1."""
    return _take_integer(value, 0, _U64_LIMIT, "usize")


def take_tokens(value: Content) -> Sequence[int]:
    """Token ids, each a u32."""
    items = _take_sequence(value)
    if isinstance(items, array) and items.typecode == "I":
        return items
    return array("I", [_take_integer(item, 0, _U32_LIMIT, "u32") for item in items])


def take_signed_hashes(value: Content) -> Sequence[int]:
    """Hashes as i64; returned as u64 with the same bits."""
    items = _take_sequence(value)
    if not isinstance(items, array):
        items = array("q", [_take_integer(item, -_I64_LIMIT, _I64_LIMIT, "i64") for item in items])
    return array("Q", array("q", items).tobytes())


def take_mm_infos(value: Content) -> list[list[int]]:
    """For block i the hashes of its multimodal objects (u64); offsets are checked and otherwise ignored."""
    return [[] if item is None else _take_struct(item, _BLOCK_INFO)[0] for item in _take_sequence(value)]


def take_mm_routing(value: Content) -> tuple[Sequence[int], list[list[int]]]:
    """Tokens to route by in place of a prompt's, and their multimodal hashes."""
    tokens, mm_hashes = _take_struct(value, _MM_ROUTING)
    return tokens, mm_hashes


def _collect_integer(value: int) -> int:
    if -_I64_LIMIT <= value < _U64_LIMIT:
        return int(value)
    if -_U128_LIMIT // 2 <= value < _U128_LIMIT:
        width = "i128" if value < 0 else "u128"
        raise ValueError(f"invalid type: integer `{value}` as {width}, expected any value")
    raise ValueError("OverflowError: Python int too large to convert to C long")


def _collect_items(value: Collection[Any], depth: int) -> Content:
    if set(map(type, value)) == {int}:
        for typecode in ("I", "q"):
            try:
                # At C speed: a prompt has many tokens.
                return array(typecode, list(value))
            except OverflowError:
                continue
    return [collect(item, depth + 1) for item in value]


def _collect_key(key: Any, depth: int) -> Any:
    collect(key, depth + 1)
    return key


class _Shape:
    """A struct: its members in order, how each is taken, and what stands for one that is missing."""

    def __init__(self, name: str, **members: tuple[Taker[Any], Default]) -> None:
        self.name = name
        self.names = tuple(members)
        self.members = tuple(members.values())


def _take_struct(value: Content, shape: _Shape) -> list[Any]:
    """The members, from a dict of them, or from a list in their order."""
    if isinstance(value, dict):
        found = _take_named(value, shape)
    elif isinstance(value, list | array):
        found = _take_placed(value, shape)
    else:
        raise _invalid_type(value, f"struct {shape.name}")
    return [found[place] for place in range(len(shape.members))]


def _take_named(value: Mapping[Any, Content], shape: _Shape) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for key, item in value.items():
        place = _place_of(key, shape)
        if place in found:
            raise ValueError(f"duplicate field `{shape.names[place]}`")
        if place is not None:
            found[place] = shape.members[place][0](item)
    for place, (_, default) in enumerate(shape.members):
        if found.setdefault(place, default) is _NONE:
            raise ValueError(f"missing field `{shape.names[place]}`")
    return found


def _place_of(key: Any, shape: _Shape) -> int | None:
    """Which member a key names: its name, or, for small and for large integers only, its place."""
    if isinstance(key, str | bytes):
        name = key if isinstance(key, str) else key.decode(errors="replace")
        return shape.names.index(name) if name in shape.names else None
    if isinstance(key, bool) or not isinstance(key, int) or not (0 <= key < _U8_LIMIT or key >= _U32_LIMIT):
        raise _invalid_type(key, "field identifier")
    return int(key) if key < len(shape.names) else None


def _take_placed(value: Sequence[Content], shape: _Shape) -> dict[int, Any]:
    count = len(shape.members)
    found: dict[int, Any] = {}
    for place, (taker, default) in enumerate(shape.members):
        if place < len(value):
            found[place] = taker(value[place])
        elif default is _NONE:
            raise ValueError(f"invalid length {place}, expected struct {shape.name} with {_counted(count)}")
        else:
            found[place] = default
    if len(value) > count:
        raise ValueError(f"invalid length {len(value)}, expected {_counted(count)} in sequence")
    return found


def _take_mm_objects(value: Content) -> list[int]:
    return [_take_struct(item, _MM_OBJECT)[0] for item in _take_sequence(value)]


def _take_offsets(value: Content) -> None:
    for pair in _take_sequence(value):
        ends = _take_sequence(pair, "a tuple of size 2")
        for end in ends[:2]:
            take_size(end)
        if len(ends) < 2:
            raise ValueError(f"invalid length {len(ends)}, expected a tuple of size 2")
        if len(ends) > 2:
            raise ValueError(f"invalid length {len(ends)}, expected 2 elements in sequence")


def _take_sequence(value: Content, expected: str = "a sequence") -> Sequence[Any]:
    if isinstance(value, list | array):
        return value
    raise _invalid_type(value, expected)


def _take_integer(value: Content, low: int, end: int, expected: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid_type(value, expected)
    if not low <= value < end:
        raise ValueError(f"invalid value: integer `{value}`, expected {expected}")
    return value


def _counted(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _invalid_type(value: Content, expected: str) -> ValueError:
    return ValueError(f"invalid type: {_described(value)}, expected {expected}")


def _described(value: Content) -> str:
    """A value as serde names it; of a text only the beginning, since it may be a prompt."""
    return next(show(value) for kinds, show in _KINDS if isinstance(value, kinds))


def _show_float(value: float) -> str:
    """As Rust shows it: all digits, no exponent."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    text = format(Decimal(repr(value)), "f")
    return text if "." in text else f"{text}.0"


_KINDS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (NoneType, lambda value: "unit value"),
    (bool, lambda value: f"boolean `{str(value).lower()}`"),
    (int, lambda value: f"integer `{value}`"),
    (float, lambda value: f"floating point `{_show_float(value)}`"),
    (str, lambda value: f"string {show_text(value[:SHOWN_CHARS])}"),
    (bytes, lambda value: "byte array"),
    (dict, lambda value: "map"),
    (object, lambda value: "sequence"),
)
_MM_OBJECT = _Shape(
    "BlockMmObjectInfo",
    mm_hash=(lambda value: _take_integer(value, 0, _U64_LIMIT, "u64"), _NONE),
    offsets=(_take_offsets, _NONE),
)
_BLOCK_INFO = _Shape("BlockExtraInfo", mm_objects=(_take_mm_objects, _NONE))
_MM_ROUTING = _Shape("MmRoutingInfoRequest", routing_token_ids=(take_tokens, _NONE), block_mm_infos=(take_mm_infos, ()))
