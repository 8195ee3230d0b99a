"""Hundreds of streams at a time through one frontend, a tenth of them cut by the client: nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from dynamo_es.frontend.server import serve
from dynamo_es.router.active_sequences import NO_LOAD, WorkerRank
from dynamo_es.runtime.lane import Lane
from tests.support.open_things import open_things
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import served_fleet
from tests.support.stream_load import StreamLoad

STREAMS, TOKENS = 200, 24


@pytest.fixture
def laned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch that was offered to a lane was taken."""
    taken: list[bool] = []
    offer = Lane.offer

    def noted(lane: Lane, batch: list[Any]) -> bool:
        taken.append(offer(lane, batch))
        return taken[-1]

    monkeypatch.setattr(Lane, "offer", noted)
    return taken


async def test_many_streams_leave_nothing_behind(laned: list[bool]) -> None:
    async with served_fleet(runtime=PATIENT) as fleet:
        await fleet.mock_worker(speedup_ratio=20.0, max_num_seqs=2 * STREAMS)
        server = await serve(fleet.app, replace(fleet.config, http_host="127.0.0.1", http_port=0))
        try:

            async def load(streams: int) -> StreamLoad:
                load = StreamLoad(
                    "127.0.0.1", server.port, "m", streams=streams, max_tokens=TOKENS, words=20, rng=random.Random(7)
                )
                await load.run(0.0)
                return load

            def is_idle() -> bool:
                ((_, engine),) = fleet.models.routers()
                (instance,) = fleet.core.registry.state.instances.values()
                return (
                    not fleet.app.service.running
                    and engine.router.open_requests == 0
                    and engine.router._sequences.load(WorkerRank(instance.instance_id, 0)) == NO_LOAD
                    and not fleet.views.requests.state.bookings
                )

            # What is made once is there before anything is counted.
            await load(4)
            await wait_for(is_idle)
            before = open_things()
            done = await load(STREAMS)
            assert len(done.told) == STREAMS
            assert sum(told.cut_after is not None for told in done.told) == STREAMS // 10
            assert done.faults() == []
            assert sum(laned) > 0
            await wait_for(is_idle)
            await wait_for(lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)))
        finally:
            await server.shutdown()


async def test_streams_that_are_asked_for_at_once_on_one_connection_come_one_after_the_other(laned: list[bool]) -> None:
    async with served_fleet(runtime=PATIENT) as fleet:
        await fleet.mock_worker(speedup_ratio=20.0)
        server = await serve(fleet.app, replace(fleet.config, http_host="127.0.0.1", http_port=0))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            lengths = (12, 30, 5)
            for tokens in lengths:
                body = json.dumps(
                    {"model": "m", "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": "a"}]}
                )
                writer.write(
                    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
            for tokens in lengths:
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 60)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert answer.count(b'"content":') == tokens
                assert len({json.loads(line[6:])["id"] for line in answer.split(b"\n") if line[:7] == b"data: {"}) == 1
            assert sum(laned) > 0
            writer.close()
            await writer.wait_closed()
        finally:
            await server.shutdown()
