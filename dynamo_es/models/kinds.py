"""What a model takes, what it offers, and which stage a worker is (Dynamo's enums; spec/services d.1). Pure."""

from __future__ import annotations

from enum import Flag, IntEnum


class ModelInput(IntEnum):
    """What a worker's requests hold. Numbers and texts are Dynamo's.

    Attributes:
        Text: The request as the client sent it.
        Tokens: Token ids; the frontend tokenizes.
        Tensor: Named tensors.
    """

    Text = 1
    Tokens = 2
    Tensor = 3

    def __repr__(self) -> str:
        return f"ModelInput.{self.name}"

    __str__ = __repr__


class WorkerType(IntEnum):
    """The stage of a request that a worker handles. Numbers and texts are Dynamo's; ``str()`` is the card's word."""

    Prefill = 1
    Decode = 2
    Encode = 3
    Aggregated = 4

    def __repr__(self) -> str:
        return f"WorkerType.{self.name}"

    def __str__(self) -> str:
        return self.name.lower()


class ModelType(Flag):
    """The APIs that a model offers, joined by ``|``. Unlike Dynamo's, equal sets are equal objects and hashable.

    ``str()`` gives the lower-case names joined by commas; ``Empty`` is no API at all.
    """

    Empty = 0
    Chat = 1
    Completions = 2
    Embedding = 4
    TensorBased = 8
    Prefill = 16
    Images = 32
    Audios = 64
    Videos = 128
    Realtime = 256
    Classify = 512
    Pooling = 1024

    def __str__(self) -> str:
        return ",".join("tensor" if name == "TensorBased" else name.lower() for name in self._names())

    def supports_chat(self) -> bool:
        """Whether it offers chat completions."""
        return ModelType.Chat in self

    def supports_embedding(self) -> bool:
        """Whether it offers embeddings."""
        return ModelType.Embedding in self

    def supports_classify(self) -> bool:
        """Whether it offers classification."""
        return ModelType.Classify in self

    def supports_pooling(self) -> bool:
        """Whether it offers pooling."""
        return ModelType.Pooling in self

    def card_text(self) -> str:
        """The card's form: names joined by `` | ``."""
        return " | ".join(self._names())

    def _names(self) -> list[str]:
        return [str(member.name) for member in self]


def parse_model_type(text: str) -> ModelType:
    """The value of a card's ``model_type``. Raises ValueError for a name that there is not."""
    found = ModelType.Empty
    for name in text.split(" | ") if text else ():
        if name not in ModelType.__members__:
            raise ValueError(f"unknown model type {name!r}, expected names of {', '.join(ModelType.__members__)}")
        found |= ModelType[name]
    return found
