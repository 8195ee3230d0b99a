"""Choices of chat chunks as chat processors make them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamo_es.frontend.pipeline import TokenLogprob

Choice = dict[str, Any]


def choice_of(
    index: int,
    *,
    content: str = "",
    reasoning: str = "",
    calls: Sequence[dict[str, Any]] = (),
    first: bool = False,
    finish: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> Choice:
    """``{index, delta, finish_reason, logprobs}``; the delta has only what there is, its role if it is the first."""
    delta: dict[str, Any] = {}
    if first:
        delta["role"] = "assistant"
    if content:
        delta["content"] = content
    if reasoning:
        delta["reasoning_content"] = reasoning
    if calls:
        delta["tool_calls"] = list(calls)
    return {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}


def openai_logprobs(entries: Sequence[TokenLogprob], decode: Callable[[int], str]) -> dict[str, Any]:
    """``logprobs`` of a choice (spec/frontend.md 4.3); ``decode`` gives the text of one id by itself."""
    content = []
    for entry in entries:
        text = decode(entry.token_id)
        content.append(
            {
                "token": text,
                "logprob": entry.logprob,
                "token_id": entry.token_id,
                "bytes": list(text.encode()),
                "top_logprobs": [_alternative(item, decode) for item in entry.top],
            }
        )
    return {"content": content, "refusal": None}


def _alternative(item: Any, decode: Callable[[int], str]) -> dict[str, Any]:
    text = decode(item["token_id"])
    return {"token": text, "logprob": item["logprob"], "bytes": list(text.encode())}
