"""Times that people type: an age, or an ISO 8601 time. Pure: "now" is passed in."""

from __future__ import annotations

import datetime

from dynamo_es.config.ages import AGE_FORM, parse_age_ms

_FORM = f"expected {AGE_FORM} or an ISO 8601 time with its zone: 24h, 2026-05-01T12:00:00Z"


def parse_since(text: str, now_ms: int) -> int:
    """The time in ms since 1970 that ``text`` means. Raises ValueError that says what is expected."""
    if text[:1].isdigit() and text[-1:].isalpha() and "T" not in text:
        return max(0, now_ms - parse_age_ms(text))
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(_FORM) from error
    if time.tzinfo is None:
        raise ValueError(f"{_FORM}; without its zone it could be any of many hours")
    return max(0, int(time.timestamp() * 1000))


def check_since(text: str) -> None:
    """The check of the option."""
    parse_since(text, 0)
