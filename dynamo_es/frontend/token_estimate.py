"""About how many tokens a request has: a third of its characters (spec/frontend.md 1.8, 1.9). Pure; asks no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

_CHARS_PER_TOKEN = 3


def estimate(texts: Iterable[str]) -> int:
    """Tokens in all texts together; a message's role is one of its texts."""
    return sum(map(len, texts)) // _CHARS_PER_TOKEN


def texts_of(value: Any) -> Iterable[str]:
    """All text in a message's content: a string, or parts of any kind, results of tools with theirs."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, Mapping):
                yield from _texts_of_part(part)


def _texts_of_part(part: Mapping[str, Any]) -> Iterable[str]:
    for name in ("text", "thinking", "arguments", "name"):
        if isinstance(part.get(name), str):
            yield part[name]
    if isinstance(part.get("input"), Mapping):
        yield msgspec.json.encode(part["input"]).decode()
    for name in ("content", "output"):
        yield from texts_of(part.get(name))
