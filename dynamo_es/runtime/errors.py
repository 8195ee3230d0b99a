"""Errors of the runtime."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class RequestPlaneError(DynamoException):
    """The request plane cannot be set up."""


class Overloaded(DynamoException):
    """The instance has as many streams as it takes; another one may have room."""

    retriable = True


class RuntimeClosed(DynamoException):
    """The runtime was shut down."""


class NoInstances(DynamoException):
    """No instance can take the request now."""

    retriable = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(f"Unavailable: No workers available for endpoint {endpoint}")
        self.endpoint = endpoint
