"""What a topic's codec accepts, and what it refuses with which reason."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.catalog import TOPICS, topic_spec
from schemas.codec import SCHEMA_HEADER, SchemaError, TopicCodec
from schemas.dead_letters import key_dead_letter
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.kv_snapshots import key_kv_manifest, key_kv_snapshot
from schemas.registry import key_instance, key_lease, key_model
from schemas.topic import TopicSpec
from tests.unit.schemas.samples import COLUMN, IDS, SAMPLES

CODECS = {spec.name: TopicCodec(spec) for spec in TOPICS}
REASONS = {"undecodable", "unknown_version", "too_large", "missing_identity"}
each_topic = pytest.mark.parametrize("spec", TOPICS, ids=lambda spec: spec.name)
each_sample = pytest.mark.parametrize(("spec", "value"), SAMPLES, ids=IDS)


def reason_for(spec: TopicSpec, data: bytes, headers: tuple[tuple[str, bytes], ...] = ()) -> str:
    with pytest.raises(SchemaError) as caught:
        CODECS[spec.name].decode(data, headers)
    assert caught.value.detail
    return caught.value.reason


def outcome(codec: TopicCodec, data: bytes) -> str:
    try:
        codec.decode(data)
    except SchemaError as error:
        return error.reason
    return "decoded"


def test_samples_cover_every_type_of_every_topic() -> None:
    wanted = {(spec.name, kind) for spec in TOPICS for kind in get_args(spec.value) or (spec.value,)}
    assert {(spec.name, type(value)) for spec, value in SAMPLES} == wanted


@each_sample
def test_value_comes_back_as_it_was(spec: TopicSpec, value: msgspec.Struct) -> None:
    codec = CODECS[spec.name]
    data = codec.encode(value)
    assert codec.decode(data) == codec.decode(data, codec.headers) == value
    assert type(codec.decode(data)) is type(value)
    assert codec.encode(codec.decode(data)) == data


@each_sample
def test_value_starts_with_tag_and_version(spec: TopicSpec, value: msgspec.Struct) -> None:
    loose = msgspec.msgpack.decode(CODECS[spec.name].encode(value))
    assert loose[:2] == [type(value).__struct_config__.tag, spec.version]


@each_sample
def test_other_version_is_refused(spec: TopicSpec, value: msgspec.Struct) -> None:
    for version in (0, 2, 2**63):
        data = msgspec.msgpack.encode(msgspec.structs.replace(value, version=version))
        assert reason_for(spec, data) == "unknown_version"


@each_topic
def test_other_version_with_another_layout_is_refused_as_a_version(spec: TopicSpec) -> None:
    assert reason_for(spec, msgspec.msgpack.encode(["from-the-future", 2, {"a": 1}])) == "unknown_version"


@each_sample
def test_trailing_fields_of_a_later_writer_are_ignored(spec: TopicSpec, value: msgspec.Struct) -> None:
    loose = msgspec.msgpack.decode(CODECS[spec.name].encode(value))
    assert CODECS[spec.name].decode(msgspec.msgpack.encode([*loose, "later", {"more": 1}])) == value


@each_topic
def test_header_decides_before_the_value(spec: TopicSpec) -> None:
    data = next(CODECS[spec.name].encode(value) for owner, value in SAMPLES if owner is spec)
    later = ((SCHEMA_HEADER, f"{spec.name}/2".encode()),)
    assert reason_for(spec, data, later) == "unknown_version"
    assert reason_for(spec, data, ((SCHEMA_HEADER, b"other-topic/1"),)) == "undecodable"
    assert reason_for(spec, data, ((SCHEMA_HEADER, b"\xff" * 1000),)) == "undecodable"
    assert reason_for(spec, data, (("x", b"1"), *later)) == "unknown_version"


@each_topic
def test_foreign_headers_beside_ours_do_no_harm(spec: TopicSpec) -> None:
    codec = CODECS[spec.name]
    value = next(value for owner, value in SAMPLES if owner is spec)
    data = codec.encode(value)
    assert codec.decode(data, (("traceparent", b"00-0-0-0"), *codec.headers)) == value
    assert codec.decode(data, (("traceparent", b"\xff"),)) == value


@each_sample
def test_truncated_value_is_refused_wherever_it_is_cut(spec: TopicSpec, value: msgspec.Struct) -> None:
    data = CODECS[spec.name].encode(value)
    for end in range(len(data)):
        assert reason_for(spec, data[:end]) == "undecodable"


@each_sample
def test_bytes_after_the_value_are_refused(spec: TopicSpec, value: msgspec.Struct) -> None:
    assert reason_for(spec, CODECS[spec.name].encode(value) + b"\x00") in REASONS


@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused_or_decoded_and_nothing_else(data: bytes) -> None:
    for codec in CODECS.values():
        assert outcome(codec, data) in {"decoded", *REASONS}


@given(sample=st.sampled_from(SAMPLES), position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_one_flipped_byte_is_refused_or_decoded_and_nothing_else(
    sample: tuple[TopicSpec, msgspec.Struct], position: int, byte: int
) -> None:
    codec = CODECS[sample[0].name]
    data = bytearray(codec.encode(sample[1]))
    data[position % len(data)] = byte
    assert outcome(codec, bytes(data)) in {"decoded", *REASONS}


@each_topic
@pytest.mark.parametrize("value", [None, 1, "text", {}, {"version": 1}, [], ["kv-events"], [1], ["x", "1"], [[], {}]])
def test_value_without_tag_and_version_has_no_identity(spec: TopicSpec, value: object) -> None:
    assert reason_for(spec, msgspec.msgpack.encode(value)) == "missing_identity"


@each_topic
def test_unknown_tag_is_refused(spec: TopicSpec) -> None:
    assert reason_for(spec, msgspec.msgpack.encode(["os.system", 1, "true"])) == "undecodable"


@each_topic
def test_value_of_another_topic_is_refused(spec: TopicSpec) -> None:
    for owner, value in SAMPLES:
        if owner is not spec:
            assert reason_for(spec, CODECS[owner.name].encode(value)) == "undecodable"


@each_topic
def test_ten_megabytes_are_refused_without_being_decoded(spec: TopicSpec) -> None:
    assert reason_for(spec, b"\x91" * 10_000_000) == "too_large"


def test_writer_refuses_what_readers_would() -> None:
    column = bytes(KV_EVENTS.max_value_bytes // 2 // 8 * 8)
    value = KvEvents(1, "m", 1, 0, 1, 0, 16, False, [BlocksStored("device", None, column, column)])
    with pytest.raises(SchemaError) as caught:
        CODECS["kv-events"].encode(value)
    assert caught.value.reason == "too_large"
    assert "kv-events takes 1000000" in caught.value.detail


NESTED = {
    "arrays": b"\x91" * 900_000,
    "maps": b"\x81\x01" * 450_000,
    "arrays in a value": b"\x92\xaakv-events-\x01" + b"\x91" * 900_000,
}
CLAIMS = {
    "array of 2^32 items": b"\xdd\xff\xff\xff\xff",
    "map of 2^32 items": b"\xdf\xff\xff\xff\xff",
    "bin of 2^32 bytes": b"\xc6\xff\xff\xff\xff",
    "str of 2^32 bytes": b"\xdb\xff\xff\xff\xff",
}


@each_topic
@pytest.mark.parametrize("data", [*NESTED.values(), *CLAIMS.values()], ids=[*NESTED, *CLAIMS])
def test_nesting_and_length_bombs_are_refused(spec: TopicSpec, data: bytes) -> None:
    assert reason_for(spec, data) in {"undecodable", "missing_identity"}


@pytest.mark.parametrize("end", [b"\xc0\x80", b"\x80"], ids=["user_data", "details"])
@pytest.mark.parametrize("bomb", [*NESTED.values(), *CLAIMS.values()], ids=[*NESTED, *CLAIMS])
def test_bombs_inside_free_form_fields_are_refused(bomb: bytes, end: bytes) -> None:
    card = next(value for _, value in SAMPLES if type(value).__name__ == "ModelCard")
    data = CODECS["registry"].encode(msgspec.structs.replace(card, user_data=None, details={}))
    assert data.endswith(b"\xc0\x80")
    assert reason_for(topic_spec("registry"), data.removesuffix(end) + bomb) == "undecodable"


def test_model_cards_of_an_earlier_writer_have_no_details() -> None:
    card = next(value for _, value in SAMPLES if type(value).__name__ == "ModelCard")
    fields = msgspec.msgpack.decode(CODECS["registry"].encode(card))
    earlier = CODECS["registry"].decode(msgspec.msgpack.encode(fields[:-1]))
    assert earlier == msgspec.structs.replace(card, details={})


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


@each_topic
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_SEC_05_pickle_bytes_are_refused_and_never_executed(spec: TopicSpec, protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    payload = pickle.dumps(Payload(target), protocol)
    assert reason_for(spec, payload) in REASONS
    assert reason_for(spec, payload, ((SCHEMA_HEADER, payload),)) == "undecodable"
    data = next(CODECS[spec.name].encode(value) for owner, value in SAMPLES if owner is spec)
    CODECS[spec.name].decode(data, ((payload.decode("latin-1"), payload),))
    assert not target.exists()


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (["stored", "device", None, COLUMN[:-1], COLUMN], "sequence_hashes has 23 bytes, not a multiple of 8"),
        (["stored", "device", None, COLUMN, COLUMN[:-1]], "tokens_hashes has 23 bytes, not a multiple of 8"),
        (["stored", "device", None, COLUMN, COLUMN[:-8]], "tokens_hashes has 2 values, the column before it 3"),
        (["removed", "device", COLUMN[:-1]], "sequence_hashes has 23 bytes, not a multiple of 8"),
        (["stored", "tape", None, COLUMN, COLUMN], "Invalid enum value 'tape'"),
    ],
)
def test_columns_that_do_not_fit_are_refused(stored: list[object], text: str) -> None:
    data = msgspec.msgpack.encode(["kv-events", 1, "m", 1, 0, 1, 0, 16, False, [stored]])
    with pytest.raises(SchemaError, match=text) as caught:
        CODECS["kv-events"].decode(data)
    assert caught.value.reason == "undecodable"


def test_header_is_name_and_version() -> None:
    assert CODECS["kv-events"].headers == (("schema", b"kv-events/1"),)


def test_topic_is_found_by_name() -> None:
    assert [topic_spec(spec.name) for spec in TOPICS] == list(TOPICS)
    assert KV_EVENTS.qualified("prod") == "prod.kv-events"
    with pytest.raises(KeyError, match="no topic 'nope'; there are kv-events, "):
        topic_spec("nope")


def test_keys_separate_what_they_name() -> None:
    assert key_kv_events("org/m", 2**64 - 1, 3) == b"org/m/18446744073709551615:3"
    assert key_kv_snapshot("m", 1, 0, 1, 2) == b"m/1:0/1/2"
    assert key_kv_manifest(3, 1) == b"manifest/3/1"
    assert key_dead_letter("dynamo.requests", 3, 17) == b"dynamo.requests:3:17"
    assert key_lease(2**64 - 1) == b"lease/ffffffffffffffff"
    assert key_instance("a/b", "c", "d", 1) != key_instance("a", "b/c", "d", 1)
    assert key_instance("n", "c", "é ", 255) == b"instance/n/c/%C3%A9%20/ff"
    assert key_model("n", "c", "e", 1) == b"model/n/c/e/1"
    assert key_model("n", "c", "e", 1, "x/y") == b"model/n/c/e/1/x%2Fy"
