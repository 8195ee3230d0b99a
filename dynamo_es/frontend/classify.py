"""``POST /v1/classify`` (spec/frontend.md 1.7): text-input workers get the request and answer with the body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.direct import DirectAnswer, DirectWork, given, read_item
from dynamo_es.frontend.embeddings import fits_input, inputs_of
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.preprocess import routing_of
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import I32, I64, U32, NvExt

TEXT_CHECKS: Mapping[str, serde.Check] = {
    "model": serde.TEXT,
    "user": serde.TEXT,
    "priority": serde.integer(-(2**31), 2**31 - 1, "i32"),
    "cache_salt": serde.TEXT,
    "use_activation": serde.BOOL,
    "add_special_tokens": serde.BOOL,
    "truncate_prompt_tokens": serde.integer(-(2**63), 2**63 - 1, "i64"),
    "nvext": serde.check_nvext,
}
"""Of members that classification and pooling have in common."""


class TextRequest(msgspec.Struct, kw_only=True):
    """What classification and pooling have in common; other members are dropped."""

    model: str
    input: str | list[str | U32 | list[U32]]
    user: str | None = None
    priority: I32 = 0
    cache_salt: str | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: I64 | None = None
    nvext: NvExt | None = None


class ClassifyRequest(TextRequest, kw_only=True):
    """Body of ``POST /v1/classify``."""


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Classification(msgspec.Struct):
    """The classes of one input."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    """The body of an answer."""

    id: str
    object: str
    created: int
    model: str
    data: list[Classification]
    usage: Usage


def check_text_request(source: TextRequest) -> None:
    """Refuse what a well-typed body may not hold. Raises ``ApiError``."""
    if source.cache_salt == "":
        raise ApiError(
            400,
            "Parameter 'cache_salt' must be a non-empty string if provided.",
            param="cache_salt",
            code="invalid_value",
        )


def text_work(source: TextRequest, model: ServedModel) -> DirectWork:
    """The worker request: the members that are set, under the model's own name."""
    extension = source.nvext or NvExt()
    salt = source.cache_salt if extension.cache_salt is None else extension.cache_salt
    routing = routing_of(extension, salt)
    return DirectWork({**given(source), "model": model.name, "routing": routing}, inputs=len(inputs_of(source.input)))


class ClassifyRoute:
    """A ``DirectRoute``."""

    endpoint = "classify"
    family: Family = "classify"

    def __init__(self) -> None:
        self.kind: RequestKind[ClassifyRequest] = RequestKind(
            ClassifyRequest,
            msgspec.json.Decoder(ClassifyRequest),
            frozenset(ClassifyRequest.__struct_fields__),
            ("input",),
            {**TEXT_CHECKS, "input": serde.untagged("ClassificationInput", fits_input)},
            ("model", "input"),
            "NvCreateClassifyRequest",
            plain=True,
        )

    def check(self, source: ClassifyRequest) -> None:
        check_text_request(source)

    def work(self, source: ClassifyRequest, model: ServedModel) -> DirectWork:
        return text_work(source, model)

    def answer(self, source: ClassifyRequest, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        parts = [read_item(item, ClassificationList) for item in items]
        answer = parts[0]
        for part in parts[1:]:
            answer.data += part.data
            add_usage(answer.usage, part.usage)
        return DirectAnswer(msgspec.json.encode(answer))

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


def add_usage(total: Usage, more: Usage) -> None:
    """Count the tokens of a further part of an answer."""
    total.prompt_tokens += more.prompt_tokens
    total.total_tokens += more.total_tokens
    total.completion_tokens += more.completion_tokens
