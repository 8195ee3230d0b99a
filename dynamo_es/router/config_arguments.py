"""Conversion of constructor arguments: Dynamo's exception types and texts (PyO3's; spec: services, error conventions).

Scripts and tests match on these texts, so they are part of the contract. Pure.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any, TypeVar

from dynamo_es.router.hashing_arguments import check_name as to_text

__all__ = ("Reader", "optional", "to_boolean", "to_path", "to_real", "to_text", "to_u32", "to_u64")

_U32_LIMIT = 2**32
_U64_LIMIT = 2**64
T = TypeVar("T")
Reader = Callable[[str, Any], Any]
"""Converts the value of the argument that it is given the name of. Raises TypeError, OverflowError."""


def to_real(argument: str, value: Any) -> float:
    """A float from whatever stands for a real number; text does not. Raises TypeError, OverflowError."""
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise TypeError(f"argument '{argument}': must be real number, not {type(value).__name__}")
    return float(value)


def to_boolean(argument: str, value: Any) -> bool:
    """Only a bool is one. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'PyBool'")
    return value


def to_u32(argument: str, value: Any) -> int:
    """An integer of 0 to 2^32 - 1. Raises TypeError, OverflowError."""
    number = _to_integer(argument, value)
    if not 0 <= number < _U32_LIMIT:
        raise OverflowError("out of range integral type conversion attempted")
    return number


def to_u64(argument: str, value: Any) -> int:
    """An integer of 0 to 2^64 - 1. Raises TypeError, OverflowError."""
    number = _to_integer(argument, value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _U64_LIMIT:
        raise OverflowError("int too big to convert")
    return number


def to_path(argument: str, value: Any) -> str:
    """A path from text, bytes or an ``os.PathLike``. Raises TypeError."""
    try:
        return os.fsdecode(value)
    except TypeError as error:
        raise TypeError(f"argument '{argument}': {error}") from error


def optional(reader: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    """A reader that also takes None."""
    return lambda argument, value: None if value is None else reader(argument, value)


def _to_integer(argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"argument '{argument}': {error}") from error
