"""Why an adapter is not loaded or unloaded, beside what is wrong with a request or a source."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class AdapterMissing(DynamoException):
    """There is no such adapter here."""


class AdapterConflict(DynamoException):
    """What is loaded already is in the way: of the same name, or as many as there may be."""


class TooManyOperations(DynamoException):
    """So many loads and unloads wait already."""

    retriable = True
