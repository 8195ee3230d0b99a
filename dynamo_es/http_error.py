"""Dynamo's ``HttpError``: an engine's way to choose the HTTP status (spec: services j.3)."""

from __future__ import annotations

_MAX_MESSAGE = 8192


class HttpError(Exception):
    """``code`` 0..599 and a message of at most 8,192 characters. Derives from Exception, not DynamoException."""

    def __init__(self, code: int, message: str) -> None:
        if isinstance(code, bool) or not isinstance(code, int):
            raise ValueError("HttpError status code must be an integer")
        if not 0 <= code < 600:
            raise ValueError("HTTP status code must be an integer between 0 and 599")
        if not isinstance(message, str):
            raise ValueError("HttpError message must be a string")
        if len(message) > _MAX_MESSAGE:
            message = message[: _MAX_MESSAGE - 3] + "..."
        self.code = code
        self.message = message
        super().__init__(f"HTTP {code}: {message}")
