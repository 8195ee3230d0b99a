from __future__ import annotations

import asyncio
import logging
import random

import pytest

from dynamo_es.background import BackgroundTasks
from dynamo_es.log.base import TopicConfig
from dynamo_es.log.errors import LogReplaced, LogUnavailable, TopicMismatch
from dynamo_es.runtime import log_takeover
from dynamo_es.runtime.log_takeover import LogTakeover

TOPICS = (TopicConfig("t", 1),)
REPLACED = LogReplaced("the log", "new", "old")


class Scripted:
    """A log and a registration in one: each call is noted, and raises what the script says for it."""

    url = "memory://"
    log_id = "new"

    def __init__(self, **errors):
        self.calls = []
        self.errors = {name: list(queue) for name, queue in errors.items()}
        self.done = asyncio.Event()

    def _call(self, name):
        self.calls.append(name)
        queue = self.errors.get(name)
        if queue:
            raise queue.pop(0)

    async def reopen(self):
        self._call("reopen")

    async def create_topics(self, topics):
        assert topics is TOPICS
        self._call("create")

    async def announce(self):
        await asyncio.sleep(0)
        self._call("announce")
        self.done.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(log_takeover, "_BACKOFF", log_takeover.BackoffPolicy(0.001, 0.002))


def takeover(scripted):
    return LogTakeover(scripted, TOPICS, scripted.announce, random.Random(1), BackgroundTasks())


async def finished(scripted):
    async with asyncio.timeout(60):
        await scripted.done.wait()


async def test_the_new_log_is_opened_and_filled_before_anything_is_announced():
    scripted = Scripted()
    takeover(scripted).notice(REPLACED)
    await finished(scripted)
    assert scripted.calls == ["reopen", "create", "announce"]


async def test_what_others_find_meanwhile_changes_nothing_and_later_it_does():
    scripted = Scripted()
    one = takeover(scripted)
    for _ in range(3):
        one.notice(REPLACED)
    await finished(scripted)
    await asyncio.sleep(0)
    assert scripted.calls == ["reopen", "create", "announce"]
    scripted.done.clear()
    one.notice(REPLACED)
    await finished(scripted)
    assert scripted.calls == ["reopen", "create", "announce"] * 2


async def test_it_is_tried_until_it_works(caplog):
    caplog.set_level(logging.ERROR)
    scripted = Scripted(
        reopen=[LogUnavailable("half made")], create=[TopicMismatch("t", 2, 1)], announce=[REPLACED, REPLACED]
    )
    takeover(scripted).notice(REPLACED)
    await finished(scripted)
    assert scripted.calls == ["reopen", "reopen", "create", *["reopen", "create", "announce"] * 3]
    assert "half made" in caplog.text
    assert "has 2 partitions, the configuration says 1" in caplog.text


async def test_closing_ends_the_tries():
    scripted = Scripted(reopen=[LogUnavailable("gone")] * 100_000)
    one = takeover(scripted)
    one.notice(REPLACED)
    await asyncio.sleep(0)
    await one.close()
    await one.close()
    one.notice(REPLACED)
    assert one._task is None
