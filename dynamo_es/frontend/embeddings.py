"""``POST /v1/embeddings`` (spec/frontend.md 1.3).

Token-input workers get lists of ids and answer ``{embeddings, prompt_tokens, total_tokens}``; text-input workers get
the request and answer with the body. Either may answer in the other form. Vectors are sent as the client asked for
them, whatever form the worker chose (Dynamo sends floats to a client that asked for base64 if the worker sent floats).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.direct import DirectAnswer, DirectWork, given, read_item
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.preprocess import check_prompt, check_prompt_ids, check_text_size, routing_of
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import U32, NvExt

_F32 = np.dtype("<f4")
_ENCODINGS = ("float", "base64")


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/embeddings``; other members are dropped."""

    model: str
    input: str | list[str | U32 | list[U32]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: U32 | None = None
    user: str | None = None
    nvext: NvExt | None = None


class EngineEmbeddings(msgspec.Struct):
    """What a token-input worker answers: a vector for each list of ids, in order."""

    embeddings: list[list[float]]
    prompt_tokens: int = 0
    total_tokens: int | None = None


class Embedding(msgspec.Struct):
    """One vector: floats, or little-endian 32-bit floats in base64."""

    index: int
    object: str
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """The body of an answer."""

    object: str
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


def embedding_kind() -> RequestKind[EmbeddingRequest]:
    """Bodies of ``/v1/embeddings``."""
    return RequestKind(
        EmbeddingRequest,
        msgspec.json.Decoder(EmbeddingRequest),
        frozenset(EmbeddingRequest.__struct_fields__),
        ("input",),
        {
            "model": serde.TEXT,
            "input": serde.untagged("EmbeddingInput", fits_input),
            "encoding_format": lambda value: serde.variant(value, _ENCODINGS) or serde.TEXT(value),
            "dimensions": serde.UNSIGNED_32,
            "user": serde.TEXT,
            "nvext": serde.check_nvext,
        },
        ("model", "input"),
        "NvCreateEmbeddingRequest",
    )


def fits_input(value: Any) -> bool:
    """Whether a value is one text, one list of ids, or a list of either."""
    return isinstance(value, str) or serde.homogeneous(value, (str, int, list))


class EmbeddingRoute:
    """A ``DirectRoute``."""

    endpoint = "embeddings"
    family: Family = "embedding"

    def __init__(self) -> None:
        self.kind = embedding_kind()

    def check(self, source: EmbeddingRequest) -> None:
        """Dynamo refuses nothing: empty input and no dimensions reach the worker."""

    def work(self, source: EmbeddingRequest, model: ServedModel) -> DirectWork:
        inputs = inputs_of(source.input)
        extension = source.nvext or NvExt()
        routing = routing_of(extension, extension.cache_salt)
        if model.card.model_input != "Tokens":
            return DirectWork({**given(source), "model": model.name, "routing": routing}, inputs=len(inputs))
        token_ids = [_token_ids(item, model) for item in inputs]
        request = {
            "model": model.name,
            "token_ids": token_ids,
            "dimensions": source.dimensions,
            "encoding_format": source.encoding_format,
            "annotations": extension.annotations or [],
            "routing": routing,
        }
        return DirectWork(request, sum(map(len, token_ids)), len(inputs))

    def answer(self, source: EmbeddingRequest, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        answer = _merged([_read(item, model.name) for item in items])
        as_base64 = source.encoding_format == "base64"
        for entry in answer.data:
            entry.embedding = _to_base64(entry.embedding) if as_base64 else _to_floats(entry.embedding)
        return DirectAnswer(msgspec.json.encode(answer))

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


def inputs_of(value: str | list[Any]) -> list[Any]:
    """One text or list of ids for each vector."""
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)


def _token_ids(item: str | list[int], model: ServedModel) -> list[int]:
    if isinstance(item, str):
        check_text_size(model, item, "input")
        token_ids = model.tokenizer.encode(item, False) if item else []
    else:
        check_prompt_ids(item, model, "input")
        token_ids = item
    check_prompt(model, token_ids, "input")
    return token_ids


def _read(item: Any, model: str) -> EmbeddingList:
    if isinstance(item, Mapping) and "embeddings" in item:
        own = read_item(item, EngineEmbeddings)
        total = own.prompt_tokens if own.total_tokens is None else own.total_tokens
        vectors = [Embedding(place, "embedding", vector) for place, vector in enumerate(own.embeddings)]
        return EmbeddingList("list", model, vectors, EmbeddingUsage(own.prompt_tokens, total))
    return read_item(item, EmbeddingList)


def _merged(parts: Sequence[EmbeddingList]) -> EmbeddingList:
    answer = parts[0]
    for part in parts[1:]:
        answer.data += part.data
        answer.usage.prompt_tokens += part.usage.prompt_tokens
        answer.usage.total_tokens += part.usage.total_tokens
    if not answer.data:
        raise OutputError("no embeddings")
    return answer


def _to_base64(vector: list[float] | str) -> str:
    return vector if isinstance(vector, str) else b64encode(np.asarray(vector, _F32).tobytes()).decode()


def _to_floats(vector: list[float] | str) -> list[float]:
    if not isinstance(vector, str):
        return vector
    try:
        values: list[float] = np.frombuffer(b64decode(vector, validate=True), _F32).tolist()
    except ValueError as error:
        raise OutputError("an embedding that is no base64 of 32-bit floats") from error
    return values
