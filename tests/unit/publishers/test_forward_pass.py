from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dynamo_es.publishers.forward_pass import FpmDirectPublisher
from schemas.forward_pass import FORWARD_PASS, QueuedRequests, ScheduledRequests
from tests.unit.publishers.support import Scope

PASS: dict[str, Any] = {
    "scheduled_num_prefill_requests": 1,
    "scheduled_sum_prefill_tokens": 200,
    "scheduled_sum_prefill_kv_tokens": 3,
    "scheduled_num_decode_requests": 4,
    "scheduled_sum_decode_kv_tokens": 70_000,
    "queued_num_prefill_requests": 6,
    "queued_sum_prefill_tokens": 7,
    "queued_num_decode_requests": 8,
    "queued_sum_decode_kv_tokens": 2**33,
    "wall_time_secs": 0.25,
    "dp_rank": 0,
}


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope(worker_id=42)
    yield scope
    await scope.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_pass_carries_all_counts_and_no_variance(scope: Scope) -> None:
    FpmDirectPublisher(scope, "7").publish(**PASS)
    (value,) = scope.sink.values(FORWARD_PASS)
    assert (value.model, value.worker_id, value.dp_rank, value.counter, value.wall_time_s) == ("m", 7, 0, 1, 0.25)
    assert value.scheduled == ScheduledRequests(1, 200, 0.0, 3, 4, 70_000, 0.0)
    assert value.queued == QueuedRequests(6, 7, 0.0, 8, 2**33, 0.0)
    assert scope.sink.records[0][1] == b"m/7:0"


async def test_each_rank_counts_alone_heartbeats_included(scope: Scope) -> None:
    publisher = FpmDirectPublisher(scope, "7", dp_size=2, heartbeat_interval_s=0.02)
    publisher.publish(**PASS | {"dp_rank": 1})
    await until(lambda: len(scope.sink.values(FORWARD_PASS)) >= 7)
    values = scope.sink.values(FORWARD_PASS)
    for rank in (0, 1):
        counters = [value.counter for value in values if value.dp_rank == rank]
        assert counters == list(range(1, len(counters) + 1))
    beats = [value for value in values if value.wall_time_s == 0.0]
    assert len(beats) == len(values) - 1
    assert all(value.scheduled == ScheduledRequests() and value.queued == QueuedRequests() for value in beats)


async def test_a_pass_puts_the_heartbeat_off(scope: Scope) -> None:
    publisher = FpmDirectPublisher(scope, "7", heartbeat_interval_s=5.0)
    before = publisher._due[0]
    await asyncio.sleep(0.01)
    publisher.publish(**PASS)
    assert publisher._due[0] > before


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"dp_rank": 2}, RuntimeError, "dp_rank 2 out of range; FpmDirectPublisher was constructed with dp_size=2"),
        ({"queued_sum_prefill_tokens": -1}, OverflowError, "can't convert negative int to unsigned"),
    ],
)
async def test_bad_arguments(scope: Scope, change: dict[str, Any], error: type[Exception], text: str) -> None:
    publisher = FpmDirectPublisher(scope, "7", dp_size=2)
    with pytest.raises(error, match=text):
        publisher.publish(**PASS | change)
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        publisher.publish(1)  # type: ignore[misc]
    publisher.publish(**PASS | {"wall_time_secs": -1.0})


async def test_after_shutdown_the_channel_is_closed(scope: Scope) -> None:
    publisher = FpmDirectPublisher(scope, "7")
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(Exception, match=r"^FPM publisher channel closed$"):
        publisher.publish(**PASS)
    FpmDirectPublisher(scope, "7", dp_size=0)


async def test_a_worker_id_that_is_none_stands_for_this_process(scope: Scope) -> None:
    FpmDirectPublisher(scope, "worker-A").publish(**PASS)
    assert scope.sink.values(FORWARD_PASS)[0].worker_id == 42


async def test_passes_from_another_thread_keep_their_order(scope: Scope) -> None:
    publisher = FpmDirectPublisher(scope, "7", heartbeat_interval_s=60)

    def engine() -> None:
        for number in range(200):
            publisher.publish(**PASS | {"wall_time_secs": float(number)})

    thread = threading.Thread(target=engine)
    thread.start()
    await until(lambda: len(scope.sink.records) == 200)
    thread.join()
    assert [value.wall_time_s for value in scope.sink.values(FORWARD_PASS)] == list(map(float, range(200)))


async def test_a_pass_that_the_log_did_not_take_leaves_a_hole_in_the_numbers(scope: Scope) -> None:
    publisher = FpmDirectPublisher(scope, "7")
    scope.sink.room = 0
    publisher.publish(**PASS)
    scope.sink.room = None
    publisher.publish(**PASS)
    assert [value.counter for value in scope.sink.values(FORWARD_PASS)] == [2]


async def test_nothing_is_sent_before_the_model_is_registered(scope: Scope) -> None:
    scope.model = None
    publisher = FpmDirectPublisher(scope, "7")
    publisher.publish(**PASS)
    scope.model = "m"
    publisher.publish(**PASS)
    assert [value.counter for value in scope.sink.values(FORWARD_PASS)] == [1]
