"""What the standalone services say no with."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class ServiceRefusal(DynamoException):
    """The service does not do what it was asked.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
