"""Encoding and decoding of record values, for one topic.

A value is msgpack of a tagged msgspec Struct in array form: ``[tag, version, ...]``. The header ``schema`` carries
``<topic>/<version>`` as well, so that a reader in another language can look before it decodes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.topic import TopicSpec

SCHEMA_HEADER = "schema"
TRACE_HEADER = "traceparent"
"""Of a record about a request that is in a trace: W3C's trace context, as OpenTelemetry passes it over Kafka."""


class SchemaError(ValueError):
    """A record does not follow its topic's contract.

    Attributes:
        reason: ``undecodable``, ``unknown_version``, ``too_large`` or ``missing_identity``; a bounded set, fit for
            a metric label and for a dead letter.
        detail: What was wrong.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class TopicCodec:
    """Codec of one topic. Not safe to share between threads (the encoder keeps a buffer)."""

    def __init__(self, spec: TopicSpec) -> None:
        self.spec = spec
        self.headers: tuple[tuple[str, bytes], ...] = ((SCHEMA_HEADER, f"{spec.name}/{spec.version}".encode()),)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(spec.value)

    def encode(self, value: msgspec.Struct) -> bytes:
        """Value bytes of a record.

        Raises:
            SchemaError: ``too_large``, above the topic's bound.
        """
        data = self._encoder.encode(value)
        if len(data) > self.spec.max_value_bytes:
            raise SchemaError("too_large", f"{len(data)} bytes, {self.spec.name} takes {self.spec.max_value_bytes}")
        return data

    def decode(self, data: bytes, headers: tuple[tuple[str, bytes], ...] = ()) -> Any:
        """The Struct that ``data`` holds; checked completely, so a fold need not check again.

        Raises:
            SchemaError: Not msgpack, not this contract, another version, or over the topic's bound.
        """
        spec = self.spec
        if headers and headers != self.headers:
            self._check_header(headers)
        if len(data) > spec.max_value_bytes:
            raise SchemaError("too_large", f"{len(data)} bytes, {spec.name} takes {spec.max_value_bytes}")
        try:
            value = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._classify(data, error) from error
        if value.version != spec.version:
            raise SchemaError("unknown_version", f"version {value.version}, this reader knows {spec.version}")
        return value

    def _check_header(self, headers: tuple[tuple[str, bytes], ...]) -> None:
        for name, content in headers:
            if name == SCHEMA_HEADER and content != self.headers[0][1]:
                found = content[:64].decode("utf-8", "replace")
                reason = "unknown_version" if found.startswith(f"{self.spec.name}/") else "undecodable"
                raise SchemaError(reason, f"header says {found!r}, expected {self.headers[0][1].decode()!r}")

    def _classify(self, data: bytes, error: Exception) -> SchemaError:
        try:
            loose = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return SchemaError("undecodable", str(error))
        if isinstance(loose, list) and len(loose) >= 2 and isinstance(loose[1], int):
            if loose[1] != self.spec.version:
                return SchemaError("unknown_version", f"version {loose[1]}, this reader knows {self.spec.version}")
            return SchemaError("undecodable", str(error))
        return SchemaError("missing_identity", str(error))
