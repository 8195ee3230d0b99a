"""``--interactive``: a person, the router and a worker, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig, LogConfig, StateConfig
from dynamo_es.frontend.interactive import run_interactive
from dynamo_es.frontend.main import FrontendSettings
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.model_card import BUILTIN_MODEL
from tests.integration.test_discovery import Fleet
from tests.support.runtimes import FAST, SharedLog

LIMIT_S = 60.0


async def typed(*lines: str) -> AsyncIterator[str]:
    for line in lines:
        yield line


async def nobody() -> AsyncIterator[str]:
    await asyncio.Event().wait()
    yield ""


async def test_a_chat_goes_through_the_router_to_a_worker() -> None:
    log = MemoryLog("test", SystemClock(), Random(1))
    await log.start()
    fleet = Fleet(log)
    shown: list[str] = []
    process = RuntimeSettings(LogConfig("memory://"), StateConfig(flush_interval_s=0.2), FAST, "frontend")
    settings = FrontendSettings(process, FrontendConfig(router_mode="kv"))

    async def run(lines: AsyncIterator[str], stop: asyncio.Event) -> None:
        await run_interactive(
            settings, stop, clock=SystemClock(), rng=Random(2), lines=lines, write=shown.append, log=SharedLog(log)
        )

    try:
        async with asyncio.timeout(LIMIT_S):
            chat = asyncio.create_task(run(typed("Hello", "/quit"), asyncio.Event()))
            await fleet.worker(BUILTIN_MODEL)  # it comes later than the person
            await chat
        said = "".join(shown)
        assert said.startswith("waiting for a model ...\nchatting with m;")
        assert "error" not in said
        assert said.endswith("\n> ")

        # Told to stop, it does not wait for another line.
        stop = asyncio.Event()
        shown.clear()
        async with asyncio.timeout(LIMIT_S):
            chat = asyncio.create_task(run(nobody(), stop))
            while not any("chatting" in text for text in shown):
                await asyncio.sleep(0.01)
            stop.set()
            await chat
    finally:
        await fleet.close()
        await log.close()
