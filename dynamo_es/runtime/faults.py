"""How a handler's exception is named on the wire, and what the caller raises for it (spec: services a.4)."""

from __future__ import annotations

import asyncio
import json

from dynamo_es.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    DynamoException,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
)
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.errors import Overloaded

_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (InvalidArgument, "InvalidArgument"),
    (CannotConnect, "CannotConnect"),
    (Disconnected, "Disconnected"),
    (ConnectionTimeout, "ConnectionTimeout"),
    (Cancelled, "Cancelled"),
    (EngineShutdown, "EngineShutdown"),
    (StreamIncomplete, "StreamIncomplete"),
    (Overloaded, "Overloaded"),
    (DynamoException, "Unknown"),
)
_TYPES: dict[str, type[DynamoException]] = {
    "InvalidArgument": InvalidArgument,
    "CannotConnect": CannotConnect,
    "Disconnected": Disconnected,
    "ConnectionTimeout": ConnectionTimeout,
    "Cancelled": Cancelled,
    "EngineShutdown": EngineShutdown,
    "StreamIncomplete": StreamIncomplete,
    "Unknown": Unknown,
}
HTTP_KIND = "Http"


def describe_exception(error: BaseException) -> tuple[str, str]:
    """Kind and text of what a handler raised. Dynamo's own exceptions give their text, others also their class."""
    if isinstance(error, HttpError):
        return HTTP_KIND, json.dumps({"message": error.message, "code": error.code}, separators=(",", ":"))
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return name, str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, asyncio.CancelledError):
        return "Cancelled", text
    if isinstance(error, TimeoutError):
        return "ConnectionTimeout", text
    if isinstance(error, ValueError | TypeError):
        return "InvalidArgument", text
    return "Unknown", text


def typed_error(kind: str, text: str) -> Exception:
    """The exception class of a kind, for callers inside dynamo-es."""
    if kind == HTTP_KIND:
        fields = json.loads(text)
        return HttpError(fields["code"], fields["message"])
    return _TYPES.get(kind, Unknown)(text)


def backend_error(error: Exception) -> Exception:
    """What ``Client`` raises for a failure in the handler: ``ValueError("Backend<Kind>: <text>")``, as in Dynamo."""
    if isinstance(error, HttpError):
        kind = "InvalidArgument" if 400 <= error.code < 500 else "Unknown"
        return ValueError(f"Backend{kind}: {describe_exception(error)[1]}")
    kind, text = describe_exception(error)
    return ValueError(f"Backend{kind}: {text}")
