"""The echo engine (``EngineType.Echo``; spec/services h.3): what the user said last, a character a chunk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.contracts import TokenEngine
from dynamo_es.runtime.context import Context

DEFAULT_DELAY_MS = 10.0
DELAY_VARIABLE = "DYN_TOKEN_ECHO_DELAY_MS"
Sleep = Callable[[float], Awaitable[None]]


def echoed(request: Mapping[str, Any]) -> list[str]:
    """What is said back, by choice: the last message of the user, or each prompt. Pure.

    Raises:
        InvalidArgument: The request holds neither.
    """
    if "messages" in request:
        said = [message for message in request["messages"] if message.get("role") == "user"]
        if not said:
            raise InvalidArgument("the echo engine needs a message of the user")
        return [_text_of(said[-1].get("content"))]
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Sequence) or not prompt:
        raise InvalidArgument("the echo engine needs messages or a prompt")
    if isinstance(prompt[0], int):
        return [_numbers(prompt)]
    return [part if isinstance(part, str) else _numbers(part) for part in prompt]


class EchoEngine(TokenEngine):
    """Chunks of OpenAI's form for chat and completions. ``max_tokens`` and all sampling are ignored, as in Dynamo."""

    def __init__(
        self,
        now_s: Callable[[], float],
        delay_ms: float = DEFAULT_DELAY_MS,
        sleep: Sleep = asyncio.sleep,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        """``now_s``: Unix seconds. ``delay_ms``: before each chunk. ``new_id``: makes UUIDs."""
        self._now_s = now_s
        self._delay_s = delay_ms / 1000
        self._sleep = sleep
        self._new_id = new_id

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        """See ``TokenEngine``."""
        is_chat = "messages" in request
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{self._new_id()}",
            "created": int(self._now_s()),
            "model": request.get("model"),
            "object": "chat.completion.chunk" if is_chat else "text_completion",
        }
        for index, text in enumerate(echoed(request)):
            for place, letter in enumerate(text):
                await self._sleep(self._delay_s)
                if context.is_stopped():
                    return
                yield [{**head, "choices": [_choice(index, letter, is_chat=is_chat, first=place == 0)]}]
            last = _choice(index, "", is_chat=is_chat, first=not text)
            yield [{**head, "choices": [{**last, "finish_reason": "stop"}]}]


def _choice(index: int, text: str, *, is_chat: bool, first: bool) -> dict[str, Any]:
    if not is_chat:
        return {"index": index, "text": text}
    delta = {"content": text, **({"role": "assistant"} if first else {})}
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(part.get("text", "") for part in parts if isinstance(part, Mapping) and part.get("type") == "text")


def _numbers(token_ids: Sequence[Any]) -> str:
    return " ".join(map(str, token_ids))
