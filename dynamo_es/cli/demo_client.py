"""The demo's own client: sends a chat over HTTP and reads from the log why it went where it went."""

from __future__ import annotations

import asyncio
import json
import textwrap
import urllib.error
import urllib.request
from typing import Any

from dynamo_es.errors import DynamoException
from dynamo_es.log.base import EventLog, LogReader, TopicPartition
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.requests import REQUESTS, Finished, Routed

NAMESPACE = "dynamo"
_TIMEOUT_S = 30.0


def read_models(base: str, model: str) -> int | None:
    """Workers that serve ``model``; None while nobody listens at ``base``."""
    try:
        with urllib.request.urlopen(f"{base}/v1/models/{model}/ready", timeout=2) as response:  # noqa: S310
            ready = json.load(response)
    except urllib.error.HTTPError:
        return 0
    except OSError:
        return None
    counts = [kind["workers"] for space in ready["namespaces"].values() for kind in space["worker_types"].values()]
    return int(sum(counts))


class DemoClient:
    """Chats with the fleet. One chat at a time."""

    def __init__(self, base: str, log: EventLog) -> None:
        self._base = base
        self._log = log
        self._codec = TopicCodec(REQUESTS)
        self._topic = REQUESTS.qualified(NAMESPACE)
        self._reader: LogReader | None = None
        self._workers: dict[int, int] = {}
        self._seen: dict[str, list[tuple[str, Any]]] = {}

    async def start(self) -> None:
        """Begin to read the topic ``requests`` at its end. Raises ``LogError``."""
        bounds = await self._log.bounds(self._topic)
        self._reader = self._log.reader(
            {TopicPartition(self._topic, number): limits.end for number, limits in bounds.items()}
        )

    async def chat(self, number: int, system: str, question: str) -> str:
        """Send one chat; text for the terminal.

        Raises:
            DynamoException: The fleet did not answer, or its events did not come.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": "demo", "messages": messages, "max_tokens": 48}
        answer = await asyncio.to_thread(self._post, body)
        request_id = answer["id"].removeprefix("chatcmpl-")
        routed, finished = await self._events(request_id)
        return await self._describe(number, question, answer, routed, finished)

    def _post(self, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self._base}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                return json.load(response)
        except OSError as error:
            raise DynamoException(f"{self._base} did not answer a chat: {error}") from error

    async def _events(self, request_id: str) -> tuple[tuple[str, Routed], tuple[str, Finished]]:
        """The decision and the end of a request, each with its place in the log."""
        assert self._reader is not None
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while True:
                    found = self._seen.get(request_id, [])
                    routed = [item for item in found if isinstance(item[1], Routed)]
                    finished = [item for item in found if isinstance(item[1], Finished)]
                    if routed and finished:
                        return routed[-1], finished[-1]
                    await self._read()
        except TimeoutError as error:
            raise DynamoException(f"the events of request {request_id} are not in the log") from error

    async def _read(self) -> None:
        assert self._reader is not None
        for records in (await self._reader.poll(timeout_s=1.0)).values():
            for record in records:
                if record.value is not None:
                    event = self._codec.decode(record.value, record.headers)
                    place = f"requests[{record.partition}]@{record.offset}"
                    self._seen.setdefault(getattr(event, "request_id", ""), []).append((place, event))

    async def _describe(
        self, number: int, question: str, answer: Any, routed: tuple[str, Routed], finished: tuple[str, Finished]
    ) -> str:
        place, decision = routed
        worker = self._workers.setdefault(decision.worker_id, len(self._workers) + 1)
        blocks = len(decision.sequence_hashes) // 8
        kv_events = KV_EVENTS.qualified(NAMESPACE)
        read = sum(item.next_offset for item in decision.positions if item.topic == kv_events)
        costs = sorted(candidate.cost for candidate in decision.candidates)
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        text = textwrap.shorten(answer["choices"][0]["message"]["content"] or "", 90)
        return (
            f"chat {number}   {question}\n"
            f"         worker {worker} ({decision.worker_id:x}), overlap {decision.overlap_blocks} of {blocks} blocks, "
            f"cost {', '.join(f'{cost:g}' for cost in costs)}, decided in {decision.decided_us} µs\n"
            f"         log: decision {place}, end {finished[0]}, {read} kv-events seen; "
            f"engine reused {cached} of {usage['prompt_tokens']} prompt tokens\n"
            f"         “{text}”"
        )
