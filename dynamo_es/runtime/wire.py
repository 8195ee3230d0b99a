"""The request plane's messages. Pure: bytes in, frames out.

A message is a msgpack array of frames, so that all tokens of one engine step travel together. Payloads are msgpack
documents embedded as they are; they are decoded by whoever wants them, so a bad one costs its own stream only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_es.errors import DynamoException

PROTOCOL_VERSION = 1


class WireError(DynamoException):
    """A message does not follow the protocol."""


class Hello(msgspec.Struct, tag=0, array_like=True, gc=False):
    """First frame of a client on a connection; answered by ``Welcome``."""

    version: int
    client: str


class Welcome(msgspec.Struct, tag=1, array_like=True, gc=False):
    """The server knows the client. ``instance_id`` lets the client check that it is who it was looked up as."""

    version: int
    instance_id: int


class Open(msgspec.Struct, tag=2, array_like=True, gc=False):
    """Start a stream. ``window``: items that may be sent before the first ``Credit``.

    ``traceparent``, ``tracestate``: W3C's headers of the same names; empty: the request is in no trace.
    """

    stream: int
    endpoint: str
    request_id: str
    metadata: dict[str, str]
    window: int
    payload: msgspec.Raw
    traceparent: str = ""
    tracestate: str = ""


class Items(msgspec.Struct, tag=3, array_like=True, gc=False):
    """Items of one stream, in order."""

    stream: int
    items: list[msgspec.Raw]


class End(msgspec.Struct, tag=4, array_like=True, gc=False):
    """The stream is complete."""

    stream: int


class Fail(msgspec.Struct, tag=5, array_like=True, gc=False):
    """The stream ended by an error. ``kind``: Dynamo's backend error kind; ``before_start``: no item was produced."""

    stream: int
    kind: str
    text: str
    before_start: bool = False


class Credit(msgspec.Struct, tag=6, array_like=True, gc=False):
    """The consumer took items; that many more may be sent."""

    stream: int
    items: int


class Cancel(msgspec.Struct, tag=7, array_like=True, gc=False):
    """The consumer wants no more. ``kill``: do not even finish in order."""

    stream: int
    kill: bool


class Ping(msgspec.Struct, tag=8, array_like=True, gc=False):
    """Sign of life of a client; answered by ``Pong``."""

    number: int


class Pong(msgspec.Struct, tag=9, array_like=True, gc=False):
    """Answer to ``Ping``."""

    number: int


ClientFrame = Hello | Open | Credit | Cancel | Ping
ServerFrame = Welcome | Items | End | Fail | Pong


class WireCodec:
    """Encodes and decodes messages of one connection end. Not safe to share between threads."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._from_client: msgspec.msgpack.Decoder[list[ClientFrame]] = msgspec.msgpack.Decoder(list[ClientFrame])
        self._from_server: msgspec.msgpack.Decoder[list[ServerFrame]] = msgspec.msgpack.Decoder(list[ServerFrame])

    def encode(self, frames: Sequence[msgspec.Struct]) -> bytes:
        """One message."""
        return self._encoder.encode(frames)

    def decode_client(self, message: bytes) -> list[ClientFrame]:
        """Frames of a client's message. Raises ``WireError``."""
        self._check_size(message)
        try:
            return self._from_client.decode(message)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"client message is not understood: {error}") from error

    def decode_server(self, message: bytes) -> list[ServerFrame]:
        """Frames of a server's message. Raises ``WireError``."""
        self._check_size(message)
        try:
            return self._from_server.decode(message)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"server message is not understood: {error}") from error

    def _check_size(self, message: bytes) -> None:
        if len(message) > self._max_message_bytes:
            raise WireError(f"message of {len(message)} bytes, the bound is {self._max_message_bytes}")


class PayloadCodec:
    """Payloads of requests and items: any JSON-like value plus bytes, NaN, u64 and non-text keys."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()

    def encode(self, value: Any) -> msgspec.Raw:
        """A payload; tuples and sets become lists.

        Raises:
            TypeError: A value has a type that msgpack does not carry.
            DynamoException: An integer is outside of i64 and u64 (Dynamo's text).
        """
        try:
            return msgspec.Raw(self._encoder.encode(value))
        except OverflowError as error:
            number = _first_big_integer(value)
            raise DynamoException(
                f"invalid type: integer `{number}` as u128, expected any valid MessagePack value"
            ) from error
        except (TypeError, msgspec.EncodeError) as error:
            raise TypeError(f"unsupported type object: {error}") from error

    def decode(self, payload: msgspec.Raw) -> Any:
        """The value of a payload.

        Raises:
            WireError: It is not msgpack.
        """
        try:
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"payload is not understood: {error}") from error


def _first_big_integer(value: Any) -> int:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, int) and not -(2**63) <= item < 2**64:
            return item
        if isinstance(item, dict):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            pending.extend(item)
    return 0
