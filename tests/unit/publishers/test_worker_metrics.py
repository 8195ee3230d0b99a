from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.publishers.worker_metrics import LoadSlots, MeasuredLoad, WorkerMetricsPublisher
from schemas.worker_load import WORKER_LOAD
from tests.unit.publishers.support import ListSink, Scope

GOLDEN = Path(__file__).parents[2] / "data/golden/services/worker_metrics_publisher.json"


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope()
    yield scope
    await scope.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def told(scope: Scope) -> list[tuple[int, int | None, int | None]]:
    return [
        (value.dp_rank, value.active_decode_blocks, value.kv_used_blocks) for value in scope.sink.values(WORKER_LOAD)
    ]


async def test_each_rank_has_its_slot_and_only_changes_are_told(scope: Scope) -> None:
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope)
    publisher.publish(0, 10)
    publisher.publish(1, None, 7)
    await until(lambda: len(told(scope)) == 2)
    assert told(scope) == [(0, 10, None), (1, None, 7)], "the second rank does not replace the first"
    publisher.publish(0, 10)
    publisher.publish(0, 12, 3)
    publisher.publish(0, 13, 3)
    await until(lambda: len(told(scope)) == 3)
    assert told(scope)[-1] == (0, 13, 3), "within the debounce the last value counts"
    publisher.publish(1, None, 7)
    publisher.publish(0, 14)
    await until(lambda: len(told(scope)) == 4)
    assert told(scope)[-1] == (0, 14, None)


async def test_everything_that_the_reference_told_is_told(scope: Scope) -> None:
    """golden/services/worker_metrics_publisher.json. There one slot serves all ranks, so that a value can be lost, and
    one that did not change is told again after another rank's; here each rank has its own.
    """
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope)
    steps: list[tuple[list[tuple[int, int | None, int | None]], int]] = [
        ([(0, 10, None), (1, None, 7)], 2),
        ([(0, 10, None)], 2),
        ([(0, 10, None), (0, 12, 3)], 3),
        ([(1, None, 7)], 3),
        ([(1, 5, None)], 4),
    ]
    for calls, told_by_then in steps:
        for call in calls:
            publisher.publish(*call)
        await until(lambda wanted=told_by_then: len(told(scope)) == wanted)
    recorded = [
        (value["dp_rank"], value["active_decode_blocks"], value["kv_used_blocks"])
        for _, value in json.loads(GOLDEN.read_text())["observed_ms"]
    ]
    assert told(scope) == [(0, 10, None), (1, None, 7), (0, 12, 3), (1, 5, None)]
    assert set(recorded) == set(told(scope))


async def test_what_was_published_early_is_told_when_the_endpoint_is_there(scope: Scope) -> None:
    publisher = WorkerMetricsPublisher()
    publisher.publish(None, 1)
    publisher.publish(None, 2)
    publisher.publish(3, kv_used_blocks=5)
    await publisher.create_endpoint(scope)
    await until(lambda: len(told(scope)) == 2)
    assert told(scope) == [(0, 2, None), (3, None, 5)]


async def test_every_rank_is_told_again_while_nothing_changes(scope: Scope) -> None:
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope, resend_interval_s=0.02)
    publisher.publish(0, 1)
    publisher.publish(1, 2)
    await until(lambda: len(told(scope)) >= 6)
    assert told(scope)[2:4] == [(0, 1, None), (1, 2, None)]


async def test_a_metric_is_needed_and_must_be_a_count(scope: Scope) -> None:
    publisher = WorkerMetricsPublisher()
    with pytest.raises(Exception, match=r"^worker metrics publish requires at least one load metric$"):
        publisher.publish(0, running=4)
    with pytest.raises(OverflowError, match="can't convert negative int to unsigned"):
        publisher.publish(0, -1)
    await publisher.create_endpoint(scope)
    await publisher.create_endpoint(scope)


async def test_values_from_another_thread_arrive(scope: Scope) -> None:
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope)
    thread = threading.Thread(target=lambda: publisher.publish(0, 9, total_kv_blocks=64, running=2, waiting=1))
    thread.start()
    await until(lambda: bool(told(scope)))
    thread.join()
    (value,) = scope.sink.values(WORKER_LOAD)
    assert (value.total_kv_blocks, value.running, value.waiting, value.model) == (64, 2, 1, "m")


async def test_a_value_comes_through_once_the_model_is_registered(scope: Scope) -> None:
    scope.model = None
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope)
    publisher.publish(0, 1)
    await asyncio.sleep(0.01)
    assert not told(scope)
    scope.model = "late"
    await until(lambda: bool(told(scope)))
    assert scope.sink.values(WORKER_LOAD)[0].model == "late"


async def test_after_the_end_nothing_is_told() -> None:
    scope = Scope()
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(scope)
    publisher.publish(0, 1)
    await scope.close()
    assert told(scope) == [(0, 1, None)], "the last value goes out"
    publisher.publish(0, 2)
    await asyncio.sleep(0.01)
    assert len(told(scope)) == 1


def test_what_the_log_did_not_take_stays_to_be_told() -> None:
    sink = ListSink(room=0)
    slots = LoadSlots(sink, ManualClock(), lambda: "m", 7, 1)
    assert slots.put(0, MeasuredLoad(1))
    assert not slots.tell()
    sink.room = None
    assert slots.tell()
    assert not slots.put(0, MeasuredLoad(1))
    assert [value.kv_used_blocks for value in sink.values(WORKER_LOAD)] == [1]
