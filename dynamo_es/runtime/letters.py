"""What a dead letter holds, and whether it can go back to its topic. Pure: no I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_es.errors import DynamoException
from dynamo_es.log.base import Entry
from schemas.catalog import topic_spec
from schemas.codec import SchemaError, TopicCodec
from schemas.dead_letters import MAX_KEPT_BYTES, DeadLetter
from schemas.topic import Cleanup, TopicSpec

# Bounds of an excerpt: items of a list or mapping, characters of a text, levels of nesting.
_ITEMS = 32
_CHARACTERS = 600
_LEVELS = 8


class CannotRetry(DynamoException):
    """This letter does not go back to its topic; the message says why, and what else can be done."""


def spec_of(letter: DeadLetter, namespace: str) -> TopicSpec | None:
    """The contract of the topic that the refused record was on; None if it was on none of this namespace."""
    name = letter.topic.removeprefix(f"{namespace}.")
    if letter.partition < 0 or name == letter.topic:
        return None
    try:
        return topic_spec(name)
    except KeyError:
        return None


def retry_entry(letter: DeadLetter, namespace: str) -> Entry:
    """The original record, to be appended to ``letter.topic`` again: same key, value, partition and time.

    Raises:
        CannotRetry: It never was on a topic, is not whole in the letter, or does not decode now either.
    """
    if letter.partition < 0:
        raise CannotRetry(f"it came from {letter.topic} and never was on a topic: its source must send it again")
    spec = spec_of(letter, namespace)
    if spec is None:
        raise CannotRetry(f"{letter.topic} is no topic of the namespace {namespace}; see --topic-namespace")
    kept = len(letter.value) if letter.value is not None else 0
    if kept < letter.value_bytes:
        raise CannotRetry(
            f"it has {letter.value_bytes} bytes and a letter keeps {MAX_KEPT_BYTES}: take it from "
            f"{letter.topic}[{letter.partition}]@{letter.offset} while that is retained, or from its source"
        )
    # A key of just this length may have been cut; none of ours comes near it.
    if letter.key is not None and len(letter.key) >= MAX_KEPT_BYTES:
        raise CannotRetry(f"its key has {MAX_KEPT_BYTES} bytes or more, which is all that a letter keeps")
    codec = TopicCodec(spec)
    if letter.value is None:
        if spec.cleanup is not Cleanup.COMPACTION:
            raise CannotRetry("it has no value, which means nothing on a topic that is not compacted")
    else:
        try:
            codec.decode(letter.value)
        except SchemaError as error:
            raise CannotRetry(f"it does not decode: {error}") from error
    return Entry(letter.value, letter.key, codec.headers, letter.timestamp_ms, letter.partition)


def excerpt(value: Any, levels: int = _LEVELS) -> Any:
    """``value`` as JSON can hold it, cut to a size that people read; whatever its sender put in."""
    if isinstance(value, bool | int | float) or value is None:
        return value
    if levels == 0:
        return "…"
    if isinstance(value, dict):
        shown = {_text(key): excerpt(item, levels - 1) for key, item in list(value.items())[:_ITEMS]}
        return shown if len(value) <= _ITEMS else shown | {"…": f"{len(value) - _ITEMS} more"}
    if isinstance(value, list | tuple):
        items = [excerpt(item, levels - 1) for item in value[:_ITEMS]]
        return items if len(value) <= _ITEMS else [*items, f"… {len(value) - _ITEMS} more"]
    return _text(value)


def printable(text: str, most: int) -> str:
    """``text`` on one line, without control characters, at most ``most`` characters of it."""
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:most])
    return shown if len(text) <= most else f"{shown}… ({len(text)} characters)"


def _text(value: Any) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else printable(str(value), _CHARACTERS)


def value_as_far_as_known(letter: DeadLetter, namespace: str) -> msgspec.Struct | Any:
    """The letter's value: the Struct of its topic, else what msgpack alone tells, else None.

    Strings are the sender's: they may hold anything.
    """
    if letter.value is None:
        return None
    spec = spec_of(letter, namespace)
    if spec is not None:
        try:
            return TopicCodec(spec).decode(letter.value)
        except SchemaError:
            pass
    try:
        return msgspec.msgpack.decode(letter.value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
