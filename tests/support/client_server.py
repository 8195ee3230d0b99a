"""A frontend on a real socket with a scripted worker behind the real request plane, for clients in any language.

It runs in a thread of its own, so that blocking clients and other programs can use it. The worker obeys the last
``<<<{json}>>>`` of its prompt, which ``says`` makes: ``text`` in items of ``chunk`` tokens, each after ``delay``
seconds; ``raise`` with ``code`` and ``after`` for failures (see ``GoldenWorker``); ``fails``: how many requests fail
with ``code`` at first. Models: ``m`` and its alias ``claude-m`` (hermes calls, qwen3 thoughts, a template that takes
pictures), ``seen`` (the same, and the frontend decodes its pictures), ``e`` (embeddings).
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from dynamo_es.config.tree import FrontendConfig, RuntimeConfig
from dynamo_es.engines.mock.embedding import embed_request
from dynamo_es.frontend.server import serve
from dynamo_es.frontend.tokenizer import BytesTokenizer
from dynamo_es.http_error import HttpError
from dynamo_es.llm import MediaDecoder
from dynamo_es.models.card_json import CUSTOM_TEMPLATE, TEMPLATE_TEXT
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.request_server import Batch
from tests.support.served_fleet import ServedFleet, served_fleet
from tests.unit.frontend.golden_worker import GoldenWorker

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content or [] %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_WAIT_S = 120
# Nobody is taken for dead while a machine has no time for this process.
_PATIENT = RuntimeConfig(
    lease_ttl_s=300.0, heartbeat_s=1.0, drain_timeout_s=2.0, connect_timeout_s=60.0, inhibited_s=0.5
)


def says(text: str, **script: Any) -> str:
    """A prompt to which the worker answers with ``text``."""
    return f"<<<{json.dumps({'text': text, **script})}>>>"


def calls(*cities: str) -> str:
    """What a model says to call ``get_weather`` for these."""
    found = [json.dumps({"name": "get_weather", "arguments": {"city": city}}) for city in cities]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in found)


class ClientServer:
    """A running server.

    Attributes:
        url: Without a path.
        requests: What the worker got, in order.
        stopped: For each request that is over, whether it was told to stop.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.stopped: list[bool] = []
        self._failures: dict[str, int] = {}
        self._worker = GoldenWorker(BytesTokenizer())

    @property
    def v1(self) -> str:
        """Where OpenAI's clients look."""
        return f"{self.url}/v1"

    def prompts(self) -> list[str]:
        """The prompts of all requests as text."""
        return [BytesTokenizer().decode(request["token_ids"], False) for request in self.requests]

    async def answer(self, request: dict[str, Any], context: Context) -> AsyncIterator[Batch]:
        """As a worker."""
        self.requests.append(request)
        self._fail(BytesTokenizer().decode(request["token_ids"], False))
        try:
            async for frames in self._worker.generate(request, context):
                yield Batch(frames)
                if context.is_stopped():
                    return
        finally:
            self.stopped.append(context.is_stopped())

    def _fail(self, prompt: str) -> None:
        script = prompt[prompt.rfind("<<<") + 3 : prompt.rfind(">>>")]
        told = json.loads(script) if script.startswith("{") else {}
        if self._failures.get(script, 0) < told.get("fails", 0):
            self._failures[script] = self._failures.get(script, 0) + 1
            raise HttpError(told["code"], "not now")

    async def embed(self, request: dict[str, Any], context: Context) -> AsyncIterator[Batch]:
        """As a worker for embeddings."""
        yield Batch([embed_request(request, 8)])


async def _run(server: ClientServer, ready: Future[asyncio.Event]) -> None:
    config = FrontendConfig(
        http_host="127.0.0.1", http_port=0, router_mode="kv", enable_anthropic_api=True,
        graceful_shutdown_timeout_s=5.0,
    )  # fmt: skip
    try:
        async with served_fleet(config=config, runtime=_PATIENT) as fleet:
            await _start_workers(server, fleet)
            http = await serve(fleet.app, config)
            try:
                server.url, stop = f"http://127.0.0.1:{http.port}", asyncio.Event()
                ready.set_result(stop)
                await stop.wait()
            finally:
                await http.shutdown()
    except BaseException as error:
        if not ready.done():
            ready.set_exception(error)
        raise


async def _start_workers(server: ClientServer, fleet: ServedFleet) -> None:
    decoder = MediaDecoder()
    decoder.enable_image({})
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    shown = {CUSTOM_TEMPLATE: {TEMPLATE_TEXT: TEMPLATE}}
    await fleet.worker(server.answer, "m", aliases=["claude-m"], runtime_config=parsers, details=shown)
    await fleet.worker(server.answer, "seen", details={**shown, "media_decoder": decoder.card_body()})
    await fleet.worker(server.embed, "e", model_type="Embedding")


@contextmanager
def client_server() -> Iterator[ClientServer]:
    """A server in a thread, until the context ends."""
    server, ready = ClientServer(), Future[asyncio.Event]()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_run(server, ready)), name="client-server")
    thread.start()
    try:
        stop = ready.result(_WAIT_S)
        yield server
        loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(_WAIT_S)
        assert not thread.is_alive()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
