"""What a request of the mock engine gets: recorded tokens if it asks for them, else made-up ones. Pure.

A trace is JSON lines in Mooncake's form, of which ``output_token_ids`` is read here. A request asks for a row by the
annotation ``output_replay_id:KEY``: KEY is the row's ``request_id``, or else ``SESSION_ID:TURN`` (the rows of a session
are counted from 0), or else ``line:NUMBER``, counted from 0.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from dynamo_es.engines.mock.config import ReasoningOutput
from dynamo_es.engines.mock.text import OutputTokens
from dynamo_es.errors import ConfigError, InvalidArgument

REPLAY_ANNOTATION = "output_replay_id:"
_LEAST_THOUGHTS = 2
_SHOWN = 64
RecordedOutputs = Mapping[str, Sequence[int]]


class EngineOutput:
    """Gives each choice of a request its tokens."""

    def __init__(
        self,
        output_tokens: OutputTokens,
        reasoning: ReasoningOutput | None = None,
        recorded: RecordedOutputs | None = None,
    ) -> None:
        """``recorded``: what a trace has, by key; those get neither thoughts nor made-up text."""
        self._output_tokens = output_tokens
        self._reasoning = reasoning
        self._recorded = recorded

    def tokens(self, request: Mapping[str, Any], choice: int, max_tokens: int) -> Iterator[int]:
        """Tokens of a choice. Raises ``InvalidArgument``: the trace has no such row."""
        key = self._replay_key(request)
        if key is not None:
            assert self._recorded is not None
            if key not in self._recorded:
                raise InvalidArgument(f"the trace has no output with the {REPLAY_ANNOTATION[:-1]} {key[:_SHOWN]!r}")
            return iter(self._recorded[key])
        text = self._output_tokens(request, choice)
        return text if self._reasoning is None else with_thoughts(text, max_tokens, self._reasoning)

    def _replay_key(self, request: Mapping[str, Any]) -> str | None:
        annotations = request.get("annotations")
        if self._recorded is None or not isinstance(annotations, list):
            return None
        for annotation in annotations:
            if isinstance(annotation, str) and annotation.startswith(REPLAY_ANNOTATION):
                return annotation.removeprefix(REPLAY_ANNOTATION)
        return None


def with_thoughts(text: Iterator[int], max_tokens: int, reasoning: ReasoningOutput) -> Iterator[int]:
    """``text`` with its beginning put between the tokens that begin and end a thought, these counted.

    An answer of a single token has no room for them.
    """
    count = min(max_tokens, max(_LEAST_THOUGHTS, int(max_tokens * reasoning.ratio)))
    if count < _LEAST_THOUGHTS:
        return text
    thoughts = islice(text, count - _LEAST_THOUGHTS)
    return chain([reasoning.start_token_id], thoughts, [reasoning.end_token_id], text)


def read_outputs(lines: Iterable[bytes], source: str) -> RecordedOutputs:
    """The outputs of a trace by key; rows without one are only counted.

    Args:
        lines: Of the file.
        source: Its name, for errors.

    Raises:
        ConfigError: A line is not what it should be, two rows have the same key, or there is no output at all.
    """
    outputs: dict[str, Sequence[int]] = {}
    turns: Counter[str] = Counter()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        key, tokens = _read_row(line, number, turns, f"{source}, line {number + 1}")
        if tokens is None:
            continue
        if key in outputs:
            raise ConfigError(f"{source}, line {number + 1}: the key {key[:_SHOWN]!r} is there already")
        outputs[key] = tokens
    if not outputs:
        raise ConfigError(f"{source} has no row with output_token_ids")
    return outputs


def _read_row(line: bytes, number: int, turns: Counter[str], where: str) -> tuple[str, array[int] | None]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object")
    session, name = _text(row, "session_id"), _text(row, "request_id")
    turn = turns[session]
    turns[session] += 1
    key = name or (f"{session}:{turn}" if session else f"line:{number}")
    token_ids = row.get("output_token_ids")
    if token_ids is None:
        return key, None
    try:
        if not isinstance(token_ids, list):
            raise TypeError
        return key, array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"{where}: output_token_ids must be a list of token ids, each a u32") from error


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return value.strip() if isinstance(value, str) else ""
