"""Errors of the router."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class NoEligibleWorker(DynamoException):
    """No worker may take the request."""

    retriable = True


class BookingConflict(DynamoException):
    """The request id is booked already."""


class UnknownRequest(DynamoException):
    """No booking has this request id."""
