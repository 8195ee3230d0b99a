"""Engines of this process that get requests as clients wrote them: how the frontend asks them, and what it tells of
their errors (spec/services j.1, j.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.errors import CLIENT_CLOSED, OVERLOADED, ApiError, EngineFailed, internal_error, reason_phrase
from dynamo_es.frontend.python_engine import PythonAsyncEngine
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.context import Context

ENVELOPE = "_dynamo_annotated"
"""Member that marks an item as an envelope around a chunk: ``data``, ``event``, ``comment``, ``id``, ``error``."""
_IN_STREAM = ("internal_server_error", 500, "Internal server error")
_KEPT = (503, OVERLOADED)
"""Statuses from 500 on that stay."""


class InProcessEngine:
    """A ``TokenEngine`` over a Python engine that yields OpenAI's chunks. No state of its own.

    Envelopes are opened; those without ``data`` are skipped.
    """

    def __init__(self, engine: PythonAsyncEngine) -> None:
        self._engine = engine

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        """See ``TokenEngine``. All errors are ``ApiError``, with their cause."""
        started = False
        items: Any = None
        try:
            while True:
                try:
                    if items is None:
                        items = self._engine.generate(request, context=context)
                    chunk = _opened(await anext(items))
                except StopAsyncIteration:
                    return
                except (Exception, asyncio.CancelledError, GeneratorExit) as error:
                    task = asyncio.current_task()
                    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                        raise
                    late = started and not request.get("stream")
                    told = _late(request, context) if late else _early(error)
                    told.in_stream = _IN_STREAM
                    raise told from error
                if chunk is not None:
                    started = True
                    yield [chunk]
        finally:
            if hasattr(items, "aclose"):
                await items.aclose()


def _opened(item: Any) -> Any:
    if not isinstance(item, dict) or not item.get(ENVELOPE):
        return item
    if item.get("error") is not None or item.get("event") == "error":
        raise EngineFailed
    return item.get("data")


def _late(request: Mapping[str, Any], context: Context) -> ApiError:
    """An answer that began and cannot be put together."""
    if "messages" in request:
        return ApiError(500, "Failed to parse chat completion response")
    return ApiError(500, f"Failed to fold completions stream for {context.id()}")


def _early(error: BaseException) -> ApiError:
    if isinstance(error, HttpError):
        return _of_status(error.code, error.message)
    if isinstance(error, InvalidArgument):
        return ApiError(400, str(error))
    if isinstance(error, ValueError | TypeError):
        return ApiError(400, f"{type(error).__name__}: {error}")
    return internal_error(500)


def _of_status(code: int, message: str) -> ApiError:
    if code == CLIENT_CLOSED:
        return ApiError(code, "Request cancelled")
    if code == 422:
        body = {"message": message, "type": reason_phrase(code), "code": code}
        return ApiError(400, msgspec.json.encode(body).decode())
    if 400 <= code < 500:
        return ApiError(code, message)
    if code in _KEPT:
        return ApiError(code, "Internal server error")
    return internal_error(code or 500) if code >= 500 or not code else internal_error()
