"""The vLLM recording, over a real ZMQ socket, through publisher, log, fold and router; on whichever log."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import sys
from pathlib import Path

import zmq
import zmq.asyncio

from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.runtime.model_card import ModelFacts, make_card
from schemas.kv_events import KV_EVENTS
from schemas.registry import key_model
from tests.support.router_process import BLOCK_SIZE, ENDPOINT
from tests.support.runtimes import make_runtime, wait_for

RECORDING = Path(__file__).parent.parent / "data" / "vllm-0.32.0-chat.jsonl"
LINES = [json.loads(line) for line in RECORDING.read_text().splitlines()]
REQUESTS = sum(line["kind"] == "request" for line in LINES)


class RouterProcess:
    """The router, in a process that can be killed and started again on the same store."""

    def __init__(self, url: str, namespace: str, state_dir: Path) -> None:
        self._url, self._namespace, self._state_dir = url, namespace, state_dir

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.router_process", self._url, self._namespace, str(self._state_dir),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert (await self._process.stdout.readline()).strip() == b"ready"

    async def ask(self, token_ids, ends) -> dict:
        question = json.dumps({"token_ids": token_ids, "ends": ends}) + "\n"
        self._process.stdin.write(question.encode())
        await self._process.stdin.drain()
        async with asyncio.timeout(60):
            return json.loads(await self._process.stdout.readline())

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()
        self._process._transport.close()

    async def stop(self) -> None:
        self._process.stdin.close()
        await self._process.wait()


async def predict_recording(
    url: str, tmp_path: Path, *, kill_after: int | None, namespace: str = "dynamo"
) -> list[tuple[int, int]]:
    """(predicted, recorded) cached tokens of every request; the router is killed before request ``kill_after``."""
    worker = make_runtime(url=url, namespace=namespace)
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.XPUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    router = RouterProcess(url, namespace, tmp_path / "router-state")
    results = []
    try:
        await worker.core.start()
        endpoint = worker.endpoint(ENDPOINT)
        serving = asyncio.create_task(endpoint.serve_endpoint(_no_requests))
        card = make_card(
            ModelFacts("recorded", "recorded", 8192), ENDPOINT.split("."), worker.core.instance_id,
            block_size=BLOCK_SIZE, runtime_config={},
        )  # fmt: skip
        await worker.core.registration.register(key_model(*ENDPOINT.split("."), worker.core.instance_id), card)
        publisher = KvEventPublisher(
            endpoint, kv_block_size=BLOCK_SIZE, zmq_endpoint=f"tcp://127.0.0.1:{port}", zmq_topic="kv"
        )
        assert await engine.recv() == b"\x01kv"
        await router.start()
        frames = requests = 0
        for line in LINES:
            if line["kind"] == "frame":
                payload = base64.b64decode(line["payload_b64"])
                await engine.send_multipart([line["topic"].encode(), struct.pack(">Q", line["seq"]), payload])
                frames += 1
            elif line["kind"] == "request":
                if requests == kill_after:
                    await router.kill()
                    await router.start()
                requests += 1
                results.append((await _predict(worker, publisher, router, line, frames), line["cached_tokens"]))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await router.stop()
    finally:
        engine.close(linger=0)
        context.term()
        await worker.close()
    return results


async def _predict(worker, publisher, router, line, frames) -> int:
    await wait_for(lambda: publisher.counters()["relay_messages"] == frames)
    await worker.core.buffer.flush(10)
    topic = KV_EVENTS.qualified(worker.core.settings.log.namespace)
    bounds = await worker.core.log.bounds(topic)
    ends = {topic: {str(partition): limits.end for partition, limits in bounds.items()}}
    tokens = line["prompt_token_ids"]
    depth = (await router.ask(tokens, ends))[f"{worker.core.instance_id}:0"]
    # vLLM always computes at least the last prompt token.
    return min(depth * BLOCK_SIZE, (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE)


async def _no_requests(request, context):
    with contextlib.suppress(GeneratorExit):
        yield None
