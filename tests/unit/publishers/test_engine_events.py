from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.publishers.engine_events import Cleared, EngineEventDecoder, Removed, Stored
from dynamo_es.publishers.msgpack_span import first_object
from dynamo_es.router.hashing import mm_identifier_hash

STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
HEX64 = "75c98c070e44a58131d962bf40334518a705d19c432d0fc70242ecd800ea5421"


def decode(*events: Any, rank: Any = 0, decoder: EngineEventDecoder | None = None) -> Any:
    return (decoder or EngineEventDecoder()).decode(msgspec.msgpack.encode([1.5, list(events), rank]))


def stored(**fields: Any) -> Stored:
    batch = decode(STORED | fields)
    assert not batch.rejected, batch.rejected
    return batch.events[0]


def test_reads_vllm_maps_and_sglang_arrays_alike() -> None:
    as_map = {**STORED, "block_hashes": [1, -1], "token_ids": [1, 2, 3, 4], "medium": "CPU", "lora_name": "x"}
    as_array = ["BlockStored", [1, -1], None, [1, 2, 3, 4], 2, None, "CPU", "x"]
    batch = decode(as_map, as_array)
    assert batch.events[0] == batch.events[1]
    assert batch.events[0].block_hashes == [1, 2**64 - 1]
    assert (batch.events[0].tier, batch.events[0].lora_name) == ("host_pinned", "x")
    batch = decode(["BlockRemoved", [3], "GPU"], {"type": "BlockRemoved", "block_hashes": [3]}, ["AllBlocksCleared"])
    assert batch.events == [Removed("device", [3]), Removed("device", [3]), Cleared()]


def test_one_bad_event_costs_itself_and_not_its_batch() -> None:
    bad = [
        {"type": "BlockStored", "block_hashes": ["text"], "token_ids": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [2**32], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1.0], "token_ids": [1], "block_size": 1},
        {"type": "Surprise"},
        {"no": "type"},
        ["BlockStored", [1], None, [1], 1, None, None, {"not": "a name"}],
        {**STORED, "extra_keys": [[None]]},
        {**STORED, "block_mm_infos": [{}]},
        7,
    ]
    batch = decode(*bad, STORED)
    assert [event.block_hashes for event in batch.events] == [[1]]
    assert len(batch.rejected) == len(bad)
    assert {item.reason for item in batch.rejected} == {"bad_field", "unknown_event"}
    assert msgspec.msgpack.decode(batch.rejected[5].data) == {"type": "Surprise"}


def test_invalid_utf8_in_one_event_does_not_spoil_the_others() -> None:
    broken = msgspec.msgpack.encode({"type": "BlockStored"}).replace(b"BlockStored", b"\xff" * 11)
    payload = b"\x93\x01\x92" + broken + msgspec.msgpack.encode(STORED) + b"\x00"
    batch = EngineEventDecoder().decode(payload)
    assert len(batch.events) == 1
    assert [item.reason for item in batch.rejected] == ["undecodable_event"]


def test_what_is_good_in_a_removal_is_removed() -> None:
    batch = decode({"type": "BlockRemoved", "block_hashes": [1, "x", 2]})
    assert batch.events == [Removed("device", [1, 2])]
    assert batch.rejected[0].reason == "bad_field"


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"junk"]
    + [
        msgspec.msgpack.encode(value)
        for value in ({}, [1.5], [None, [], 0], [1, [], 0, 1], [1, [], "0"], [1, [], 2**31])
    ],
)
def test_a_batch_that_cannot_be_read_counts_as_lost(payload: bytes) -> None:
    batch = EngineEventDecoder().decode(payload)
    assert batch.lost
    assert [item.reason for item in batch.rejected] == ["undecodable_batch"]
    assert not batch.events


@given(st.binary(max_size=80))
def test_no_bytes_make_the_decoder_raise(payload: bytes) -> None:
    EngineEventDecoder().decode(payload)
    EngineEventDecoder().decode(b"\x93\x01\x91" + payload + b"\x00")


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner), max_leaves=40
    ),
    st.binary(max_size=8),
)
def test_the_span_of_the_first_object_is_its_encoding(value: Any, rest: bytes) -> None:
    encoded = msgspec.msgpack.encode(value)
    assert first_object(encoded + rest) == encoded
    assert first_object(encoded[:-1]) is None


def test_trailing_bytes_and_a_missing_rank_are_tolerated() -> None:
    payload = msgspec.msgpack.encode([1, [STORED], 3])
    assert EngineEventDecoder().decode(payload + b"rest").dp_rank == 3
    two = EngineEventDecoder().decode(msgspec.msgpack.encode([1, [STORED]]))
    assert (two.dp_rank, len(two.events)) == (None, 1)
    assert decode(STORED, rank=-1).dp_rank == 2**32 - 1


def test_bytes_hashes_are_names_like_any_other() -> None:
    event = stored(block_hashes=[b"\x01" * 32], parent_block_hash=b"\x02" * 32)
    assert (event.block_hashes, event.parent) == ([b"\x01" * 32], b"\x02" * 32)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, "device"), ("", "device"), ("GPU", "device"), ("CPU_TIER1", "host_pinned"), ("CPU_TIER2", "disk"),
     ("NVME", "disk"), ("SHARED", "external")],
)  # fmt: skip
def test_media_map_to_tiers(medium: str | None, tier: str) -> None:
    assert stored(medium=medium).tier == tier


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"medium": "gpu"}, "medium"), ({"locality": "REMOTE"}, "locality"), ({"kv_cache_spec_kind": "mamba"}, "group"),
     ({"group_idx": 1}, "group")],
)  # fmt: skip
def test_what_is_none_of_ours_is_filtered_and_counted(fields: dict[str, Any], reason: str) -> None:
    batch = decode(STORED | fields, {"type": "Ignored", "x": 1})
    assert not batch.events
    assert dict(batch.filtered) == {reason: 1, "ignored": 1}


def test_a_group_is_judged_by_the_kind_that_was_learnt() -> None:
    decoder = EngineEventDecoder()
    removal = {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 2}
    assert not decode(removal, decoder=decoder).events
    decode(STORED | {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}, decoder=decoder)
    assert decode(removal, decoder=decoder).events
    assert not decode(removal, rank=1, decoder=decoder).events


def test_IDX_11_multimodal_keys_become_the_objects_hashes() -> None:
    keys = [[[HEX64, 3], "img"], None, ["a", HEX64]]
    event = stored(extra_keys=keys)
    assert event.mm_hashes == (
        (int(HEX64[:16], 16), mm_identifier_hash("img")),
        (),
        (mm_identifier_hash("a"), int(HEX64[:16], 16)),
    )
    infos = [{"mm_objects": [{"mm_hash": 5, "offsets": [[0, 1]]}]}, None]
    assert stored(extra_keys=keys, block_mm_infos=infos).mm_hashes == ((5,), ())


def test_IDX_13_the_salt_is_found_behind_the_adapter_and_enters_no_hash_as_a_key() -> None:
    event = stored(extra_keys=[["x", "dynamo-cache-salt:x"]], lora_name="x", lora_id=3)
    assert (event.lora_name, event.cache_salt, event.mm_hashes) == ("x", "x", ((),))
    assert stored(cache_salt="s", extra_keys=[["dynamo-cache-salt:t"]]).cache_salt == "s"
    assert stored(extra_keys=[["plain"]]).cache_salt is None
    assert stored(extra_keys=[["plain"]]).mm_hashes != ()


def test_keys_that_are_not_understood_separate_blocks() -> None:
    seen = {stored(extra_keys=[[key]]).mm_hashes for key in (1, -1, 1.5, True, b"\x01", "1", ["a", 1], [1])}
    assert len(seen) == 8


def test_IDX_12_an_adapter_without_a_name_is_refused() -> None:
    batch = decode(STORED | {"lora_id": 3}, STORED | {"lora_id": 3, "lora_name": "x"}, STORED | {"lora_id": 0})
    assert [event.lora_name for event in batch.events] == ["x", None]
    assert [item.reason for item in batch.rejected] == ["lora_without_name"]


def test_bigrams_are_eagle_tokens() -> None:
    event = stored(token_ids=[[1, 2], [2, 3], [3, 4]])
    assert (list(event.tokens), event.is_eagle) == ([1, 2, 3, 4], True)
