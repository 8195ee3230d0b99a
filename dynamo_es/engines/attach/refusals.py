"""What an upstream's error means for the request, its worker and other workers. Pure.

A mistake of the request stays one (``InvalidArgument`` with the server's words, which only the client gets to see); a
server that has no room is ``Overloaded``, so that another worker may get the request; one that is not there, or that
does not let this worker in, cannot be reached. Nothing here is logged: the server's words may quote the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_es.errors import CannotConnect, EngineShutdown, InvalidArgument
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.errors import Overloaded

_MAX_MESSAGE = 2000
_BUSY = frozenset((429, 503, 529))
_GATEWAY = frozenset((502, 504))
_LOCKED = frozenset((401, 403))
_MISTAKES = frozenset((400, 413, 422))


def refusal(status: int, body: bytes) -> Exception:
    """The exception for an answer of this status (not 200) to an inference request."""
    if status in _BUSY:
        return Overloaded(f"overloaded: the upstream answered {status}")
    if status in _GATEWAY:
        return CannotConnect(f"the upstream's gateway answered {status}")
    if status in _LOCKED:
        return CannotConnect(f"the upstream answered {status}: check --upstream-api-key-file")
    if status in _MISTAKES:
        return InvalidArgument(_words(_error_of(body)) or f"the upstream refused the request ({status})")
    if 300 <= status < 400:
        return CannotConnect(f"the upstream answered {status}, a redirection, which is not followed")
    return HttpError(status, f"the upstream answered {status}")


def failure_in_stream(error: Any) -> Exception:
    """The exception for an ``error`` member of an event: the status was 200 already."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    code = fields.get("code")
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    if not isinstance(code, int) or isinstance(code, bool) or not 400 <= code < 600:
        code = 500
    if code in _MISTAKES:
        return InvalidArgument(_words(fields) or "the upstream refused the request")
    if code in _BUSY:
        return EngineShutdown(f"the upstream gave the request up ({code})")
    return HttpError(code, "the upstream failed the request")


def _error_of(body: bytes) -> Mapping[str, Any]:
    """The description in OpenAI's form, vLLM's older flat one, or FastAPI's."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    inner = value.get("error")
    if isinstance(inner, dict):
        return inner
    if isinstance(inner, str):
        return {"message": inner}
    return value


def _words(error: Mapping[str, Any]) -> str:
    message = error.get("message")
    if message is None:
        message = error.get("detail")
    if isinstance(message, list):
        # FastAPI's validation: a list of places and texts.
        message = "; ".join(_place(item) for item in message[:5] if isinstance(item, dict))
    text = message if isinstance(message, str) else ""
    param = error.get("param")
    if isinstance(param, str) and param and param not in text:
        text = f"{text} (`{param}`)" if text else f"invalid value of `{param}`"
    return text[:_MAX_MESSAGE]


def _place(item: Mapping[str, Any]) -> str:
    where = item.get("loc")
    names = ".".join(str(part) for part in where if part != "body") if isinstance(where, list) else ""
    return f"{names}: {item.get('msg')}" if names else str(item.get("msg"))
