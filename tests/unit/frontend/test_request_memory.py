"""What a request leaves behind in memory: nothing, and without the garbage collector's help."""

from __future__ import annotations

import asyncio
import gc
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo_es.frontend.http_exchange import HttpExchange
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served


def exchanges() -> list[HttpExchange]:
    return [found for found in gc.get_objects() if isinstance(found, HttpExchange)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_whose_client_was_watched_is_freed_at_its_end(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The watcher is cancelled, and what is cancelled keeps its traceback: a circle held body, tokens and text."""
    monkeypatch.setattr("dynamo_es.frontend.http_exchange.WATCH_DELAY_S", 0.0)
    watched = asyncio.Event()
    watch = HttpExchange._watch

    async def noted(self: HttpExchange) -> None:
        watched.set()
        await watch(self)

    monkeypatch.setattr(HttpExchange, "_watch", noted)
    answer = says(frame("Hel"), frame("lo", "stop"))

    async def after_the_watch(*arguments: Any) -> Any:
        await watched.wait()
        async for item in answer(*arguments):
            yield item

    app = application(served(ScriptedEngine(after_the_watch)), executor=executor)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    gc.collect()
    others = exchanges()  # What other tests hold.
    gc.disable()
    try:
        reply = await call(app, "/v1/chat/completions", json.dumps(body).encode())
        assert reply.status == 200, reply.text
        # Tasks that were cancelled end a turn of the loop later.
        for _ in range(5):
            await asyncio.sleep(0)
        assert [found for found in exchanges() if found not in others] == []
    finally:
        gc.enable()
