"""A server that speaks as vLLM's does, for tests of attached workers: the members and the order of its events are those
of vLLM 0.31's ``/v1/completions`` with ``return_token_ids``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

METRICS = """\
vllm:num_requests_running{{engine="0",model_name="upstream"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="upstream"}} 3.0
vllm:kv_cache_usage_perc{{engine="0",model_name="upstream"}} 0.25
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="400"}} 1.0
process_start_time_seconds {started}
"""


class TokenServer:
    """Answers every completion with ``answer``, a token an event; with ``holds`` it stops before the last one until its
    caller leaves. ``status``: another answer to inference requests. ``sick``: of ``/health``. ``page``: another one of
    ``/metrics``.
    """

    def __init__(self, answer: Sequence[int]) -> None:
        self.answer = list(answer)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.holds = False
        self.left = asyncio.Event()
        self.status: tuple[int, Any] | None = None
        self.sick = False
        self.breaks = False
        self.tokens_of: list[int] | None = None
        self.running = 0
        self.started = time.time()
        self.page: str | None = None
        self.pages_asked = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, at the port that it had before if it had one."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.sick else 200)

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "upstream", "object": "model", "max_model_len": 512, "parent": None}
        return web.json_response({"object": "list", "data": [base, {"id": "adapter", "parent": "upstream"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.pages_asked += 1
        if self.page is not None:
            return web.Response(text=self.page)
        return web.Response(text=METRICS.format(running=self.running, started=self.started))

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.tokens_of is None:
            return web.Response(status=404)
        return web.json_response({"tokens": self.tokens_of})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):  # the probe
            choice = {"index": 0, "text": "x", "token_ids": [7], "prompt_token_ids": body["prompt"]}
            return web.json_response({"choices": [choice | {"finish_reason": "length"}], "usage": {}})
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        if self.status is not None:
            return web.json_response(self.status[1], status=self.status[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        self.running += 1
        try:
            await self._tell(response, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.left.set()
            raise
        finally:
            self.running -= 1
        return response

    async def _tell(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        for place, token in enumerate(self.answer):
            last = place == len(self.answer) - 1
            while last and self.holds:
                # Something has to be written for a server to see that its client has left.
                await response.write(b": still there\n\n")
                await asyncio.sleep(0.01)
            choice: dict[str, Any] = {
                "index": 0, "text": "", "logprobs": None, "finish_reason": "stop" if last else None,
                "stop_reason": None, "token_ids": [token], "prompt_token_ids": body["prompt"] if not place else None,
            }  # fmt: skip
            if body.get("logprobs") is not None:
                choice["logprobs"] = {
                    "text_offset": [0], "token_logprobs": [-0.5], "tokens": [f"token_id:{token}"],
                    "top_logprobs": [{f"token_id:{token}": -0.5}],
                }  # fmt: skip
            await self._send(response, {"choices": [choice]})
            if self.breaks:
                response.force_close()
                return
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(self.answer)}
        usage["total_tokens"] = sum(usage.values())
        await self._send(response, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 16}}})
        await response.write(b"data: [DONE]\n\n")

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "upstream"}
        await response.write(b"data: " + json.dumps({**head, **event}).encode() + b"\n\n")


class EventSocket:
    """Publishes KV events as vLLM does; ``restart`` begins the sequence anew, as another process would."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    async def subscribed(self) -> None:
        async with asyncio.timeout(60):
            await self._socket.recv()

    async def stored(self, engine_hash: int, token_ids: Sequence[int]) -> None:
        event = ["BlockStored", [engine_hash], None, list(token_ids), len(token_ids), None]
        payload = msgspec.msgpack.encode([1.0, [event], 0])
        await self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    def restart(self) -> None:
        self._seq = 0

    def close(self) -> None:
        self._context.destroy(linger=0)
