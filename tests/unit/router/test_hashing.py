"""Hashing beyond the recorded results: properties, edges of the arguments, speed-path equivalence."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections import deque
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.hashing import (
    block_seed,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
    hash_blocks,
    hash_prompt,
    mm_identifier_hash,
    mm_pad_value,
    to_signed,
    to_unsigned,
)
from dynamo_es.router.hashing_tracking import TrackingScope, derive_tracking_seeds, draw_unshared_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)
NAMES = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
HASHES = st.integers(0, 2**64 - 1)
OBJECT = {"mm_hash": 5, "offsets": []}


@given(tokens=TOKENS, block_size=st.integers(1, 20), lora=NAMES, namespace=NAMES, eagle=st.booleans())
def test_fast_path_agrees_with_the_checked_one(
    tokens: list[int], block_size: int, lora: str | None, namespace: str | None, eagle: bool
) -> None:
    checked = compute_block_hash_for_seq(tokens, block_size, None, lora, eagle, namespace)
    assert hash_blocks(tokens, block_size, block_seed(lora, namespace), is_eagle=eagle) == checked
    assert len(checked) == max(len(tokens) - eagle, 0) // block_size


@given(tokens=TOKENS, block_size=st.integers(1, 20))
def test_block_without_multimodal_objects_is_a_plain_block(tokens: list[int], block_size: int) -> None:
    plain = hash_blocks(tokens, block_size)
    assert hash_blocks(tokens, block_size, mm_hashes=[[]] * 3) == plain
    marked = hash_blocks(tokens, block_size, mm_hashes=[[7, 3]])
    assert marked[1:] == plain[1:]
    assert marked[:1] == hash_blocks(tokens, block_size, mm_hashes=[[3, 7]])[:1]
    assert not plain or marked[0] != plain[0]


@given(hashes=st.lists(HASHES, max_size=20), cut=st.integers(0, 20))
def test_chain_continues_from_its_parent(hashes: list[int], cut: int) -> None:
    whole = compute_sequence_hashes(hashes)
    head = compute_sequence_hashes(hashes[:cut])
    assert head + compute_sequence_hashes(hashes[cut:], head[-1] if head else None) == whole


@given(value=HASHES)
def test_signed_form_is_a_bijection(value: int) -> None:
    assert -(2**63) <= to_signed(value) < 2**63
    assert to_unsigned(to_signed(value)) == value


def test_IDX_13_namespace_separates_and_never_equals_an_adapter_of_the_same_name() -> None:
    tokens = list(range(8))
    variants = [
        hash_prompt(tokens, 4, block_seed(lora, namespace))
        for lora, namespace in (
            (None, None),
            (None, "a"),
            (None, "b"),
            ("a", None),
            ("b", None),
            ("a", "b"),
            ("b", "a"),
        )
    ]
    block_hashes = [hashes for pair in variants for hashes in pair[0]]
    assert len(set(block_hashes)) == len(block_hashes)
    assert len({pair[1][-1] for pair in variants}) == len(variants)


def test_SEC_10_adapter_and_namespace_do_not_concatenate() -> None:
    assert block_seed("a|b", "c") != block_seed("a", "b|c")
    assert block_seed("org_1", "2345") != block_seed("org_12345", "")
    assert block_seed("x", "x") != block_seed("xx", None)


def test_SEC_10_tracking_scopes_do_not_concatenate() -> None:
    key = bytes(32)
    scopes = [
        TrackingScope("m", "g", 4, namespace, lora)
        for namespace, lora in (("org_1", "2345"), ("org_12345", ""), ("", "org_12345"), ("a|b", "c"), ("a", "b|c"))
    ]
    scopes += [TrackingScope("mg", "", 4), TrackingScope("", "mg", 4), TrackingScope("mg", "", 4, is_eagle=True)]
    seeds = [derive_tracking_seeds(key, "k", scope) for scope in scopes]
    assert len(set(seeds)) == len(seeds)
    assert derive_tracking_seeds(key, "k2", scopes[0]) != seeds[0]
    assert derive_tracking_seeds(b"\x01" * 32, "k", scopes[0]) != seeds[0]


def test_empty_namespace_and_adapter_in_a_tracking_scope_are_none() -> None:
    with_empty = derive_tracking_seeds(bytes(32), "k", TrackingScope("m", "g", 4, "", ""))
    assert with_empty == derive_tracking_seeds(bytes(32), "k", TrackingScope("m", "g", 4))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_tracking_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match=f"32 raw bytes, this one has {length}"):
        derive_tracking_seeds(bytes(length), "k", TrackingScope("m", "g", 4))


def test_unshared_hashes_come_from_the_random_source_given() -> None:
    hashes = draw_unshared_hashes(5, Random(3))
    assert hashes == draw_unshared_hashes(5, Random(3))
    assert hashes != draw_unshared_hashes(5, Random(4))
    assert len(set(hashes)) == 5
    assert draw_unshared_hashes(0, Random(3)) == []


def test_IDX_14_hashes_do_not_depend_on_the_process() -> None:
    program = (
        "from dynamo_es.router.hashing import *\n"
        "print(compute_block_hash_for_seq(range(64), 16, [None, {'mm_objects': [{'mm_hash': 9, 'offsets': []}]}],"
        " 'adapter', False, 'salt'), hash_prompt(range(64), 16), lora_name_to_id('adapter'))\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "random", "1")
    ]
    assert outputs[0]
    assert outputs[0] == outputs[1] == outputs[2]


class Items:
    """Has items by number, but does not call itself a sequence."""

    def __getitem__(self, place: int) -> int:
        return [1, 2, 3, 4][place]


class Endless(Items):
    __iter__ = None


@pytest.mark.parametrize(
    "tokens",
    [Items(), numpy.array([1, 2, 3, 4]), numpy.array([1, 2, 3, 4], dtype="u4"),
     (1, 2, 3, 4), array("I", [1, 2, 3, 4]), array("Q", [1, 2, 3, 4]), bytearray([1, 2, 3, 4]), b"\1\2\3\4",
     memoryview(b"\1\2\3\4"), deque([1, 2, 3, 4]), range(1, 5)],
    ids=lambda tokens: type(tokens).__name__,
)  # fmt: skip
def test_every_sequence_of_ints_gives_the_same_hash(tokens: Any) -> None:
    assert compute_block_hash_for_seq(tokens, 4) == hash_blocks(tokens, 4) == [14643705804678351452]


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def test_objects_with_an_index_are_ints() -> None:
    infos = [{"mm_objects": [{"mm_hash": Index(5), "offsets": []}]}]
    assert compute_block_hash_for_seq([Index(1), Index(2), 3, 4], Index(4)) == [14643705804678351452]  # type: ignore[list-item, arg-type]
    assert compute_block_hash_for_seq([1, 2, 3, 4], 4, infos) == [15706877295117281372]


@pytest.mark.parametrize(
    "infos",
    [
        [{"mm_objects": [OBJECT]}],
        ({"mm_objects": (OBJECT,)},),
        [{"mm_objects": [{"mm_hash": 5, "offsets": frozenset({(1, 2)})}]}],
        [{"mm_objects": [{"mm_hash": 5, "offsets": ""}], "other": object()}],
    ],
)
def test_multimodal_infos_take_any_collection(infos: Any) -> None:
    assert compute_block_hash_for_seq([1, 2, 3, 4], 4, infos) == [15706877295117281372]


@pytest.mark.parametrize("infos", ["", b"", {None}, [], [None], [{"mm_objects": set()}]])
def test_infos_without_objects_are_none(infos: Any) -> None:
    assert compute_block_hash_for_seq([1, 2, 3, 4], 4, infos) == [14643705804678351452]


def with_offsets(offsets: Any) -> list[Any]:
    return [{"mm_objects": [{"mm_hash": 5, "offsets": offsets}]}]


@pytest.mark.parametrize(
    ("infos", "text"),
    [
        (b"x", "unexpected type: 'int' object cannot be converted to 'Mapping'"),
        ((None for _ in range(1)), "unexpected type: 'generator' object cannot be converted to 'Sequence'"),
        (dict.fromkeys([None]).keys(), "unexpected type: 'dict_keys' object cannot be converted to 'Sequence'"),
        (Items(), "unexpected type: 'Items' object cannot be converted to 'Sequence'"),
        ([{"mm_objects": [None]}], "unexpected type: 'NoneType' object cannot be converted to 'Mapping'"),
        ([{"mm_objects": [], 1: 2}], "dict keys must have type str"),
        ([{1: 2, "mm_objects": None}], "dict keys must have type str"),
        ([{"mm_objects": [{1: 2}]}], "dict keys must have type str"),
        ([{"mm_objects": [{"offsets": None, "mm_hash": -1}]}],
         "unexpected type: 'NoneType' object cannot be converted to 'Sequence'"),
        ([{"mm_objects": [{"mm_hash": -1, "offsets": None}]}], "OverflowError: can't convert negative int to unsigned"),
        (with_offsets("ab"), "expected sequence of length 2, got 1"),
        (with_offsets(["ab"]), "TypeError: 'str' object cannot be interpreted as an integer"),
        (with_offsets({}), "unexpected type: 'dict' object cannot be converted to 'Sequence'"),
        (with_offsets([{1, 2}]), "unexpected type: 'set' object cannot be converted to 'Sequence'"),
        (with_offsets([(1.5, 2)]), "TypeError: 'float' object cannot be interpreted as an integer"),
        (with_offsets([(1, 2**64)]), "OverflowError: int too big to convert"),
    ],
)  # fmt: skip
def test_malformed_multimodal_infos_are_refused_in_the_words_of_dynamo(infos: Any, text: str) -> None:
    with pytest.raises(Exception) as caught:
        compute_block_hash_for_seq([1, 2, 3, 4], 4, infos)
    assert type(caught.value) is Exception
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], 0, None, 5), "argument 'lora_name': 'int' object cannot be converted to 'PyString'"),
        (([1], 4, [{}], 5), "argument 'lora_name': 'int' object cannot be converted to 'PyString'"),
        (([1], 4, None, 5, 1, 5), "argument 'lora_name': 'int' object cannot be converted to 'PyString'"),
        (([1], 4, None, None, 1, 5), "argument 'is_eagle': 'int' object cannot be converted to 'PyBool'"),
        (({1}, 4), "argument 'tokens': 'set' object cannot be converted to 'Sequence'"),
        ((MappingProxyType({1: 2}), 4), "argument 'tokens': 'mappingproxy' object cannot be converted to 'Sequence'"),
        ((Endless(), 4), "argument 'tokens': 'Endless' object is not iterable"),
        (([1, "a", -1], 4), "argument 'tokens': 'str' object cannot be interpreted as an integer"),
    ],
)
def test_arguments_are_checked_in_the_order_of_dynamo(arguments: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        compute_block_hash_for_seq(*arguments)
    assert str(caught.value) == text


def test_first_bad_token_decides_the_error() -> None:
    with pytest.raises(OverflowError, match="out of range integral type conversion attempted"):
        compute_block_hash_for_seq([1, -1, "a"], 4)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (-(2**63), "out of range integral type conversion attempted"),
        (2**63 - 1, "out of range integral type conversion attempted"),
        (2**63, "Python int too large to convert to C long"),
        (-(2**63) - 1, "Python int too large to convert to C long"),
    ],
)
def test_token_beyond_64_bits_is_refused_in_other_words(token: int, text: str) -> None:
    with pytest.raises(OverflowError, match=f"^{text}$"):
        compute_block_hash_for_seq([token], 4)


def test_name_that_is_no_unicode_text_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        compute_block_hash_for_seq([1, 2, 3, 4], 4, None, "\ud800")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_fast_path_refuses_what_is_no_token(token: int) -> None:
    with pytest.raises(OverflowError):
        hash_blocks([1, 2, 3, token], 4)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("", None),
        ("00000000000000ff" + "0" * 48, 255),
        ("FFFFFFFFFFFFFFFF" + "a" * 48, 2**64 - 1),
    ],
)
def test_identifier_of_64_hex_digits_gives_its_first_16(identifier: str, expected: int | None) -> None:
    assert mm_identifier_hash(identifier) == expected


@pytest.mark.parametrize("identifier", ["a", "0x" + "1" * 62, "1_" * 32, " " * 64, "f" * 63, "f" * 65])
def test_any_other_identifier_is_hashed(identifier: str) -> None:
    value = mm_identifier_hash(identifier)
    assert value is not None
    assert 0 <= value < 2**64
    assert value != mm_identifier_hash(identifier + "!")


def test_pad_values_are_tokens_beyond_any_vocabulary() -> None:
    assert mm_pad_value(0) == 1_000_000
    assert mm_pad_value(2**64 - 1) == 1_000_000 + 2**30 - 1
    assert mm_pad_value(2**30 + 5) == 1_000_005
