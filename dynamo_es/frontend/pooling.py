"""``POST /v1/pooling`` (spec/frontend.md 1.7): raw pooler output, as JSON or as bytes."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynamo_es.frontend import serde
from dynamo_es.frontend.classify import TEXT_CHECKS, TextRequest, Usage, add_usage, check_text_request, text_work
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.direct import DirectAnswer, DirectWork, read_item
from dynamo_es.frontend.embeddings import fits_input
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.http_exchange import Header
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import U32

_BYTES: Header = (b"content-type", b"application/octet-stream")
_MAX_METADATA_BYTES = 32 * 1024
"""Longest header that clients and proxies can be expected to take."""
_ENCODINGS = ("float", "base64", "bytes", "bytes_only")
_DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
_ENDIANNESS = ("native", "big", "little")
_SIDES = ("left", "right")


class PoolingRequest(TextRequest, kw_only=True):
    """Body of ``POST /v1/pooling``; other members are dropped."""

    task: str | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    dimensions: U32 | None = None


class Pooled(msgspec.Struct, omit_defaults=True):
    """Output of one input: a vector, a row for each token, or bytes in base64; ``shape`` belongs to bytes."""

    index: int
    object: str
    data: str | list[float | list[float]]
    shape: list[int] | None = None


class PooledList(msgspec.Struct):
    """The body of an answer."""

    id: str
    object: str
    created: int
    model: str
    data: list[Pooled]
    usage: Usage


def _one_of(names: Sequence[str]) -> serde.Check:
    return lambda value: serde.variant(value, names) or serde.TEXT(value)


class PoolingRoute:
    """A ``DirectRoute``."""

    endpoint = "pooling"
    family: Family = "pooling"

    def __init__(self) -> None:
        self.kind: RequestKind[PoolingRequest] = RequestKind(
            PoolingRequest,
            msgspec.json.Decoder(PoolingRequest),
            frozenset(PoolingRequest.__struct_fields__),
            ("input",),
            {
                **TEXT_CHECKS,
                "input": serde.untagged("PoolingInput", fits_input),
                "task": serde.TEXT,
                "encoding_format": _one_of(_ENCODINGS),
                "embed_dtype": _one_of(_DTYPES),
                "endianness": _one_of(_ENDIANNESS),
                "truncation_side": _one_of(_SIDES),
                "dimensions": serde.UNSIGNED_32,
            },
            ("model", "input"),
            "NvCreatePoolingRequest",
            plain=True,
        )

    def check(self, source: PoolingRequest) -> None:
        if source.dimensions is not None:
            raise ApiError(
                400, "dimensions is currently not supported", param="dimensions", code="unsupported_parameter"
            )
        check_text_request(source)

    def work(self, source: PoolingRequest, model: ServedModel) -> DirectWork:
        return text_work(source, model)

    def answer(self, source: PoolingRequest, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        parts = [read_item(item, PooledList) for item in items]
        answer = parts[0]
        for part in parts[1:]:
            answer.data += part.data
            add_usage(answer.usage, part.usage)
        if source.encoding_format in ("float", "base64"):
            return DirectAnswer(msgspec.json.encode(answer))
        return _as_bytes(source, answer)

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


def _as_bytes(source: PoolingRequest, answer: PooledList) -> DirectAnswer:
    """All outputs behind each other; with ``bytes`` a header says where each is."""
    parts: list[bytes] = []
    places: list[dict[str, Any]] = []
    start = 0
    for item in answer.data:
        if not isinstance(item.data, str):
            raise OutputError("numbers where bytes in base64 were asked for")
        try:
            part = b64decode(item.data, validate=True)
        except ValueError as error:
            raise OutputError("pooler output that is no base64") from error
        parts.append(part)
        places.append(
            {
                "index": item.index,
                "embed_dtype": source.embed_dtype or "float32",
                "endianness": source.endianness or "native",
                "start": start,
                "end": start + len(part),
                "shape": item.shape,
            }
        )
        start += len(part)
    if source.encoding_format == "bytes_only":
        return DirectAnswer(b"".join(parts), _BYTES)
    metadata = {
        "id": answer.id,
        "created": answer.created,
        "model": answer.model,
        "data": places,
        "usage": msgspec.to_builtins(answer.usage),
    }
    header = json.dumps(metadata, separators=(",", ":")).encode("ascii")
    if len(header) > _MAX_METADATA_BYTES:
        raise ApiError(
            400,
            f"The outputs' description is too long for a header ({len(header)} bytes, at most {_MAX_METADATA_BYTES}): "
            "send fewer inputs, or ask for encoding_format bytes_only",
            param="encoding_format",
            code="invalid_value",
        )
    return DirectAnswer(b"".join(parts), _BYTES, ((b"metadata", header),))
