"""Embeddings, classification, pooling, reranking, media: what workers get and what clients get of their answers."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_es.errors import Disconnected, InvalidArgument
from dynamo_es.frontend.direct import MAX_ITEMS
from dynamo_es.frontend.embeddings import EmbeddingRequest, EmbeddingRoute
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, served

USAGE = {"prompt_tokens": 2, "total_tokens": 2}
POOLED = {"id": "p", "object": "list", "created": 1, "model": "m", "usage": USAGE}
Ask = Callable[..., Any]


def answers(*items: Any) -> ScriptedEngine:
    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield [item]

    return ScriptedEngine(script)


async def ask(executor: Executor, path: str, engine: ScriptedEngine, kind: str, body: dict[str, Any]) -> Reply:
    model_input = "Tokens" if kind == "Embedding" else "Text"
    tokenizer = NoTokenizer() if model_input == "Text" else None
    model = served(engine, tokenizer=tokenizer, model_type=kind, model_input=model_input, context_length=16)
    return await call(application(model, executor=executor), path, json.dumps({"model": "m", **body}).encode())


async def embed(executor: Executor, engine: ScriptedEngine, **body: Any) -> Reply:
    return await ask(executor, "/v1/embeddings", engine, "Embedding", body)


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "token_ids"),
    [
        ("Hi", [[72, 105]]),
        (["H", "i"], [[72], [105]]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [[]]),
        ([], []),
    ],
)
async def test_embedding_worker_gets_lists_of_ids(value: Any, token_ids: list[list[int]], executor: Executor) -> None:
    engine = answers({"embeddings": [[0.5]] * max(len(token_ids), 1), "prompt_tokens": 2})
    reply = await embed(executor, engine, input=value, dimensions=3, nvext={"annotations": ["a"], "dp_rank": 1})
    assert reply.status == 200
    assert engine.requests == [
        {
            "model": "m",
            "token_ids": token_ids,
            "dimensions": 3,
            "encoding_format": None,
            "annotations": ["a"],
            "routing": {"dp_rank": 1},
        }
    ]
    assert reply.json()["usage"] == USAGE


async def test_embeddings_are_decoded_or_encoded_as_the_client_asks(executor: Executor) -> None:
    packed = base64.b64encode(struct.pack("<2f", 0.5, -1.0)).decode()
    for sent in ([0.5, -1.0], packed):
        body = {"object": "list", "model": "other", "data": [{"index": 0, "object": "embedding", "embedding": sent}]}
        engine = answers({**body, "usage": USAGE})
        as_floats = (await embed(executor, engine, input="x")).json()
        assert as_floats["data"][0]["embedding"] == [0.5, -1.0]
        assert as_floats["model"] == "other"
        as_base64 = (await embed(executor, engine, input="x", encoding_format="base64")).json()
        assert as_base64["data"][0]["embedding"] == packed


async def test_embeddings_in_several_items_are_one_answer(executor: Executor) -> None:
    part = {"embeddings": [[1.0]], "prompt_tokens": 1, "total_tokens": 1}
    answer = (await embed(executor, answers(part, part), input=["a", "b"])).json()
    assert [entry["embedding"] for entry in answer["data"]] == [[1.0], [1.0]]
    assert answer["usage"] == USAGE


@pytest.mark.parametrize(
    "items",
    [
        [{"embeddings": "x"}],
        [{"embeddings": []}],
        [{"data": []}],
        ["text"],
        [None],
        [],
        [{"embeddings": [["a"]]}],
        [{"object": "list", "model": "m", "data": [{"index": 0, "object": "e", "embedding": "?"}], "usage": USAGE}],
        [{"object": "list", "model": "m", "data": [{"index": 0, "object": "e", "embedding": "AAA="}], "usage": USAGE}],
        [{"error": {"message": "secret"}}],
        [{}] * (MAX_ITEMS + 1),
    ],
)
async def test_answer_that_cannot_be_understood_is_an_internal_error(items: list[Any], executor: Executor) -> None:
    reply = await embed(executor, answers(*items), input="x")
    assert (reply.status, reply.json()["message"]) == (500, "Internal server error")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidArgument("too long"), 400, "too long"),
        (Disconnected("gone"), 503, "Service temporarily unavailable"),
        (RuntimeError("secret"), 500, "Internal server error"),
    ],
)
async def test_failures_of_workers_are_told_as_everywhere(
    error: Exception, status: int, message: str, executor: Executor
) -> None:
    engine = answers(error)
    reply = await embed(executor, engine, input="x")
    assert (reply.status, reply.json()["message"]) == (status, message)
    assert engine.ended == ["failed"]


async def test_input_that_does_not_fit_the_model_is_refused_before(executor: Executor) -> None:
    engine = answers()
    for value in ("x" * 17, ["a", "x" * 17], list(range(17))):
        reply = await embed(executor, engine, input=value)
        assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert reply.json()["error"]["param"] == "input"
    foreign = await embed(executor, engine, input=[1, 999])
    assert "outside of the model's vocabulary" in foreign.json()["message"]
    assert engine.requests == []


@pytest.mark.parametrize("value", [5, None, {"a": 1}, [1, "a"], [[1], 2], [["a"]], [1.5], [-1], [True]])
async def test_input_of_another_shape_is_refused(value: Any, executor: Executor) -> None:
    reply = await embed(executor, answers(), input=value)
    assert reply.status == 400
    assert "untagged enum EmbeddingInput" in reply.json()["message"] or "Expected" in reply.json()["message"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8), min_size=1, max_size=4))
def test_base64_is_the_same_vector(vectors: list[list[float]]) -> None:
    route = EmbeddingRoute()
    model = served(answers())
    item = {"embeddings": vectors}
    source = EmbeddingRequest(model="m", input="x", encoding_format="base64")
    coded = json.loads(route.answer(source, [item], model).body)["data"]
    for entry, vector in zip(coded, vectors, strict=True):
        data = base64.b64decode(entry["embedding"])
        assert list(struct.unpack(f"<{len(vector)}f", data)) == vector


# -- classification and pooling ----------------------------------------------------------------------------------------


async def test_classifications_in_several_items_are_one_answer(executor: Executor) -> None:
    part = {**POOLED, "data": [{"index": 0, "label": None, "probs": [0.5], "num_classes": 1}]}
    answer = (await ask(executor, "/v1/classify", answers(part, part), "Classify", {"input": ["a", "b"]})).json()
    assert len(answer["data"]) == 2
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4, "completion_tokens": 0}


async def test_pooled_bytes_stand_behind_each_other_and_the_header_says_where(executor: Executor) -> None:
    data = [
        {"index": 0, "object": "pooling", "data": base64.b64encode(b"abcd").decode(), "shape": [1]},
        {"index": 1, "object": "pooling", "data": base64.b64encode(b"efghijkl").decode(), "shape": [2]},
    ]
    engine = answers({**POOLED, "data": data})
    body = {"input": ["a", "b"], "encoding_format": "bytes", "embed_dtype": "float16"}
    reply = await ask(executor, "/v1/pooling", engine, "Pooling", body)
    assert (reply.body, reply.headers["content-type"]) == (b"abcdefghijkl", "application/octet-stream")
    places = json.loads(reply.headers["metadata"])["data"]
    assert [(place["start"], place["end"], place["shape"]) for place in places] == [(0, 4, [1]), (4, 12, [2])]
    assert {place["embed_dtype"] for place in places} == {"float16"}
    assert engine.requests[0]["encoding_format"] == "bytes"
    only = await ask(executor, "/v1/pooling", engine, "Pooling", {**body, "encoding_format": "bytes_only"})
    assert only.body == b"abcdefghijkl"
    assert "metadata" not in only.headers


async def test_pooling_tells_workers_its_encoding_always(executor: Executor) -> None:
    engine = answers({**POOLED, "data": [{"index": 0, "object": "pooling", "data": [[0.1], [0.2]]}]})
    reply = await ask(executor, "/v1/pooling", engine, "Pooling", {"input": "a"})
    assert reply.json()["data"][0]["data"] == [[0.1], [0.2]]
    assert engine.requests[0] == {
        "model": "m",
        "input": "a",
        "priority": 0,
        "encoding_format": "float",
        "routing": {},
    }


async def test_pooled_output_in_the_wrong_form_is_an_internal_error(executor: Executor) -> None:
    for data in ([0.1], "no base64!"):
        engine = answers({**POOLED, "data": [{"index": 0, "object": "pooling", "data": data}]})
        reply = await ask(executor, "/v1/pooling", engine, "Pooling", {"input": "a", "encoding_format": "bytes"})
        assert reply.status == 500


async def test_too_many_outputs_for_a_header_are_refused(executor: Executor) -> None:
    data = [{"index": place, "object": "pooling", "data": "AAAA", "shape": [1]} for place in range(600)]
    engine = answers({**POOLED, "data": data})
    reply = await ask(executor, "/v1/pooling", engine, "Pooling", {"input": "a", "encoding_format": "bytes"})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "encoding_format")
    assert "bytes_only" in reply.json()["message"]


# -- reranking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [True, False])
async def test_documents_come_best_first_and_as_many_as_asked(as_list: bool, executor: Executor) -> None:
    entries = [{"score": 0.1, "index": 0}, {"score": 0.9, "index": 1}, {"score": 0.5, "index": 2}]
    engine = answers(entries) if as_list else answers(*entries)
    body = {"query": "q", "documents": ["a", "b", "c"]}
    whole = await ask(executor, "/v1/rerank", engine, "Rerank", body)
    assert whole.json() == [
        {"score": 0.9, "index": 1, "document": "b"},
        {"score": 0.5, "index": 2, "document": "c"},
        {"score": 0.1, "index": 0, "document": "a"},
    ]
    best = await ask(executor, "/v1/rerank", engine, "Rerank", {**body, "top_n": 1, "return_documents": False})
    assert best.json() == [{"score": 0.9, "index": 1}]
    assert engine.requests[0] == {"model": "m", **body, "routing": {}}


@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"query": " "}, "Query cannot be empty or whitespace only", "query"),
        ({"documents": []}, "Documents cannot be empty", "documents"),
        ({"documents": ["a", ""]}, "Each document cannot be empty or whitespace only", "documents"),
        ({"top_n": 0}, "Parameter 'top_n' must be larger than 0", "top_n"),
    ],
)
async def test_rerank_refuses(change: dict[str, Any], message: str, param: str, executor: Executor) -> None:
    body = {"query": "q", "documents": ["a"], **change}
    reply = await ask(executor, "/v1/rerank", answers(), "Rerank", body)
    assert (reply.status, reply.json()["message"], reply.json()["error"]["param"]) == (400, message, param)


async def test_ranking_of_a_document_that_nobody_asked_about_is_an_internal_error(executor: Executor) -> None:
    for index in (1, -1):
        engine = answers([{"score": 1.0, "index": index}])
        reply = await ask(executor, "/v1/rerank", engine, "Rerank", {"query": "q", "documents": ["a"]})
        assert reply.status == 500


# -- media -------------------------------------------------------------------------------------------------------------


async def test_media_worker_gets_everything_that_was_sent(executor: Executor) -> None:
    engine = answers({"id": "v", "status": "completed"})
    body = {"prompt": "cat", "seconds": 4, "extra": {"a": [1]}}
    reply = await ask(executor, "/v1/videos", engine, "Videos", body)
    assert reply.json() == {"id": "v", "status": "completed"}
    assert engine.requests == [{"model": "m", **body}]
    missing = await ask(executor, "/v1/videos", engine, "Videos", {})
    assert "missing field `prompt`" in missing.json()["message"]
    several = await ask(executor, "/v1/audio/speech", answers({}, {}), "Audios", {"input": "a"})
    assert several.status == 500


# -- life --------------------------------------------------------------------------------------------------------------


async def test_metrics_count_requests_and_gauges_return_to_zero(executor: Executor) -> None:
    model = served(answers({"embeddings": [[1.0]]}, Disconnected("x")), model_type="Embedding")
    app = application(model, executor=executor)
    for body in ({"model": "m", "input": "abc"}, {"model": "zz", "input": "abc"}):
        await call(app, "/v1/embeddings", json.dumps(body).encode())
    text = (await call(app, "/metrics", method="GET")).text
    assert 'requests_started_total{endpoint="embeddings",model="m",request_type="unary"} 1.0' in text
    assert (
        'requests_total{endpoint="embeddings",error_type="unavailable",model="m",request_type="unary",status="error"} 1'
    ) in text
    assert 'error_type="not_found",model="unknown_model"' in text
    assert 'dynamo_frontend_inflight_requests{model="m"} 0.0' in text
    assert 'dynamo_frontend_active_requests{model="m"} 0.0' in text
    assert 'dynamo_frontend_input_sequence_tokens_sum{model="m"} 3.0' in text


async def test_PROTO_18_client_that_leaves_ends_the_request_at_its_worker(executor: Executor) -> None:
    reached = asyncio.Event()

    async def silent(request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        reached.set()
        await asyncio.Event().wait()
        yield []

    engine = ScriptedEngine(silent)
    app = application(served(engine, model_type="Embedding"), executor=executor)
    body = b'{"model":"m","input":"x"}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await reached.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there to read")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "headers": [(b"content-type", b"application/json")],
    }
    await asyncio.wait_for(app(scope, receive, send), 5)
    assert engine.ended == ["cancelled"]
    assert engine.contexts[0].is_stopped()
    text = (await call(app, "/metrics", method="GET")).text
    assert 'model_cancellation_total{endpoint="embeddings",model="m",request_type="unary"} 1.0' in text
    assert 'dynamo_frontend_inflight_requests{model="m"} 0.0' in text
