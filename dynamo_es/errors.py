"""The error tree. One root, ``DynamoException``, as in Dynamo (``dynamo._core.DynamoException``).

``retriable`` is data on the class: a caller that can wait asks the error, not a table of its own. Context
(topic, partition, offset, path, ...) is kept as attributes, so that a handler never parses a message.
"""

from __future__ import annotations

from typing import ClassVar


class DynamoException(Exception):
    """Root of every error that dynamo-es raises on purpose."""

    retriable: ClassVar[bool] = False


class Unknown(DynamoException):
    """The other side failed in a way that it did not classify."""


class InvalidArgument(DynamoException):
    """The caller's input is wrong; sending it again cannot help."""


class CannotConnect(DynamoException):
    """No connection to the instance could be made; nothing was sent."""

    retriable = True


class Disconnected(DynamoException):
    """The connection was lost while a stream was open."""

    retriable = True


class ConnectionTimeout(DynamoException):
    """The peer did not answer in time."""

    retriable = True


class Cancelled(DynamoException):
    """The request was cancelled by its caller."""


class EngineShutdown(DynamoException):
    """The engine is going away; another instance can serve the request."""

    retriable = True


class StreamIncomplete(DynamoException):
    """The stream ended without its end mark."""

    retriable = True


class ConfigError(DynamoException):
    """A setting is wrong. The message names the setting, the value, and what is accepted."""
