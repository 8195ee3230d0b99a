"""Errors of registering and fetching models."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class ModelError(DynamoException):
    """A model cannot be described or registered as asked; the message says why."""


class CardNotFound(ModelError):
    """There is no such registration of this process.

    Attributes:
        key: ``namespace/component/endpoint/<instance id, hex>[/<slug>]``.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"Could not find key '{key}'")
        self.key = key


class ModelFetchError(ModelError):
    """A model could not be fetched from the hub.

    Attributes:
        model, revision: What was asked for.
    """

    retriable = True

    def __init__(self, model: str, revision: str, detail: str) -> None:
        super().__init__(
            f"Failed to fetch model '{model}' at revision '{revision}' from HuggingFace. "
            f"Is this a valid HuggingFace ID and revision? Error: {detail}"
        )
        self.model = model
        self.revision = revision


class LoraError(ModelError, RuntimeError):
    """A LoRA could not be had. Also a RuntimeError, as in Dynamo.

    Attributes:
        uri: What was asked for.
    """

    def __init__(self, uri: str, detail: str) -> None:
        super().__init__(f"Download failed: {detail}")
        self.uri = uri
