"""Forward passes as bytes, beside what the reference put on its event plane (golden/services/fpm_bytes.json)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.publishers.forward_pass_bytes import MAX_PAYLOAD_BYTES, PassError, pack_pass, to_record, unpack_pass
from dynamo_es.publishers.forward_pass_relay import MAX_RANKS, PassForwarder
from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from tests.unit.publishers.support import Scope

SERVICES = Path(__file__).parents[2] / "data/golden/services"
GOLDEN = json.loads((SERVICES / "fpm_bytes.json").read_text())["cases"]
CADENCE = json.loads((SERVICES / "fpm_heartbeat_cadence.json").read_text())


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope(worker_id=42)
    yield scope
    await scope.close()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["case"])
def test_recorded_bytes_are_read_and_written_again_bit_for_bit(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["hex"])
    payload = unpack_pass(data)
    assert msgspec.to_builtins(payload) == case["decoded"]
    record = to_record(payload, "m", int(payload.worker_id), 1)
    assert pack_pass(record) == data


@pytest.mark.parametrize("value", CADENCE["example_published"], ids=["pass", "heartbeat"])
def test_keys_may_come_in_any_order_and_may_be_missing_or_new(value: dict[str, Any]) -> None:
    turned = dict(reversed(value.items())) | {"later": [1]}
    assert msgspec.to_builtins(unpack_pass(msgspec.msgpack.encode(turned))) == value
    empty = unpack_pass(msgspec.msgpack.encode({}))
    assert (empty.version, empty.worker_id, empty.dp_rank, empty.wall_time) == (1, "", 0, 0.0)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "no forward pass"),
        (b"\xff\xff", "no forward pass"),
        (b"\x81\xa1a\x01"[:-1], "no forward pass"),
        (b"\x91" * 5_000 + b"\x90", "no forward pass"),
        (b"\xdf\xff\xff\xff\xff", "no forward pass"),
        (msgspec.msgpack.encode({"version": 2}), "version 2, this version reads 1"),
        (msgspec.msgpack.encode({"dp_rank": -1}), "no forward pass"),
        (msgspec.msgpack.encode({"dp_rank": 2**32}), "dp_rank"),
        (msgspec.msgpack.encode({"scheduled_requests": {"num_prefill_requests": "1"}}), "no forward pass"),
        (b"\xc6" + (MAX_PAYLOAD_BYTES).to_bytes(4, "big") + bytes(MAX_PAYLOAD_BYTES), "at most 65536 are read"),
    ],
    ids=["empty", "no-msgpack", "cut", "deep", "huge-length", "version", "negative", "rank", "type", "long"],
)
async def test_bytes_that_are_no_pass_are_refused_and_cost_only_themselves(
    scope: Scope, data: bytes, text: str
) -> None:
    with pytest.raises(PassError, match=text):
        unpack_pass(data)
    forwarder = PassForwarder(scope)
    forwarder.forward(data)
    forwarder.forward(bytes.fromhex(GOLDEN[1]["hex"]))
    assert (forwarder.counters.malformed, forwarder.counters.forwarded) == (1, 1)


async def test_the_engines_own_counter_goes_along_and_a_fall_is_a_new_incarnation(scope: Scope) -> None:
    forwarder = PassForwarder(scope)
    for rank, counter in ((0, 1), (1, 1), (0, 2), (0, 4), (0, 1), (1, 2)):
        forwarder.forward(msgspec.msgpack.encode({"worker_id": "7", "dp_rank": rank, "counter_id": counter}))
    values = scope.sink.values(FORWARD_PASS)
    assert [(value.worker_id, value.dp_rank, value.counter) for value in values] == [
        (7, 0, 1), (7, 1, 1), (7, 0, 2), (7, 0, 4), (7, 0, 1), (7, 1, 2),
    ]  # fmt: skip
    zero = [value.incarnation for value in values if value.dp_rank == 0]
    assert zero[0] == zero[1] == zero[2] != zero[3]
    assert len({value.incarnation for value in values if value.dp_rank == 1}) == 1


async def test_a_foreign_worker_id_stands_for_this_process(scope: Scope, caplog: pytest.LogCaptureFixture) -> None:
    forwarder = PassForwarder(scope)
    for text in ("worker-A", str(2**64), "९"):
        forwarder.forward(msgspec.msgpack.encode({"worker_id": text}))
    assert {value.worker_id for value in scope.sink.values(FORWARD_PASS)} == {42}
    assert caplog.text.count("is no instance id") == 1


async def test_passes_wait_for_nobody(scope: Scope) -> None:
    forwarder = PassForwarder(scope)
    scope.model = None
    forwarder.forward(msgspec.msgpack.encode({"counter_id": 1}))
    scope.model, scope.sink.room = "m", 0
    forwarder.forward(msgspec.msgpack.encode({"counter_id": 2}))
    assert (forwarder.counters.dropped, forwarder.counters.forwarded) == (2, 0)


async def test_an_engine_with_endless_ranks_is_bounded(scope: Scope) -> None:
    forwarder = PassForwarder(scope)
    for rank in range(MAX_RANKS + 5):
        forwarder.forward(msgspec.msgpack.encode({"dp_rank": rank}))
    assert (forwarder.counters.forwarded, forwarder.counters.malformed) == (MAX_RANKS, 5)


COUNT = st.integers(0, 2**64 - 1)
FIGURE = st.floats(allow_nan=False)
PASSES = st.builds(
    ForwardPass,
    st.just(1), st.just("m"), COUNT, st.integers(0, 2**32 - 1), st.just(5), COUNT, FIGURE,
    st.builds(ScheduledRequests, COUNT, COUNT, FIGURE, COUNT, COUNT, COUNT, FIGURE),
    st.builds(QueuedRequests, COUNT, COUNT, FIGURE, COUNT, COUNT, FIGURE),
)  # fmt: skip


@given(PASSES)
def test_every_pass_survives_its_bytes(value: ForwardPass) -> None:
    payload = unpack_pass(pack_pass(value))
    assert to_record(payload, value.model, int(payload.worker_id), value.incarnation) == value


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    try:
        unpack_pass(data)
    except PassError:
        return
