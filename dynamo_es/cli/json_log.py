"""Log messages as lines of JSON, with the members that Dynamo's have (``DYN_LOGGING_JSONL``)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

_LEVELS = {"WARNING": "WARN", "CRITICAL": "ERROR"}


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "target", "message", "pid"[, "exception"]}``; times are UTC, levels Dynamo's words."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": f"{stamp[:-6]}Z",
            "level": _LEVELS.get(record.levelname, record.levelname),
            "target": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
