"""The echo engine: what is said back, in whose chunks."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

from dynamo_es.entrypoint.echo import EchoEngine, echoed
from dynamo_es.errors import InvalidArgument
from dynamo_es.runtime.context import Context


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"messages": [user("sys", "system"), user("Hé"), user("no", "assistant")]}, ["Hé"]),
        ({"messages": [user("a"), user([{"type": "text", "text": "b"}, {"type": "image_url"}])]}, ["b"]),
        ({"prompt": "ab c"}, ["ab c"]),
        ({"prompt": [1, 2]}, ["1 2"]),
        ({"prompt": ["a", "b"]}, ["a", "b"]),
        ({"prompt": [[1, 2], [3]]}, ["1 2", "3"]),
    ],
)
def test_what_is_said_back(request_: dict[str, Any], expected: list[str]) -> None:
    assert echoed(request_) == expected


@pytest.mark.parametrize("request_", [{"messages": [user("x", "system")]}, {"prompt": []}, {}])
def test_nothing_to_say(request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        echoed(request_)


async def say(request: dict[str, Any], context: Context | None = None) -> tuple[list[Any], list[float]]:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = EchoEngine(lambda: 7.9, 10.0, sleep, lambda: "uuid")
    chunks: list[Any] = []
    async with aclosing(engine.generate(request, context or Context())) as batches:
        async for batch in batches:
            chunks += batch
            if context is not None:
                context.stop_generating()
    return chunks, slept


async def test_chat_is_a_character_a_chunk_then_stop() -> None:
    chunks, slept = await say({"model": "m", "messages": [user("Hé")], "max_tokens": 1})
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["H", "é", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True, False, False]
    head = {name: value for name, value in chunks[0].items() if name != "choices"}
    assert head == {"id": "chatcmpl-uuid", "created": 7, "model": "m", "object": "chat.completion.chunk"}
    assert slept == [0.01, 0.01]


async def test_completions_are_told_prompt_by_prompt() -> None:
    chunks, _ = await say({"model": "m", "prompt": ["a", "b"]})
    told = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks]
    assert told == [(0, "a"), (0, ""), (1, "b"), (1, "")]
    assert (chunks[0]["id"], chunks[0]["object"]) == ("cmpl-uuid", "text_completion")


async def test_a_request_that_was_stopped_says_no_more() -> None:
    chunks, _ = await say({"model": "m", "prompt": "abc"}, Context())
    assert len(chunks) == 1
