"""What goes by a lane and what is iterated, of a stream of the request plane."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import StreamSilent
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.request_client import ClientLimits, ClientStream
from dynamo_es.runtime.wire import Credit, PayloadCodec, WireError
from tests.support.runtimes import wait_for

NO_MSGPACK = msgspec.Raw(b"\xc1")


class FakeConnection:
    """What a stream asks of its connection."""

    instance_id = 7

    def __init__(self, window: int = 1000, item_timeout_s: float | None = None) -> None:
        self.limits = ClientLimits(window, 1 << 20, 1.0, 1.0, None, item_timeout_s)
        self.payloads = PayloadCodec()
        self.loop = asyncio.get_running_loop()
        self.sent: list[Any] = []

    def queue(self, frame: Any) -> None:
        self.sent.append(frame)

    def forget(self, number: int) -> None:
        pass


class Reader:
    """Iterates a stream in a task; takes by lane what is not in ``refused``."""

    def __init__(self, connection: FakeConnection, refused: tuple[int, ...] = ()) -> None:
        self.got: list[tuple[str, list[Any]]] = []
        self.seen: list[Any] = []
        self.context = Context()
        self.gate = asyncio.Event()
        self.gate.set()
        self.iterations = 0
        self._refused = refused
        lane = Lane(self._take)
        lane.watch(self.seen.extend)
        self.stream = ClientStream(connection, 1, self.context, lane)  # type: ignore[arg-type]
        self.task = asyncio.create_task(self._run())

    async def give(self, *items: int) -> None:
        """Deliver what comes in one message, and let the reader wait again."""
        encode = self.stream._connection.payloads.encode
        self.stream.deliver([encode(item) for item in items])
        for _ in range(5):
            await asyncio.sleep(0)

    def _take(self, batch: list[Any]) -> bool:
        if set(batch) & set(self._refused):
            return False
        self.got.append(("lane", batch))
        return True

    async def _run(self) -> None:
        async with aclosing(self.stream.batches()) as batches:
            async for batch in batches:
                self.got.append(("iterated", batch))
                await self.gate.wait()


async def test_the_first_batch_and_what_the_reader_leaves_are_iterated_the_rest_goes_by_lane_in_order() -> None:
    reader = Reader(FakeConnection(), refused=(4,))
    for items in ((1, 2), (3,), (4, 5), (6,)):
        await reader.give(*items)
    reader.stream.finish(None)
    await reader.task
    assert reader.got == [("iterated", [1, 2]), ("lane", [3]), ("iterated", [4, 5]), ("lane", [6])]
    assert reader.seen == [3, 6]


async def test_what_comes_while_the_reader_is_busy_is_iterated_after_it() -> None:
    reader = Reader(FakeConnection())
    reader.gate.clear()
    await reader.give(1)
    await reader.give(2)
    await reader.give(3)
    assert reader.got == [("iterated", [1])]
    reader.gate.set()
    await reader.give(4)
    await reader.give(5)
    reader.stream.finish(None)
    await reader.task
    assert [item for _, batch in reader.got for item in batch] == [1, 2, 3, 4, 5]
    assert reader.got[-1] == ("lane", [5])


async def test_both_ways_count_for_the_credit() -> None:
    connection = FakeConnection(window=4)
    reader = Reader(connection, refused=(3,))
    for item in range(1, 7):
        await reader.give(item)
    assert connection.sent == [Credit(1, 2), Credit(1, 2), Credit(1, 2)]
    reader.stream.finish(None)
    await reader.task


async def test_a_stream_that_falls_silent_after_items_by_lane_is_given_up() -> None:
    connection = FakeConnection(item_timeout_s=0.2)
    reader = Reader(connection)
    await reader.give(0)
    begin = connection.loop.time()
    while connection.loop.time() < begin + 0.4:
        await reader.give(1)
        await asyncio.sleep(0.01)
    assert not reader.task.done()
    assert {way for way, _ in reader.got[1:]} == {"lane"}
    with pytest.raises(StreamSilent):
        await reader.task


async def test_a_payload_that_is_none_is_raised_in_the_iteration_after_what_came_before() -> None:
    reader = Reader(FakeConnection())
    await reader.give(1)
    await reader.give(2)
    reader.stream.deliver([NO_MSGPACK])
    with pytest.raises(WireError):
        await reader.task
    assert reader.got == [("iterated", [1]), ("lane", [2])]


async def test_nothing_goes_by_lane_after_the_context_was_stopped() -> None:
    reader = Reader(FakeConnection())
    await reader.give(1)
    reader.context.stop_generating()
    await reader.give(2)
    await wait_for(reader.task.done)
    await reader.task
    assert reader.got == [("iterated", [1])]


async def test_a_loop_that_stood_still_over_the_limit_reads_what_has_come_before_it_gives_up() -> None:
    connection = FakeConnection(item_timeout_s=0.05)
    reader = Reader(connection, refused=(1,))
    await reader.give(0)
    await asyncio.sleep(0)
    encode = connection.payloads.encode
    # Ready in the same turn as the timer, and before it, as what a socket has is.
    connection.loop.call_at(connection.loop.time(), reader.stream.deliver, [encode(1)])
    time.sleep(0.2)  # noqa: ASYNC251 - a loop that stands still
    await wait_for(lambda: ("iterated", [1]) in reader.got)
    assert not reader.task.done()
    reader.task.cancel()
    await asyncio.wait((reader.task,))


async def test_a_reader_that_fails_on_the_lane_fails_alone_and_hears_of_it_itself() -> None:
    connection = FakeConnection()
    reader = Reader(connection)
    await reader.give(0)

    def fail(items: list[Any]) -> None:
        raise ZeroDivisionError("a defect")

    reader.stream._lane.watch(fail)  # type: ignore[union-attr]
    reader.stream.deliver([connection.payloads.encode(1)])
    with pytest.raises(ZeroDivisionError):
        await reader.task


async def test_an_item_nested_too_deep_costs_its_own_stream_only() -> None:
    reader = Reader(FakeConnection())
    await reader.give(0)
    reader.stream.deliver([msgspec.Raw(b"\x91" * 5000 + b"\xc0")])
    with pytest.raises(WireError):
        await reader.task
