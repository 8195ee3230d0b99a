"""Argument checking of Dynamo's hash functions: same order, same exception types, same texts.

Dynamo's functions are Rust behind PyO3: arguments are converted in order of the signature, then the body checks the
block size, then it deserializes ``block_mm_infos``. Scripts and tests match on these texts, so they are part of the
contract; tests/data/golden/router/hashing.json holds what Dynamo answered.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NoReturn

_U32_LIMIT = 2**32
_U64_LIMIT = 2**64


def check_arguments(
    tokens: Any, kv_block_size: Any, block_mm_infos: Any, lora_name: Any, is_eagle: Any, cache_namespace: Any
) -> tuple[Sequence[int], int, list[list[int]]]:
    """Tokens, block size and per-block multimodal hashes, converted.

    Raises:
        TypeError, OverflowError, ValueError, Exception: See ``compute_block_hash_for_seq``.
    """
    checked_tokens = _check_tokens(tokens)
    block_size = _check_block_size(kv_block_size)
    _check_optional("lora_name", lora_name, str, "PyString")
    _check_optional("is_eagle", is_eagle, bool, "PyBool")
    _check_optional("cache_namespace", cache_namespace, str, "PyString")
    if block_size == 0:
        raise ValueError("kv_block_size cannot be 0")
    return checked_tokens, block_size, [] if block_mm_infos is None else _read_mm_infos(block_mm_infos)


def check_name(argument: str, value: Any) -> str:
    """``value`` if it is a str; otherwise TypeError in PyO3's words."""
    if not isinstance(value, str):
        raise TypeError(f"argument '{argument}': '{_type_name(value)}' object cannot be converted to 'PyString'")
    return value


def _type_name(value: Any) -> str:
    return type(value).__name__


def _check_optional(argument: str, value: Any, kind: type, rust_name: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"argument '{argument}': '{_type_name(value)}' object cannot be converted to '{rust_name}'")


def _check_tokens(tokens: Any) -> Sequence[int]:
    if isinstance(tokens, str):
        raise TypeError("argument 'tokens': Can't extract `str` to `Vec`")
    if not isinstance(tokens, Sequence):
        raise TypeError(f"argument 'tokens': '{_type_name(tokens)}' object cannot be converted to 'Sequence'")
    if isinstance(tokens, (bytes, bytearray)):
        return tokens
    try:
        # Converts and checks a good prompt at C speed; what is wrong with a bad one is found below.
        return array("I", tokens)
    except (TypeError, OverflowError):
        return array("I", [_check_token(token) for token in tokens])


def _check_token(token: Any) -> int:
    try:
        value = operator.index(token)
    except TypeError as error:
        raise TypeError(f"argument 'tokens': {error}") from error
    if not 0 <= value < _U32_LIMIT:
        raise OverflowError("out of range integral type conversion attempted")
    return value


def _check_block_size(kv_block_size: Any) -> int:
    try:
        return _to_u64(kv_block_size)
    except TypeError as error:
        raise TypeError(f"argument 'kv_block_size': {error}") from error


def _to_u64(value: Any) -> int:
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= _U64_LIMIT:
        raise OverflowError("int too big to convert")
    return number


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
        return _to_u64(value)
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
    if not isinstance(values, (Sequence, Set)):
        _refuse_type(values, "Sequence")
    return values


def _refuse_type(value: Any, rust_name: str) -> NoReturn:
    _refuse(f"unexpected type: '{_type_name(value)}' object cannot be converted to '{rust_name}'")


def _refuse(text: str) -> NoReturn:
    raise Exception(text)
