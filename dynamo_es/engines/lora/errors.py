"""Why an adapter is not loaded or unloaded, beside what is wrong with a request or a source."""

from __future__ import annotations

from dynamo_es.errors import DynamoException, StreamIncomplete

_SHOWN = 64


class AdapterMissing(DynamoException):
    """There is no such adapter here."""


class AdapterNotHere(StreamIncomplete):
    """A worker is asked for an adapter that it does not have, or not any more: another one may have it.

    Who asks learns late of what comes and goes. The worker is well: only this request must not come to it again.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"this worker has no LoRA adapter {name[:_SHOWN]!r}")
        self.name = name


class AdapterConflict(DynamoException):
    """What is loaded already is in the way: of the same name, or as many as there may be."""


class TooManyOperations(DynamoException):
    """So many loads and unloads wait already."""

    retriable = True
