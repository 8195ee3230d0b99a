from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.router.hashing import compute_block_hash_for_seq, compute_sequence_hashes
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksStored
from tests.unit.publishers.support import Reader, Scope, chain

ERRORS = json.loads((Path(__file__).parents[2] / "data/golden/services/kv_publisher_errors.json").read_text())["cases"]
STORED = {"type": "stored", "token_ids": [1, 2, 3, 4], "num_block_tokens": [4], "block_hashes": [1]}
CALLS: dict[str, Callable[[KvEventPublisher], None]] = {
    "stored:([1,2,3,4],[4],[1])": lambda p: p.publish_stored([1, 2, 3, 4], [4], [1]),
    "stored:([1,2,3,4],[4],[1,2])": lambda p: p.publish_stored([1, 2, 3, 4], [4], [1, 2]),
    "stored:([1,2,3,4],[4,4],[1,2])": lambda p: p.publish_stored([1, 2, 3, 4], [4, 4], [1, 2]),
    "stored:([1..5],[4],[1])": lambda p: p.publish_stored([1, 2, 3, 4, 5], [4], [1]),
    "stored:([-1],[1],[1])": lambda p: p.publish_stored([-1], [1], [1]),
    "stored:([1,2,3,4],[4],[-5],parent_hash=-6)": lambda p: p.publish_stored([1, 2, 3, 4], [4], [-5], parent_hash=-6),
    "stored:block_mm_infos=[]": lambda p: p.publish_stored([1, 2, 3, 4], [4], [1], block_mm_infos=[]),
    "stored:block_mm_infos=[None,None]": lambda p: p.publish_stored([1, 2, 3, 4], [4], [1], block_mm_infos=[None] * 2),
    "stored:5 tokens is_eagle=True": lambda p: p.publish_stored([1, 2, 3, 4, 5], [4], [1], is_eagle=True),
    "stored:lora_name=''": lambda p: p.publish_stored([1, 2, 3, 4], [4], [1], lora_name=""),
    "stored:([1..8],[4,4],[1,2])": lambda p: p.publish_stored(list(range(1, 9)), [4, 4], [1, 2]),
    "removed:[2**63]": lambda p: p.publish_removed([2**63]),
    "batch:[]": lambda p: p.publish_batch([]),
    "batch:[stored]": lambda p: p.publish_batch([STORED]),
    "batch:[removed [1]]": lambda p: p.publish_batch([{"type": "removed", "block_hashes": [1]}]),
    "batch:{}": lambda p: p.publish_batch([{}]),
    "batch:[stored, removed without block_hashes]": lambda p: p.publish_batch([STORED, {"type": "removed"}]),
    "batch:removed+token_ids": lambda p: p.publish_batch([{"type": "removed", "block_hashes": [1], "token_ids": []}]),
    "batch:type cleared": lambda p: p.publish_batch([{"type": "cleared"}]),
    "batch:stored block_hashes [1,2]": lambda p: p.publish_batch([{**STORED, "block_hashes": [1, 2]}]),
    "batch:parent_hash None, lora None": lambda p: p.publish_batch(
        [{**STORED, "parent_hash": None, "lora_name": None}]
    ),
    "batch:[5]": lambda p: p.publish_batch([5]),  # type: ignore[list-item]
    "batch:dict instead of list": lambda p: p.publish_batch({"type": "stored"}),  # type: ignore[arg-type]
    "batch:token_ids too short": lambda p: p.publish_batch([{**STORED, "token_ids": [1]}]),
    "batch:tuple with removed []": lambda p: p.publish_batch(({"type": "removed", "block_hashes": []},)),
}


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope()
    yield scope
    await scope.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def payload(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def engine_store(name: int, tokens: list[int], parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4,
    }  # fmt: skip


@pytest.mark.parametrize("case", [case for case in ERRORS if case["case"] in CALLS], ids=lambda case: case["case"])
async def test_arguments_are_taken_and_refused_as_recorded(case: dict[str, Any], scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    expected = case["result"]
    if "err" not in expected:
        CALLS[case["case"]](publisher)
        return
    with pytest.raises(Exception) as caught:
        CALLS[case["case"]](publisher)
    assert (type(caught.value).__name__, str(caught.value)) == (expected["err"], expected["msg"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, Exception, "kv_block_size cannot be 0"),
        ({"kv_block_size": -1}, OverflowError, "can't convert negative int to unsigned"),
        ({"kv_block_size": 4, "dp_rank": -1}, OverflowError, "out of range integral type conversion attempted"),
        ({"kv_block_size": "4"}, TypeError, "argument 'kv_block_size'"),
    ],
)
async def test_constructor_errors(scope: Scope, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        KvEventPublisher(scope, **arguments)
    assert type(caught.value) is error


async def test_after_shutdown_every_publish_says_so(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.shutdown()
    publisher.shutdown()
    for call in (
        lambda: publisher.publish_stored([1, 2, 3, 4], [4], [1]),
        lambda: publisher.publish_removed([1]),
        lambda: publisher.publish_batch([STORED]),
        publisher.publish_cleared,
    ):
        with pytest.raises(Exception, match=r"^channel closed$"):
            call()


async def test_manual_events_arrive_as_sequence_hashes(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, worker_id=42, kv_block_size=4, dp_rank=3)
    publisher.publish_stored(list(range(8)), [4, 4], [-5, 12])
    publisher.publish_batch(
        [
            {
                "type": "stored",
                "token_ids": [8, 9, 10, 11],
                "num_block_tokens": [4],
                "block_hashes": [13],
                "parent_hash": 12,
            },
            {"type": "removed", "block_hashes": [-5]},
        ]
    )
    records = scope.sink.kv
    assert [(record.worker_id, record.dp_rank, record.seq) for record in records] == [
        (42, 3, 0),
        (42, 3, 1),
        (42, 3, 2),
    ]
    assert Reader().apply_all(records).held(rank=3) == set(chain(range(12))[1:])
    publisher.publish_cleared()
    assert not Reader().apply_all(scope.sink.kv).held(rank=3)
    assert publisher.counters()["known_blocks"] == 0


async def test_a_wrong_token_count_ends_the_walk(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.publish_stored(list(range(12)), [4, 3, 4], [1, 2, 3])
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(4)))


async def test_multimodal_infos_lora_and_salt_enter_the_hash(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    infos = [{"mm_objects": [{"mm_hash": 5, "offsets": []}]}]
    publisher.publish_stored([1, 2, 3, 4], [4], [1], block_mm_infos=infos, lora_name="l", cache_salt="s")
    event = scope.sink.kv[-1].events[0]
    assert isinstance(event, BlocksStored)
    expected = compute_block_hash_for_seq([1, 2, 3, 4], 4, infos, "l", None, "s")
    assert unpack_u64(event.tokens_hashes) == tuple(expected)
    assert unpack_u64(event.sequence_hashes) == tuple(compute_sequence_hashes(expected))
    with pytest.raises(Exception, match="missing field `mm_objects`"):
        publisher.publish_stored([1, 2, 3, 4], [4], [1], block_mm_infos=[{}])
    with pytest.raises(ValueError, match="invalid KV event batch: missing field `mm_objects`"):
        publisher.publish_batch([{**STORED, "block_mm_infos": [{}]}])


async def test_calls_from_other_threads_keep_their_order(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)

    def engine() -> None:
        for number in range(500):
            publisher.publish_stored([number] * 4, [4], [number])
            publisher.publish_removed([number - 10])

    thread = threading.Thread(target=engine)
    thread.start()
    await until(lambda: not thread.is_alive() and publisher.counters()["known_blocks"] == 10)
    thread.join()
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.held() == {chain([number] * 4)[0] for number in range(490, 500)}
    assert reader.gaps == 0


async def test_a_batching_time_merges_what_comes_within_it(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4, batching_timeout_ms=20)
    for number in range(50):
        publisher.publish_stored([number] * 4, [4], [number], parent_hash=number - 1 if number else None)
    assert len(scope.sink.kv) <= 2, "the first one goes at once"
    await until(lambda: len(Reader().apply_all(scope.sink.kv).held()) == 50)
    assert len(scope.sink.kv) == 3
    assert len(scope.sink.kv[-1].events) == 1
    publisher.publish_removed([49])
    publisher.shutdown()
    assert len(Reader().apply_all(scope.sink.kv).held()) == 49, "shutdown publishes what waits"


async def test_what_happened_before_the_model_was_registered_is_told_afterwards() -> None:
    scope = Scope(model=None)
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.publish_stored(list(range(8)), [4, 4], [1, 2])
    publisher.publish_removed([2])
    assert not scope.sink.records
    scope.model = "m"
    await until(lambda: bool(scope.sink.kv))
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(4)))
    await scope.close()


async def test_when_the_log_takes_records_again_readers_are_exact(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.publish_stored(list(range(8)), [4, 4], [1, 2])
    scope.sink.room = 0
    publisher.publish_removed([2])
    publisher.publish_stored([50, 51, 52, 53], [4], [3])
    scope.sink.room = None
    await until(lambda: publisher.counters()["resyncs"] == 2)
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.held() == {chain(range(4))[0], *chain([50, 51, 52, 53])}
    assert (reader.gaps, publisher.counters()["losses"]) == (0, 1)


async def test_IDX_07_a_parent_that_was_cached_before_is_named(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    sequence = chain(range(16))
    publisher.publish_stored(list(range(12)), [4, 4, 4], [1, 2, 3])
    publisher.publish_stored(list(range(12, 16)), [4], [4], parent_hash=3)
    event = scope.sink.kv[-1].events[0]
    assert isinstance(event, BlocksStored)
    assert event.parent == sequence[2]


async def test_IDX_08_the_rank_of_the_batch_decides() -> None:
    scope = Scope(dp_size=2)
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.on_batch(0, payload(engine_store(1, [0, 1, 2, 3]), rank=1))
    publisher.on_idle()
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.depth(chain(range(4)), rank=1) == 1
    assert reader.depth(chain(range(4)), rank=0) == 0
    await scope.close()


async def test_IDX_09_a_missing_rank_is_rank_0_only_if_there_is_one_rank() -> None:
    for ranks, rank_0 in ((1, 1), (4, 0)):
        scope = Scope(dp_size=ranks)
        publisher = KvEventPublisher(scope, kv_block_size=4)
        publisher.on_batch(0, payload(engine_store(1, [0, 1, 2, 3])))
        publisher.on_idle()
        assert Reader().apply_all(scope.sink.kv).depth(chain(range(4))) == rank_0
        assert [letter.reason for letter in scope.sink.dead_letters] == ["missing_identity"] * (ranks > 1)
        await scope.close()


async def test_IDX_10_a_clear_with_a_rank_clears_it_and_one_without_clears_all() -> None:
    scope = Scope(dp_size=2)
    publisher = KvEventPublisher(scope, kv_block_size=4)
    clear = {"type": "AllBlocksCleared"}
    for rank in (0, 1):
        publisher.on_batch(rank, payload(engine_store(1, [0, 1, 2, 3]), rank=rank))
    publisher.on_batch(2, payload(clear, rank=0))
    publisher.on_idle()
    reader = Reader().apply_all(scope.sink.kv)
    assert (len(reader.held(0)), len(reader.held(1))) == (0, 1)
    publisher.on_batch(3, payload(engine_store(1, [0, 1, 2, 3]), rank=0))
    publisher.on_batch(4, payload(clear))
    publisher.on_idle()
    assert not any(Reader().apply_all(scope.sink.kv).blocks.values())
    assert not scope.sink.dead_letters
    await scope.close()


async def test_a_batch_that_cannot_be_read_withdraws_the_blocks(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.on_batch(0, payload(engine_store(1, [0, 1, 2, 3]), rank=0))
    publisher.on_idle()
    publisher.on_batch(1, b"junk")
    publisher.on_idle()
    assert not Reader().apply_all(scope.sink.kv).held()
    assert scope.sink.dead_letters[0].reason == "undecodable"
    incarnations = publisher.counters()["incarnations"]
    publisher.on_batch(2, b"junk")
    assert publisher.counters()["incarnations"] == incarnations, "what is empty needs no new beginning"


async def test_dead_letters_are_rare_and_hold_no_tokens(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    for seq in range(1000):
        publisher.on_batch(seq, payload({"type": "Surprise", "token_ids": [1, 2]}, rank=0))
    assert len(scope.sink.dead_letters) < 5
    assert scope.sink.dead_letters[0].value is None
    assert scope.sink.dead_letters[0].value_bytes > 10
    assert publisher.counters()["rejected_events"] == 1000


async def test_too_many_waiting_calls_count_as_a_loss(scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_es.publishers.kv_events.MAX_HANDED_OVER_UNITS", 5)
    publisher = KvEventPublisher(scope, kv_block_size=4)

    def engine() -> None:
        for number in range(8):
            publisher.publish_stored([number] * 4, [4], [number])

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    await until(lambda: publisher.counters()["lost_batches"] == 3)
    assert not Reader().apply_all(scope.sink.kv).held()


async def test_resync_announces_everything_again(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.publish_stored(list(range(8)), [4, 4], [1, 2])
    publisher.resync()
    assert scope.sink.kv[-1].reset
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(8)))


async def test_after_a_new_registration_the_blocks_are_announced_under_a_new_incarnation(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    publisher.publish_stored(list(range(8)), [4, 4], [1, 2])
    for renew in scope.renewals:
        renew()
    first, last = scope.sink.kv[0], scope.sink.kv[-1]
    assert first.incarnation != last.incarnation
    assert (last.seq, last.reset) == (0, True)
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(8)))


async def test_what_waits_for_the_batching_time_survives_a_new_registration_once(scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4, batching_timeout_ms=50)
    publisher.publish_stored(list(range(4)), [4], [1])
    publisher.publish_stored(list(range(4, 8)), [4], [2], parent_hash=1)
    for renew in scope.renewals:
        renew()
    publisher.publish_removed([2])
    publisher.shutdown()
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(4)))


async def test_a_relay_that_breaks_down_withdraws_the_blocks(
    scope: Scope, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()

    async def broken(self: object) -> None:
        await go_on.wait()
        raise RuntimeError("bug")

    monkeypatch.setattr("dynamo_es.publishers.zmq_relay.ZmqRelay.run", broken)
    publisher = KvEventPublisher(scope, kv_block_size=4, zmq_endpoint="tcp://127.0.0.1:1")
    publisher.on_batch(0, payload(engine_store(1, [0, 1, 2, 3]), rank=0))
    publisher.on_idle()
    assert Reader().apply_all(scope.sink.kv).held()
    go_on.set()
    await until(lambda: "blocks are withdrawn" in caplog.text)
    assert [dead.name for dead in scope.tasks.dead] == ["kv-event-relay"]
    assert not Reader().apply_all(scope.sink.kv).held()
