"""What a process has registered, and what the log has of it after an append that failed, or seemed to."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_es.log.errors import LogUnavailable
from dynamo_es.runtime.appender import TopicAppender
from dynamo_es.runtime.registration import Registration
from schemas.registry import Instance, key_instance
from tests.support.half_log import HalfLog
from tests.support.runtimes import wait_for

KEY = key_instance("n", "c", "e", 1)


def instance(port: int = 1) -> Instance:
    return Instance(1, "n", "c", "e", 1, 0, "zmq", f"tcp://h:{port}")


@asynccontextmanager
async def registered() -> AsyncIterator[tuple[Registration, HalfLog]]:
    log = HalfLog()
    registration = Registration(
        cast(TopicAppender, log), lambda: cast(Any, SimpleNamespace(ended={})),
        owner="worker", owner_id=1, ttl_s=10.0, heartbeat_s=0.01, rng=random.Random(1),
    )  # fmt: skip
    await registration.start()
    try:
        yield registration, log
    finally:
        await registration.close()


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_what_could_not_be_registered_does_not_stay_in_the_log(fails: str) -> None:
    async with registered() as (registration, log):
        log.fails[KEY] = fails
        with pytest.raises(LogUnavailable):
            await registration.register(KEY, instance())
        assert registration.row(KEY) is None
        await wait_for(lambda: log.written[KEY] and log.written[KEY][-1] is None)
        log.written.clear()
        seen = log.renewals
        await wait_for(lambda: log.renewals > seen + 3)
        assert KEY not in log.written, "once is enough"


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_update_that_failed_leaves_what_there_was(fails: str) -> None:
    async with registered() as (registration, log):
        await registration.register(KEY, instance(1))
        log.fails[KEY] = fails
        with pytest.raises(LogUnavailable):
            await registration.register(KEY, instance(2))
        await wait_for(lambda: len(log.written[KEY]) == (3 if fails == "after" else 2))
        assert log.written[KEY][-1].address == "tcp://h:1"
        assert registration.row(KEY) == log.written[KEY][-1]


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_what_could_not_be_taken_back_goes_later_or_when_it_is_tried_again(fails: str) -> None:
    for again in (True, False):
        async with registered() as (registration, log):
            await registration.register(KEY, instance())
            log.fails[KEY] = fails
            with pytest.raises(LogUnavailable):
                await registration.unregister(KEY)
            if again:
                assert await registration.unregister(KEY)
                assert log.written[KEY][-1] is None
                assert not await registration.unregister(KEY)
            await wait_for(lambda log=log: log.written[KEY][-1] is None)


async def test_what_comes_back_is_not_withdrawn() -> None:
    async with registered() as (registration, log):
        await registration.register(KEY, instance(1))
        log.fails[KEY] = "before"
        with pytest.raises(LogUnavailable):
            await registration.unregister(KEY)
        await registration.register(KEY, instance(2))
        seen = log.renewals
        await wait_for(lambda: log.renewals > seen + 3)
        assert log.written[KEY][-1].address == "tcp://h:2"
