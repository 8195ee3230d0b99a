"""Errors of the runtime."""

from __future__ import annotations

from dynamo_es.errors import ConnectionTimeout, DynamoException


class RequestPlaneError(DynamoException):
    """The request plane cannot be set up."""


class Overloaded(DynamoException):
    """The instance has as many streams as it takes; another one may have room."""

    retriable = True


class StreamSilent(ConnectionTimeout):
    """An instance sent nothing of a stream for as long as that may take."""

    def __init__(self, instance_id: int, limit_s: float) -> None:
        super().__init__(f"instance {instance_id} sent nothing for {limit_s:g} s (--backend-stream-timeout)")
        self.instance_id = instance_id
        self.limit_s = limit_s


class RuntimeClosed(DynamoException):
    """The runtime was shut down."""


class NoInstances(DynamoException):
    """No instance can take the request now."""

    retriable = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"Unavailable: No workers available for endpoint {endpoint}")
        self.endpoint = endpoint
