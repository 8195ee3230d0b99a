"""Argument checking of Dynamo's hash functions and its ``RadixTree``: same order, exception types and texts.

Dynamo's functions are Rust behind PyO3: arguments are converted in order of the signature, then the body checks the
block size, then it deserializes ``block_mm_infos``. Scripts and tests match on these texts, so they are part of the
contract; tests/data/golden/router/hashing.json holds what Dynamo answered.

What converting an argument raises is the caller's own, but for a plain TypeError, which gets the argument's name.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

_U16_LIMIT = 2**16
_U32_LIMIT = 2**32
_I64_LIMIT = 2**63
_U64_LIMIT = 2**64
_Kind = TypeVar("_Kind")


def check_arguments(
    tokens: Any, kv_block_size: Any, block_mm_infos: Any, lora_name: Any, is_eagle: Any, cache_namespace: Any
) -> tuple[Sequence[int], int, list[list[int]]]:
    """Tokens, block size and per-block multimodal hashes, converted.

    Raises:
        TypeError, OverflowError, ValueError, Exception: See ``compute_block_hash_for_seq``.
    """
    checked_tokens = _check_tokens(tokens)
    block_size = check_u64("kv_block_size", kv_block_size)
    check_optional("lora_name", lora_name, str, "PyString")
    check_optional("is_eagle", is_eagle, bool, "PyBool")
    check_optional("cache_namespace", cache_namespace, str, "PyString")
    if block_size == 0:
        raise ValueError("kv_block_size cannot be 0")
    return checked_tokens, block_size, [] if block_mm_infos is None else _read_mm_infos(block_mm_infos)


def check_name(argument: str, value: Any) -> str:
    """``value`` if it is a str; otherwise TypeError in PyO3's words."""
    return _check_kind(argument, value, str, "PyString")


def check_u64(argument: str, value: Any) -> int:
    """``value`` as an int of 0 to 2^64 - 1. Raises TypeError, OverflowError."""
    try:
        return extract_u64(value)
    except TypeError as error:
        _refuse_argument(argument, error)


def check_u64s(argument: str, values: Any) -> array[int]:
    """A sequence of ints of 0 to 2^64 - 1, packed (typecode Q). Raises TypeError, OverflowError."""
    try:
        return _to_numbers(values, "Q", extract_u64)
    except TypeError as error:
        _refuse_argument(argument, error)


def check_bool(argument: str, value: Any) -> bool:
    """``value`` if it is a bool; otherwise TypeError."""
    return _check_kind(argument, value, bool, "PyBool")


def check_bytes(argument: str, value: Any) -> bytes:
    """``value`` if it is bytes; otherwise TypeError."""
    return _check_kind(argument, value, bytes, "PyBytes")


def check_names(argument: str, values: Any) -> list[str]:
    """A sequence of str. Raises TypeError."""
    try:
        _check_sequence(values)
    except TypeError as error:
        _refuse_argument(argument, error)
    return [check_name(argument, value) for value in values]


def check_optional(argument: str, value: Any, kind: type, rust_name: str) -> None:
    """Nothing if ``value`` is None or of this kind; otherwise TypeError."""
    if value is not None:
        _check_kind(argument, value, kind, rust_name)


def extract_u16(value: Any) -> int:
    """``value`` as an int of 0 to 2^16 - 1. Raises TypeError, OverflowError, without the name of an argument."""
    return _extract_narrow(value, _U16_LIMIT)


def extract_u32(value: Any) -> int:
    """``value`` as an int of 0 to 2^32 - 1. Raises TypeError, OverflowError, as above."""
    return _extract_narrow(value, _U32_LIMIT)


def extract_u64(value: Any) -> int:
    """``value`` as an int of 0 to 2^64 - 1. Raises TypeError, OverflowError, as above."""
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _U64_LIMIT:
        raise OverflowError("int too big to convert")
    return number


def extract_real(value: Any) -> float:
    """``value`` as a float, if it stands for a real number. Raises TypeError, OverflowError, as above."""
    # Unlike float() this takes no text, and words its refusals as C code does that asks for a float.
    return math.ldexp(value, 0)


def _extract_narrow(value: Any, end: int) -> int:
    number = operator.index(value)
    if not -_I64_LIMIT <= number < _I64_LIMIT:
        raise OverflowError("Python int too large to convert to C long")
    if not 0 <= number < end:
        raise OverflowError("out of range integral type conversion attempted")
    return number


def _refuse_argument(argument: str, error: TypeError) -> NoReturn:
    if type(error) is not TypeError:
        raise error
    raise TypeError(f"argument '{argument}': {error}") from error


def _type_name(value: Any) -> str:
    return type(value).__name__


def _check_kind(argument: str, value: Any, kind: type[_Kind], rust_name: str) -> _Kind:
    if not isinstance(value, kind):
        raise TypeError(f"argument '{argument}': '{_type_name(value)}' object cannot be converted to '{rust_name}'")
    return value


def _check_tokens(tokens: Any) -> Sequence[int]:
    try:
        return _to_numbers(tokens, "I", extract_u32)
    except TypeError as error:
        _refuse_argument("tokens", error)


def _to_numbers(values: Any, typecode: str, convert: Callable[[Any], int]) -> array[int]:
    _check_sequence(values)
    if isinstance(values, (bytes, bytearray)):
        # array() would take these for packed numbers; to everyone else they are sequences of small ints.
        return array(typecode, list(values))
    try:
        # Converts and checks good values at C speed; what is wrong with a bad one is found below.
        return array(typecode, values)
    except (TypeError, OverflowError):
        return array(typecode, [convert(value) for value in values])


def _check_sequence(values: Any) -> None:
    """Accept what has items by number, as PyO3 does: an array of NumPy does not call itself a Sequence, but is one."""
    if isinstance(values, str):
        raise TypeError("Can't extract `str` to `Vec`")
    if not hasattr(type(values), "__getitem__") or isinstance(values, (dict, MappingProxyType)):
        raise TypeError(f"'{_type_name(values)}' object cannot be converted to 'Sequence'")


def _read_mm_infos(infos: Any) -> list[list[int]]:
    """The ``mm_hash`` values of every entry. Errors come in the order in which serde meets them."""
    return [[] if info is None else _read_mm_info(info) for info in _items(infos)]


def _read_mm_info(info: Any) -> list[int]:
    return list(_fields(info, {"mm_objects": _read_mm_objects})["mm_objects"])


def _read_mm_objects(objects: Any) -> list[int]:
    readers = {"mm_hash": _read_u64, "offsets": _read_offsets}
    return [_fields(item, readers)["mm_hash"] for item in _items(objects)]


def _read_offsets(offsets: Any) -> None:
    for pair in _items(offsets):
        if not isinstance(pair, Sequence):
            _refuse_type(pair, "Sequence")
        if len(pair) != 2:
            _refuse(f"expected sequence of length 2, got {len(pair)}")
        for bound in pair:
            _read_u64(bound)


def _read_u64(value: Any) -> int:
    try:
        return extract_u64(value)
    except (TypeError, OverflowError) as error:
        raise Exception(f"{type(error).__name__}: {error}") from error


def _fields(item: Any, readers: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Read the named fields of a mapping, in the mapping's order; other fields are ignored."""
    if not isinstance(item, Mapping):
        _refuse_type(item, "Mapping")
    found: dict[str, Any] = {}
    for name, value in item.items():
        if not isinstance(name, str):
            _refuse("dict keys must have type str")
        if name in readers:
            found[name] = readers[name](value)
    for name in readers:
        if name not in found:
            _refuse(f"missing field `{name}`")
    return found


def _items(values: Any) -> Any:
    if not isinstance(values, (Sequence, set, frozenset)):
        _refuse_type(values, "Sequence")
    return values


def _refuse_type(value: Any, rust_name: str) -> NoReturn:
    _refuse(f"unexpected type: '{_type_name(value)}' object cannot be converted to '{rust_name}'")


def _refuse(text: str) -> NoReturn:
    raise Exception(text)
