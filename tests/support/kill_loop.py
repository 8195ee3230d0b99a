"""A log that is written to while a process that folds it is killed again and again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from tests.support.event_storm import Event


@contextlib.asynccontextmanager
async def poured(url: str, namespace: str, rng: random.Random, storm: Iterable[Event]) -> AsyncIterator[EventLog]:
    """The log, with all topics, to which events are written until it is left."""
    log = open_log(url, SystemClock(), rng=rng)
    await log.start()
    try:
        await log.create_topics(topic_configs(namespace, None))
        stop = asyncio.Event()
        pouring = asyncio.create_task(_pour(log, namespace, storm, stop))
        try:
            yield log
        finally:
            stop.set()
            await pouring
    finally:
        await log.close()


async def _pour(log: EventLog, namespace: str, storm: Iterable[Event], stop: asyncio.Event) -> None:
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    events = iter(storm)
    while not stop.is_set():
        by_topic: dict[str, list[Entry]] = {}
        for spec, key, value in (next(events) for _ in range(40)):
            codec = codecs[spec.name]
            data = None if value is None else codec.encode(value)
            by_topic.setdefault(spec.qualified(namespace), []).append(Entry(data, key, codec.headers))
        for topic, entries in by_topic.items():
            await log.append_all(topic, entries)
        await asyncio.sleep(0.002)


async def covered_after_kills(
    arguments: Sequence[str],
    kills: int,
    longest_s: float,
    rng: random.Random,
    check: Callable[[], Awaitable[int]],
) -> None:
    """Start ``python -m arguments`` and kill it at a random instant, again and again.

    ``check``: looks at what is left of each, and tells how many records it covers: never fewer than before, and more
    in the end.
    """
    covered = []
    for _ in range(kills):
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert (await process.stdout.readline()).strip() == b"ready"
        await asyncio.sleep(rng.uniform(0, longest_s))
        process.kill()
        await process.wait()
        covered.append(await check())
    assert covered == sorted(covered)
    assert covered[-1] > covered[0]
