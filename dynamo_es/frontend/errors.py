"""Errors of the HTTP frontend, and how each error of a worker looks to a client (spec/frontend.md 0.1, 2.6, 2.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from dynamo_es.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
)
from dynamo_es.http_error import HttpError

OVERLOADED = 529
CLIENT_CLOSED = 499
WORKERS_BUSY, WORKER_FULL, QUEUE_FULL = "workers_busy", "worker_full", "queue_full"
"""What an overloaded request ran into: the busy thresholds, a worker's own limit, the bound of the router's queue."""
PREPROCESS_FULL = "preprocess_queue_full"
"""The same, before any worker: the bound of what waits to be decoded, rendered or tokenized in this process."""
_ASK_AGAIN = ((b"retry-after", b"1"),)
INCOMPLETE = 460
"""Never sent, for metrics only: the body ended before it was whole (broken framing, or the client left meanwhile)."""
_UNAVAILABLE = (CannotConnect, Disconnected, EngineShutdown, StreamIncomplete)


class ModelNotFound(DynamoException):
    """No worker registered a model of this name, or not for this route."""

    def __init__(self, name: str) -> None:
        super().__init__(f"model {name!r} is not registered")
        self.name = name


class ModelNotReady(DynamoException):
    """The model is registered but no complete set of workers can serve it now."""

    retriable = True

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"model {name!r} is not ready: {reason}")
        self.name = name
        self.reason = reason


class OutputError(DynamoException):
    """A worker sent an item that cannot be understood."""


class EngineFailed(OutputError):
    """The worker's engine ended the request with an error frame. Its text may quote the prompt and is not kept.

    Attributes:
        status: The HTTP status that it asserts, 400 to 599; None: it asserts none.
    """

    def __init__(self, text: str = "the engine ended the request with an error", status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    @classmethod
    def of(cls, error: Any) -> EngineFailed:
        """From the ``error`` member of an item: an object with ``code`` or ``status``, or anything else."""
        given = error if isinstance(error, Mapping) else {}
        for code in (given.get("code"), given.get("status")):
            if isinstance(code, int) and not isinstance(code, bool) and 400 <= code < 600:
                return cls(status=code)
        return cls()


class ApiError(DynamoException):
    """What a client is told instead of a result.

    Attributes:
        status: HTTP status.
        message: One sentence, public.
        param: Request field that is wrong, or None.
        code: OpenAI's error code, or None.
        details: Extra member ``details`` of the flat shape, or None.
        hint: What OpenAI's shape says in place of ``message``, where Dynamo's says less than a user needs; or None.
        in_stream: Type, code and message of the frame inside a stream, where they do not follow from the status.
        kind: OpenAI's error type; follows from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
        in_stream: tuple[str, int, str] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.details = details
        self.in_stream = in_stream
        self.hint = hint

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Of the response: when to ask again, if that may help."""
        return _ASK_AGAIN if self.status in (503, OVERLOADED) else ()

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def in_terms_of(self, names: Mapping[str, str]) -> ApiError:
        """The same about a route whose fields have other names; ``names`` is by the field that ``param`` says."""
        if self.param is None or self.param not in names:
            return self
        return ApiError(
            self.status,
            self.message,
            param=names[self.param],
            code=self.code,
            details=self.details,
            in_stream=self.in_stream,
            hint=self.hint,
        )

    def body(self, status: int | None = None) -> bytes:
        """The body: Dynamo's flat members, then OpenAI's under ``error``. ``status``: if another one is sent."""
        code = self.status if status is None else status
        flat: dict[str, Any] = {"message": self.message, "type": reason_phrase(self.status), "code": code}
        if self.details is not None:
            flat["details"] = self.details
        message = self.hint or self.message
        flat["error"] = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode(flat)

    def stream_form(self) -> tuple[str, int, str]:
        """Type, code and message inside a stream that has begun."""
        return self.in_stream or _stream_form(self)

    def frame(self) -> bytes:
        """The same inside a stream that has begun; ``[DONE]`` is to follow it."""
        kind, code, text = self.stream_form()
        error: dict[str, Any] = {"message": text, "type": kind, "code": code}
        if self.status == OVERLOADED and self.code is not None:
            error["limit"] = self.code
        return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


_KINDS = {
    404: "not_found_error",
    429: "rate_limit_error",
    CLIENT_CLOSED: "request_cancelled",
    503: "service_unavailable",
    504: "timeout_error",
    OVERLOADED: "service_unavailable",
}

_STREAM_FORMS = {
    429: ("rate_limit_error", 429, "Rate limit exceeded"),
    CLIENT_CLOSED: ("request_cancelled", CLIENT_CLOSED, "Request cancelled"),
    502: ("internal_server_error", 502, "Bad gateway"),
    503: ("service_unavailable", 503, "Service temporarily unavailable"),
    504: ("timeout_error", 504, "Request deadline exceeded"),
    OVERLOADED: ("service_unavailable", OVERLOADED, "Service temporarily overloaded"),
}


def _stream_form(error: ApiError) -> tuple[str, int, str]:
    if error.status == 400:
        return "invalid_request_error", 400, error.message
    if error.status in _STREAM_FORMS:
        return _STREAM_FORMS[error.status]
    if error.status < 500:
        return "invalid_request_error", 400, "Invalid request"
    return "internal_server_error", 500, "Internal server error"


def reason_phrase(status: int) -> str:
    """Reason phrase as Dynamo spells it."""
    special = _PHRASES.get(status)
    if special is not None:
        return special
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


_PHRASES = {
    413: "Payload Too Large",
    418: "I'm a teapot",
    422: "Unprocessable Entity",
    CLIENT_CLOSED: "Client Closed Request",
    OVERLOADED: "Overloaded",
}


def overloaded(limit: str) -> ApiError:
    """Nobody has room for the request. ``limit``: one of ``WORKERS_BUSY``, ``WORKER_FULL``, ``QUEUE_FULL``,
    ``PREPROCESS_FULL``.
    """
    return ApiError(OVERLOADED, "Service temporarily overloaded", code=limit)


def internal_error(backend_status: int | None = None) -> ApiError:
    """500 without a cause; ``backend_status`` is what the worker asserted."""
    details = None if backend_status is None else {"backend_status": backend_status}
    return ApiError(500, "Internal server error", details=details)


def error_of_engine(error: Exception, *, started: bool) -> ApiError:
    """What a client is told about an exception of an engine (spec/frontend.md 2.6).

    Args:
        error: What ``TokenEngine.generate`` raised.
        started: It had yielded something before.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HttpError):
        return _error_of_http(error.code, started=started)
    if isinstance(error, EngineFailed) and error.status is not None:
        return _error_of_frame(error.status)
    for kind, make in _ENGINE_ERRORS:
        if isinstance(error, kind):
            return make(error)
    return internal_error(500)


def _error_of_http(code: int, *, started: bool) -> ApiError:
    fixed = _HTTP_ERRORS.get(code)
    if fixed is not None:
        return ApiError(code, fixed)
    if 400 <= code < 500:
        if started:
            return ApiError(400, "Invalid request")
        status = 400 if code == 422 else code
        in_stream = None if status == 429 else _INVALID_IN_STREAM
        return ApiError(status, reason_phrase(status), in_stream=in_stream)
    if code < 500:
        return internal_error()
    error = internal_error(code)
    error.in_stream = _STREAM_FORMS.get(code)
    return error


def _error_of_frame(status: int) -> ApiError:
    """Of an error that came as an item: its status stays, wherever in the stream it comes."""
    if status >= 500 or status == CLIENT_CLOSED:
        return _error_of_http(status, started=False)
    in_stream = None if status == 429 else ("invalid_request_error", status, "Invalid request")
    return ApiError(status, reason_phrase(status), in_stream=in_stream)


_INVALID_IN_STREAM = ("invalid_request_error", 400, "Invalid request")


def not_ready(name: str) -> ApiError:
    """503 for a model that is registered and cannot be served yet."""
    return ApiError(
        503,
        f"Model `{name}` is not ready to serve requests yet. The deployment may still be starting up or is not fully "
        "provisioned. Please retry shortly.",
        code="model_not_ready",
    )


_HTTP_ERRORS = {
    CLIENT_CLOSED: "Request cancelled",
    503: "Internal server error",
    OVERLOADED: "Service temporarily overloaded",
}

_ENGINE_ERRORS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], Callable[[Any], ApiError]], ...] = (
    (InvalidArgument, lambda error: ApiError(400, str(error))),
    (Cancelled, lambda _: ApiError(CLIENT_CLOSED, "Request cancelled")),
    (ConnectionTimeout, lambda _: ApiError(504, "Request deadline exceeded")),
    (_UNAVAILABLE, lambda _: ApiError(503, "Service temporarily unavailable")),
    (ModelNotReady, lambda error: not_ready(error.name)),
    (ModelNotFound, lambda _: model_not_found()),
    (OutputError, lambda _: internal_error()),
    ((ValueError, TypeError), lambda _: ApiError(400, "Invalid request")),
)


def model_not_found() -> ApiError:
    """404 for a name that no worker registered for this route."""
    return ApiError(404, "Model not found", param="model", code="model_not_found")


def no_model(path: str) -> ApiError:
    """404 for a route that no registered model serves (Dynamo sends it without a body)."""
    return ApiError(
        404,
        f"No model that serves {path} is registered yet. Start a worker (for example `dynamo-es worker mock`) or wait "
        "until one has registered; /v1/models lists the models that are ready.",
        param="model",
        code="model_not_found",
    )


def not_implemented(path: str) -> ApiError:
    """501 for a route that is known by name, while no worker serves it or for good."""
    return ApiError(
        501,
        f"{path} is not implemented here, or no registered worker serves it; /v1/models lists the models that are "
        "ready.",
        code="not_implemented",
    )
