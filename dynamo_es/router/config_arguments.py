"""Conversion of constructor arguments: Dynamo's exception types and texts (PyO3's; spec: services, error conventions).

Scripts and tests match on these texts, so they are part of the contract. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from dynamo_es.router.hashing_arguments import check_bool as to_boolean
from dynamo_es.router.hashing_arguments import check_name as to_text
from dynamo_es.router.hashing_arguments import check_names as to_texts
from dynamo_es.router.hashing_arguments import check_u64 as to_u64
from dynamo_es.router.hashing_arguments import extract_real, extract_u16, extract_u32

__all__ = (
    "Reader",
    "instance_of",
    "optional",
    "to_boolean",
    "to_path",
    "to_real",
    "to_text",
    "to_texts",
    "to_u16",
    "to_u32",
    "to_u64",
)

T = TypeVar("T")
Reader = Callable[[str, Any], Any]
"""Converts the value of the argument that it is given the name of. Raises TypeError, OverflowError."""


def to_real(argument: str, value: Any) -> float:
    """A float from whatever stands for a real number; text does not. Raises TypeError, OverflowError."""
    return _named(argument, value, extract_real)


def to_u16(argument: str, value: Any) -> int:
    """An integer of 0 to 2^16 - 1. Raises TypeError, OverflowError."""
    return _named(argument, value, extract_u16)


def to_u32(argument: str, value: Any) -> int:
    """An integer of 0 to 2^32 - 1. Raises TypeError, OverflowError."""
    return _named(argument, value, extract_u32)


def to_path(argument: str, value: Any) -> str:
    """A path from text, bytes or an ``os.PathLike``. Raises TypeError."""
    return _named(argument, value, os.fsdecode)


def instance_of(argument: str, value: Any, kind: type[T]) -> T:
    """The value, which must be of that class. Raises TypeError."""
    if not isinstance(value, kind):
        found = type(value).__name__
        raise TypeError(f"argument '{argument}': '{found}' object cannot be converted to '{kind.__name__}'")
    return value


def optional(reader: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    """A reader that also takes None."""
    return lambda argument, value: None if value is None else reader(argument, value)


def _named(argument: str, value: Any, convert: Callable[[Any], T]) -> T:
    try:
        return convert(value)
    except TypeError as error:
        raise TypeError(f"argument '{argument}': {error}") from error
