"""Reads the body of an inference request: content type, size, JSON, typed request (spec/frontend.md 0.5, 2.1)."""

from __future__ import annotations

import asyncio
import builtins
import json
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from dynamo_es.errors import DynamoException
from dynamo_es.frontend import json_places, serde
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
R = TypeVar("R", bound=msgspec.Struct)
D_co = TypeVar("D_co", bound=msgspec.Struct, covariant=True)

_EXPLAINED_BYTES = 1024 * 1024
"""Larger bodies get msgspec's own words: explaining needs a second, slower pass."""
_JSON_TYPE = re.compile(rb"application/(?:[a-z0-9.!#$&^_-]+\+)?json", re.IGNORECASE)
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_FIELD_OF_PATH = re.compile(r"at `\$\.(\w+)")
_PREFIX = "Failed to deserialize the JSON body into the target type: "
_SYNTAX_PREFIX = "Failed to parse the request body as JSON: "


class BodyDecoder(Protocol[D_co]):
    """Decodes JSON into one type; msgspec's own decoders are some."""

    def decode(self, buf: bytes, /) -> D_co:
        """Raises msgspec's errors."""


class ClientGone(DynamoException):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class RequestKind(Generic[R]):
    """One kind of body.

    Attributes:
        decoder: Typed decoder.
        known: Names of all top-level members.
        uniform: Members whose list must not mix texts, ids and lists; the decoder cannot see that.
        checks, required, struct: For explanations (``serde.shape_fault``).
        plain: Dynamo reads it as a plain structure: errors of type are placed where they are, not at the end.
        by_path: Dynamo reads it by another reader: errors begin with the path of the member, and what is no JSON, or
            does not call itself so, is told in other words.
        described: What the API description shows instead of ``type``.
    """

    type: type[R]
    decoder: BodyDecoder[R]
    known: frozenset[str]
    uniform: Sequence[str]
    checks: Mapping[str, serde.Check]
    required: Sequence[str]
    struct: str
    plain: bool = False
    by_path: bool = False
    described: builtins.type[msgspec.Struct] | None = None


def chat_kind() -> RequestKind[ChatRequest]:
    """Bodies of ``/v1/chat/completions``."""
    return RequestKind(
        ChatRequest,
        msgspec.json.Decoder(ChatRequest),
        frozenset(ChatRequest.__struct_fields__),
        ("stop",),
        serde.CHAT_CHECKS,
        ("messages", "model"),
        "NvCreateChatCompletionRequest",
    )


def completion_kind() -> RequestKind[CompletionRequest]:
    """Bodies of ``/v1/completions``."""
    return RequestKind(
        CompletionRequest,
        msgspec.json.Decoder(CompletionRequest),
        frozenset(CompletionRequest.__struct_fields__),
        ("prompt", "stop"),
        serde.COMPLETION_CHECKS,
        ("model", "prompt"),
        "NvCreateCompletionRequest",
    )


def check_content_type(value: bytes | None, *, by_path: bool = False) -> None:
    """Raises 415 unless it is JSON, with parameters (``; charset=utf-8``) or without.

    ``by_path``: as in ``RequestKind``.
    """
    if value == b"application/json":
        return
    if value is None or not _JSON_TYPE.fullmatch(value.partition(b";")[0].strip()):
        name = "`Content-Type: application/json`" if by_path else "Content-Type application/json"
        raise ApiError(415, f"Expected request with {name}", code="unsupported_media_type")


def encoded_body() -> ApiError:
    """415 for a compressed body: what it inflates to is not known before it is done."""
    text = "Content-Encoding is not supported: send the body as it is"
    return ApiError(415, text, code="unsupported_encoding")


def too_large(limit_mb: int) -> ApiError:
    """413, naming the setting."""
    return ApiError(
        413,
        f"Request body exceeds the limit of {limit_mb} MB set by DYN_HTTP_BODY_LIMIT_MB",
        code="request_too_large",
    )


async def read_body(receive: Receive, declared: int | None, limit_mb: int, silence_s: float | None = None) -> bytes:
    """The whole body; never holds more than the limit and one message.

    Args:
        receive: ASGI's; nobody else may call it meanwhile.
        declared: ``content-length``, or None.
        limit_mb: Largest body in MiB.
        silence_s: How long the client may send nothing; None: any time.

    Raises:
        ApiError: 408, 413.
        ClientGone: The client closed before the end.
    """
    limit = limit_mb * 1024 * 1024
    if declared is not None and declared > limit:
        raise too_large(limit_mb)
    message = await _next_part(receive, silence_s)
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if len(first) > limit:
            raise too_large(limit_mb)
        return first
    parts = bytearray(first)
    while message.get("more_body", False):
        message = await _next_part(receive, silence_s)
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise too_large(limit_mb)
    return bytes(parts)


async def _next_part(receive: Receive, silence_s: float | None) -> MutableMapping[str, Any]:
    try:
        async with asyncio.timeout(silence_s):
            message = await receive()
    except TimeoutError as error:
        text = f"The body of the request did not come: nothing for {silence_s:g} s"
        raise ApiError(408, text, code="request_timeout") from error
    if message["type"] == "http.disconnect":
        raise ClientGone("the client closed the connection while it sent its request")
    return message


def decode_request(body: bytes, kind: RequestKind[R]) -> tuple[R, list[str]]:
    """The typed request and the names of unknown top-level members.

    A known member that comes twice is refused, in bodies of up to 1 MiB. If strict decoding fails, control characters
    in strings are escaped and then invalid UTF-8 is replaced, each with another try; the first failure is the one that
    is reported.

    Raises:
        ApiError: 400 with the place and the field.
    """
    if serde.too_deep(body) is not None:
        raise _refusal(body, kind, None)
    request, unknown = _decode(body, kind)
    twice = serde.repeated_field(body, kind.known) if len(body) <= _EXPLAINED_BYTES else None
    if twice is not None:
        place = serde.position(body, len(body.rstrip()))
        raise ApiError(400, f"{_PREFIX}duplicate field `{twice}` {place}", param=twice, code="invalid_body")
    for name in kind.uniform:
        value = getattr(request, name)
        if isinstance(value, list) and len(set(map(type, value))) > 1:
            error = ApiError(400, f"{_PREFIX}data did not match any variant of `{name}`", param=name)
            raise _refusal(body, kind, error)
    return request, unknown


def _decode(body: bytes, kind: RequestKind[R]) -> tuple[R, list[str]]:
    try:
        return kind.decoder.decode(body), []
    except msgspec.ValidationError as error:
        return _without_unknown(body, kind, error)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _leniently(body, kind, error)
    except RecursionError as error:
        raise _refusal(body, kind, error) from error


def _leniently(body: bytes, kind: RequestKind[R], first: Exception) -> tuple[R, list[str]]:
    for repaired in (_escape_controls(body), _replace_invalid(_escape_controls(body))):
        if repaired == body:
            continue
        try:
            return kind.decoder.decode(repaired), []
        except msgspec.ValidationError as error:
            return _without_unknown(repaired, kind, error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    raise _refusal(body, kind, first) from first


def _escape_controls(body: bytes) -> bytes:
    return _STRING.sub(lambda match: _CONTROL.sub(lambda one: b"\\u%04x" % one.group()[0], match.group()), body)


def _replace_invalid(body: bytes) -> bytes:
    return body.decode("utf-8", "replace").encode()


def _without_unknown(body: bytes, kind: RequestKind[R], error: msgspec.ValidationError) -> tuple[R, list[str]]:
    try:
        document = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as other:
        raise _refusal(body, kind, error) from other
    unknown = [name for name in document if name not in kind.known]
    if not unknown:
        raise _refusal(body, kind, error) from error
    known = msgspec.json.encode({name: value for name, value in document.items() if name in kind.known})
    try:
        return kind.decoder.decode(known), unknown
    except msgspec.DecodeError as other:
        raise _refusal(body, kind, other) from other


def _refusal(body: bytes, kind: RequestKind[R], error: Exception | None) -> ApiError:
    if len(body) <= _EXPLAINED_BYTES:
        fault = serde.syntax_fault(body)
        if fault is not None:
            return _syntax_refusal(body, kind, fault)
        fault = _explain(body, kind)
        if fault is not None:
            return _shape_refusal(fault)
    if isinstance(error, ApiError):
        return error
    text = str(error) if isinstance(error, msgspec.MsgspecError) else "recursion limit exceeded"
    place = _FIELD_OF_PATH.search(text)
    return _shape_refusal(serde.Fault(f"{text} {serde.position(body, len(body))}", place.group(1) if place else None))


def _shape_refusal(fault: serde.Fault) -> ApiError:
    return ApiError(400, _PREFIX + fault.detail, param=fault.field, code="invalid_body")


def _syntax_refusal(body: bytes, kind: RequestKind[R], fault: serde.Fault) -> ApiError:
    if not kind.by_path:
        return _shape_refusal(fault)
    member = json_places.open_member(body[: fault.offset])
    detail = fault.detail if member is None else f"{member}: {fault.detail}"
    return ApiError(400, _SYNTAX_PREFIX + detail, param=member, code="invalid_json")


def _explain(body: bytes, kind: RequestKind[R]) -> serde.Fault | None:
    document = json.loads(body)
    fault = serde.shape_fault(document, kind.checks, kind.required, kind.struct)
    if fault is None:
        return None
    found = fault.field if isinstance(document, dict) and fault.field in document else None
    if isinstance(document, list):
        end = 0
    elif kind.plain and found is not None:
        end = json_places.value_end(body, found)
    else:
        end = json_places.fault_offset(body, fault.field, fault.detail)
    path = f"{found}: " if kind.by_path and found is not None else ""
    return serde.Fault(f"{path}{fault.detail} {serde.position(body, end)}", fault.field)
