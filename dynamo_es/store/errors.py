"""Errors of the state store."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class StoreError(DynamoException):
    """Root of the store's errors."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"state store {path}: {message}")
        self.path = path


class StoreLocked(StoreError):
    """Another process (or another part of this one) has the store open."""

    retriable = True


class StoreFull(StoreError):
    """No space left; the last committed state is intact."""

    retriable = True


class StoreFormatError(StoreError):
    """Written by a newer version, or not a state store."""


class StoreClosed(StoreError):
    """Used after ``close``."""
