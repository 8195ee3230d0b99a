"""Log messages as lines of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys

from dynamo_es.cli.json_log import JsonFormatter


def formatted(level: int, message: str, *arguments: object, failed: bool = False) -> dict[str, object]:
    error = sys.exc_info() if failed else None
    record = logging.LogRecord("dynamo_es.router", level, __file__, 1, message, arguments, error)
    record.created = 1_700_000_000.25
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, object] = json.loads(line)
    return found


def test_a_message_is_one_line_with_dynamos_members() -> None:
    assert formatted(logging.WARNING, "a %s\n\x1b", "b") == {
        "time": "2023-11-14T22:13:20.250000Z", "level": "WARN", "target": "dynamo_es.router",
        "message": "a b\n\x1b", "pid": os.getpid(),
    }  # fmt: skip


def test_an_exception_is_told_in_the_same_line() -> None:
    try:
        raise KeyError("k")
    except KeyError:
        line = formatted(logging.CRITICAL, "failed", failed=True)
    assert line["level"] == "ERROR"
    assert "KeyError: 'k'" in str(line["exception"])
