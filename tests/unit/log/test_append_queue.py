"""The writer thread with a partition that does as it is told: no files."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo_es.log.base import Position
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.embedded_writer import AppendQueue, AppendWork, close_queues
from dynamo_es.log.errors import LogClosed, LogFull, LogUnavailable

DEADLINE_S = 60.0


class FakeWriter:
    def __init__(self):
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = None
        self.closed = False

    def append(self, rows):
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        first = sum(map(len, self.batches))
        self.batches.append(list(rows))
        return first

    def close(self):
        self.closed = True


@pytest.fixture
def writers():
    return {0: FakeWriter(), 1: FakeWriter()}


async def start(writers, **options):
    queue = AppendQueue(
        lambda position: writers[position.partition],
        EmbeddedOptions(**options),
        asyncio.get_running_loop(),
        "embedded:///x",
    )
    queue.start()
    return queue


def work(*partitions, size=10):
    return AppendWork("t", [(partition, (0, None, b"x" * size, None)) for partition in partitions], size)


async def hold(queue, writer):
    """An append that the thread is busy with, so that everything after it waits."""
    writer.gate.clear()
    busy = asyncio.create_task(queue.submit(work(0)))
    assert await asyncio.to_thread(writer.entered.wait, DEADLINE_S)
    return busy


async def test_what_waits_together_is_committed_together(writers):
    queue = await start(writers)
    busy = await hold(queue, writers[0])
    tasks = [asyncio.create_task(queue.submit(work(number % 2))) for number in range(10)]
    await asyncio.sleep(0)
    writers[0].gate.set()
    results = await asyncio.gather(busy, *tasks)
    assert [len(batch) for batch in writers[0].batches] == [1, 5]
    assert [len(batch) for batch in writers[1].batches] == [5]
    assert results[1] == [Position("t", 0, 1)]
    assert results[2] == [Position("t", 1, 0)]
    assert await queue.close()
    assert writers[0].closed


async def test_an_error_reaches_only_those_it_concerns(writers):
    queue = await start(writers)
    writers[1].error = LogFull("no space")
    busy = await hold(queue, writers[0])
    tasks = [asyncio.create_task(queue.submit(work(*parts))) for parts in ((0,), (1,), (0, 1), (1,))]
    await asyncio.sleep(0)
    writers[0].gate.set()
    await busy
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[0] == [Position("t", 0, 1)]
    errors = results[1:]
    assert all(isinstance(error, LogFull) and str(error) == "no space" for error in errors)
    assert len({id(error) for error in errors}) == 3
    await queue.close()


async def test_a_transaction_is_bounded(writers):
    queue = await start(writers)
    positions = await queue.submit(work(*[0] * 10_000))
    assert [len(batch) for batch in writers[0].batches] == [4096, 4096, 1808]
    assert positions == [Position("t", 0, number) for number in range(10_000)]
    await queue.submit(work(*[1] * 20, size=1_000_000))
    assert [len(batch) for batch in writers[1].batches] == [9, 9, 2]
    await queue.close()


async def test_a_full_queue_makes_appends_wait_in_order(writers):
    queue = await start(writers, queue_records=2)
    busy = await hold(queue, writers[0])
    order = []

    async def append(number):
        await queue.submit(work(0))
        order.append(number)

    tasks = [asyncio.create_task(append(number)) for number in range(6)]
    await asyncio.sleep(0.01)
    assert len(queue._pending) == 2
    tasks.pop(3).cancel()
    writers[0].gate.set()
    await asyncio.gather(busy, *tasks)
    assert order == [0, 1, 2, 4, 5]
    assert sum(map(len, writers[0].batches)) == 6
    await queue.close()


async def test_an_append_larger_than_the_queue_still_goes_through(writers):
    queue = await start(writers, queue_records=2, queue_bytes=100)
    big = [asyncio.create_task(queue.submit(work(0, 0, 0, 0, size=1000))) for _ in range(3)]
    await asyncio.wait_for(asyncio.gather(*big), DEADLINE_S)
    assert sum(map(len, writers[0].batches)) == 12
    await queue.close()


async def test_an_append_that_hangs_fails_in_time_and_what_was_not_begun_never_arrives(writers):
    queue = await start(writers, append_timeout_s=0.2, queue_records=3)
    busy = await hold(queue, writers[0])
    waiting = [asyncio.create_task(queue.submit(work(0))) for _ in range(4)]
    results = await asyncio.wait_for(asyncio.gather(busy, *waiting, return_exceptions=True), DEADLINE_S)
    assert all(isinstance(error, LogUnavailable) for error in results)
    assert "stopped process" in str(results[0])
    assert "no room" in str(results[-1])
    writers[0].gate.set()
    assert (await queue.submit(work(0))) == [Position("t", 0, 1)]
    assert sum(map(len, writers[0].batches)) == 2
    assert await queue.close()


async def test_a_cancelled_append_that_was_not_begun_is_not_written(writers):
    queue = await start(writers)
    busy = await hold(queue, writers[0])
    task = asyncio.create_task(queue.submit(work(0)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    writers[0].gate.set()
    await busy
    await queue.close()
    assert sum(map(len, writers[0].batches)) == 1


async def test_close_finishes_what_was_accepted_and_refuses_the_rest(writers):
    queue = await start(writers, queue_records=3)
    busy = await hold(queue, writers[0])
    tasks = [asyncio.create_task(queue.submit(work(0))) for _ in range(4)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    writers[0].gate.set()
    assert await closing
    results = await asyncio.gather(busy, *tasks, return_exceptions=True)
    assert results[:3] == [[Position("t", 0, number)] for number in range(3)]
    assert all(isinstance(error, LogClosed) for error in results[3:])
    with pytest.raises(LogClosed):
        await queue.submit(work(0))


async def test_a_defect_in_the_writer_fails_its_callers_instead_of_hanging_them(writers):
    queue = await start(writers)
    writers[0].error = ZeroDivisionError("a defect")
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with pytest.raises(LogUnavailable, match="restart"):
            await asyncio.wait_for(queue.submit(work(0)), DEADLINE_S)
        with pytest.raises(LogUnavailable, match="restart"):
            await asyncio.wait_for(queue.submit(work(1)), DEADLINE_S)
        await queue.close()
    finally:
        threading.excepthook = hook


class OneThread(ThreadPoolExecutor):
    """The loop's own, which counts what it is given."""

    def __init__(self):
        super().__init__(1)
        self.given = 0

    def submit(self, *arguments, **named):
        self.given += 1
        return super().submit(*arguments, **named)


async def test_many_queues_that_hang_take_one_of_the_loops_threads_when_they_are_closed():
    writers = [FakeWriter() for _ in range(4)]
    queues = [await start({0: writer}, append_timeout_s=0.2) for writer in writers]
    hung = [await hold(queue, writer) for queue, writer in zip(queues, writers, strict=True)]
    executor = OneThread()
    asyncio.get_running_loop().set_default_executor(executor)
    assert not await close_queues(queues)
    assert executor.given == 1
    results = await asyncio.gather(*hung, return_exceptions=True)
    assert all(isinstance(error, LogClosed | LogUnavailable) for error in results)
    for writer in writers:
        writer.gate.set()
    assert await close_queues(queues)
    assert all(writer.closed for writer in writers)
