"""Reading the dicts that the selection service is asked with: same order, same texts as Dynamo. Pure.

Dynamo deserializes them in Rust, in two ways. A member of the request itself is converted from Python directly, in the
order of the dict (``read_…``, here). The members of a prompt are collected on the way and converted after all others
(``selection_contents``), which words refusals differently. All refusals are ValueError; scripts and tests match on
their texts, so they are part of the contract.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dynamo_es.router.hashing_arguments import extract_real, extract_u32, extract_u64
from dynamo_es.router.json_scanner import cut
from dynamo_es.router.selection_contents import Content, check_encodable, collect

T = TypeVar("T")
Reader = Callable[[Any], T]
Members = Mapping[str, Reader[Any]]
_SINGLE = struct.Struct("<f")


def read_request(
    value: Any, members: Members, required: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Content]]:
    """A request: these members of it, converted, and all others, collected."""
    found: dict[str, Any] = {}
    others: dict[str, Content] = {}
    for key, item in _read_mapping(value).items():
        name = _read_name(key)
        if name in members:
            found[name] = members[name](item)
        else:
            others[name] = collect(item)
    _require(found, required)
    return found, others


def read_struct(members: Members, required: Sequence[str] = ()) -> Reader[dict[str, Any]]:
    """A dict of these members; others are passed over, whatever they are."""

    def read(value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in _read_mapping(value).items():
            name = _read_name(key)
            if name in members:
                found[name] = members[name](item)
        _require(found, required)
        return found

    return read


def optional(reader: Reader[T]) -> Reader[T | None]:
    """A reader that also takes None."""
    return lambda value: None if value is None else reader(value)


def read_text(value: Any) -> str:
    """A str that UTF-8 can hold."""
    if not isinstance(value, str):
        raise _unexpected(value, "PyString")
    check_encodable(value)
    return value


def read_real(value: Any) -> float:
    """A float, or what converts to one."""
    return _converted(value, extract_real)


def read_single(value: Any) -> float:
    """A float as 32 bits hold it; what is too large for them is infinite."""
    number = read_real(value)
    try:
        (rounded,) = _SINGLE.unpack(_SINGLE.pack(number))
    except OverflowError:
        return math.copysign(math.inf, number)
    return float(rounded)


def read_u64(value: Any) -> int:
    """An integer of 0 to 2^64 - 1."""
    return _converted(value, extract_u64)


def read_u32(value: Any) -> int:
    """An integer of 0 to 2^32 - 1."""
    return _converted(value, extract_u32)


def read_boolean(value: Any) -> bool:
    """Whether the value is true in Python's sense."""
    return _converted(value, bool)


def read_list(reader: Reader[T]) -> Reader[list[T]]:
    """A sequence or a set; a str is one of its characters."""

    def read(value: Any) -> list[T]:
        if not isinstance(value, Sequence | set | frozenset):
            raise _unexpected(value, "Sequence")
        return [reader(item) for item in value]

    return read


def read_map(key: Reader[str] | Reader[int], reader: Reader[T]) -> Reader[dict[Any, T]]:
    """A dict with keys and values of these kinds."""

    def read(value: Any) -> dict[Any, T]:
        return {key(name): reader(item) for name, item in _read_mapping(value).items()}

    return read


def read_variant(*names: str) -> Reader[str]:
    """One of these names, or a dict whose only key is one."""
    known = " or ".join(f"`{name}`" for name in names)

    def read(value: Any) -> str:
        if isinstance(value, str):
            name = read_text(value)
        elif not isinstance(value, Mapping):
            raise ValueError("expected either a str or dict for enum")
        elif len(value) != 1:
            raise ValueError("expected tagged enum dict to have exactly 1 key")
        else:
            name = _read_name(next(iter(value)))
        if name not in names:
            raise ValueError(f"unknown variant `{cut(name)}`, expected {known}")
        return name

    return read


def _read_mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise _unexpected(value, "Mapping")
    return value


def _read_name(key: Any) -> str:
    if not isinstance(key, str):
        raise ValueError("dict keys must have type str")
    check_encodable(key)
    return key


def _require(found: Mapping[str, Any], required: Sequence[str]) -> None:
    for name in required:
        if name not in found:
            raise ValueError(f"missing field `{name}`")


def _converted(value: Any, convert: Reader[T]) -> T:
    """What Python makes of a value; what it raises is named in the text."""
    try:
        return convert(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _unexpected(value: Any, wanted: str) -> ValueError:
    return ValueError(f"unexpected type: '{type(value).__name__}' object cannot be converted to '{wanted}'")
