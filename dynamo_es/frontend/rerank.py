"""``POST /v1/rerank`` (spec/frontend.md 1.7), in SGLang's form: the answer is a list, best document first.

Text-input workers get the request, and answer with that list or with its entries one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.direct import DirectAnswer, DirectWork, given, read_item
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.preprocess import routing_of
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import U32, NvExt


class RerankRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/rerank``; other members are dropped."""

    model: str
    query: str
    documents: list[str]
    top_n: U32 | None = None
    return_documents: bool | None = None
    nvext: NvExt | None = None


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document with its score."""

    score: float
    index: int
    document: str | None = None
    meta_info: dict[str, Any] | None = None


class RerankRoute:
    """A ``DirectRoute``."""

    endpoint = "rerank"
    family: Family = "rerank"

    def __init__(self) -> None:
        self.kind: RequestKind[RerankRequest] = RequestKind(
            RerankRequest,
            msgspec.json.Decoder(RerankRequest),
            frozenset(RerankRequest.__struct_fields__),
            (),
            {
                "model": serde.TEXT,
                "query": serde.TEXT,
                "documents": serde.LIST,
                "top_n": serde.UNSIGNED_32,
                "return_documents": serde.BOOL,
                "nvext": serde.check_nvext,
            },
            ("model", "query", "documents"),
            "NvCreateRerankRequest",
            plain=True,
            by_path=True,
        )

    def check(self, source: RerankRequest) -> None:
        if not source.query.strip():
            raise _refuse("Query cannot be empty or whitespace only", "query")
        if not source.documents:
            raise _refuse("Documents cannot be empty", "documents")
        if not all(document.strip() for document in source.documents):
            raise _refuse("Each document cannot be empty or whitespace only", "documents")
        if source.top_n == 0:
            raise _refuse("Parameter 'top_n' must be larger than 0", "top_n")

    def work(self, source: RerankRequest, model: ServedModel) -> DirectWork:
        request = {**given(source), "model": model.name, "routing": routing_of(source.nvext or NvExt(), None)}
        return DirectWork(request, inputs=len(source.documents))

    def answer(self, source: RerankRequest, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        entries: list[Ranked] = []
        for item in items:
            entries += read_item(item, list[Ranked]) if isinstance(item, list) else [read_item(item, Ranked)]
        if any(not 0 <= entry.index < len(source.documents) for entry in entries):
            raise OutputError("a document that was not asked about")
        entries.sort(key=lambda entry: -entry.score)
        if source.top_n is not None:
            del entries[source.top_n :]
        for entry in entries:
            entry.document = None if source.return_documents is False else source.documents[entry.index]
        return DirectAnswer(msgspec.json.encode(entries))

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


def _refuse(message: str, field: str) -> ApiError:
    return ApiError(400, message, param=field, code="invalid_value")
