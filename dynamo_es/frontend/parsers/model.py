"""The parsers of one model: what its card names, and which special tokens of its vocabulary they need to see. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo_es.frontend.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ChannelFormat,
    ReasoningFormat,
    ToolFormat,
)
from dynamo_es.frontend.tokenizer import Tokenizer

TOOL_CALL_PARSER = "tool_call_parser"
REASONING_PARSER = "reasoning_parser"
"""Names of a card's ``runtime_config``."""


class ModelParsers(NamedTuple):
    """How a model's output is read.

    Attributes:
        tools: Format of calls, or None.
        reasoning: Format of thoughts, or None.
        tool_specials, reasoning_specials: Text of the special tokens that a format needs, by id.
        unknown: What the card names and nobody knows, for the operator: ``tool_call_parser x``.
    """

    tools: ToolFormat | ChannelFormat | None = None
    reasoning: ReasoningFormat | ChannelFormat | None = None
    tool_specials: Mapping[int, str] = {}
    reasoning_specials: Mapping[int, str] = {}
    unknown: tuple[str, ...] = ()


def parsers_of(runtime_config: Mapping[str, Any], tokenizer: Tokenizer) -> ModelParsers:
    """Parsers by the names of a card; a name that is not known gives none."""
    unknown: list[str] = []
    tools = _named(TOOL_PARSERS, runtime_config, TOOL_CALL_PARSER, unknown)
    reasoning = _named(REASONING_PARSERS, runtime_config, REASONING_PARSER, unknown)
    if tools is None and reasoning is None:
        return ModelParsers(unknown=tuple(unknown))
    texts = {token_id: tokenizer.decode((token_id,), False) for token_id in tokenizer.special_ids}
    return ModelParsers(
        tools,
        reasoning,
        _needed(texts, () if tools is None else tools.markers),
        _needed(texts, _marks_of(reasoning)),
        tuple(unknown),
    )


def _named(known: Mapping[str, Any], runtime_config: Mapping[str, Any], key: str, unknown: list[str]) -> Any:
    name = runtime_config.get(key)
    if not isinstance(name, str) or not name.strip():
        return None
    found = known.get(name.strip().lower())
    if found is None:
        unknown.append(f"{key} {name[:64]}")
    return found


def _marks_of(reasoning: ReasoningFormat | ChannelFormat | None) -> tuple[str, ...]:
    if reasoning is None:
        return ()
    if isinstance(reasoning, ChannelFormat):
        return reasoning.markers
    return (*reasoning.marks.opens, *reasoning.marks.closes, *reasoning.marks.stops)


def _needed(texts: Mapping[int, str], markers: tuple[str, ...]) -> dict[int, str]:
    """Special tokens that are a mark, or part of one."""
    return {token_id: text for token_id, text in texts.items() if text and any(text in mark for mark in markers)}
