"""Rules that hold on every inference route (spec/frontend.md 0), and the table of routes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.routes import check_paths
from dynamo_es.frontend.servable import NoTokenizer, NotTokenized, why_unservable
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, card, frame, says, served

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/classify": {"input": "Hi"},
    "/v1/pooling": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["a"]},
    "/v1/images/generations": {"prompt": "Hi"},
    "/v1/images/edits": {"prompt": "Hi"},
    "/v1/videos": {"prompt": "Hi"},
    "/v1/audio/speech": {"input": "Hi"},
}
ROUTES = tuple(BODIES)
COUNTING = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
EVERYTHING = "Chat | Completions | Embedding | Classify | Pooling | Rerank | Images | Videos | Audios"


def everything(executor: Executor, **config: Any) -> FrontendApp:
    """An application in which one model is registered for every family."""
    options = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True, **config)
    engine = ScriptedEngine(says(frame("x", "stop")))
    return application(served(engine, model_type=EVERYTHING), executor=executor, config=options)


async def post(app: FrontendApp, path: str, body: bytes | None = None, **headers: str) -> Reply:
    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    sent = json.dumps({"model": "m", **BODIES[path]}).encode() if body is None else body
    return await call(app, path, sent, headers=given)


def check_error(path: str, reply: Reply, status: int, code: str | None) -> None:
    """Both shapes, on Anthropic's routes its own."""
    body = reply.json()
    assert (reply.status, body["code"]) == (status, status)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["message"] == body["error"]["message"]
    assert reply.headers["content-type"] == "application/json"
    assert (body["type"] == "error") == path.startswith("/v1/messages")


@pytest.mark.parametrize("path", ROUTES)
async def test_PROTO_16_refusals_have_their_shapes_on_every_route(path: str, executor: Executor) -> None:
    app = everything(executor, body_limit_mb=1)
    broken = "invalid_json" if path.startswith(("/v1/messages", "/v1/rerank")) else "invalid_body"
    check_error(path, await post(app, path, content_type="text/plain"), 415, "unsupported_media_type")
    check_error(path, await post(app, path, b" " * (2**20 + 1)), 413, "request_too_large")
    check_error(path, await post(app, path, b'{"model":'), 400, broken)
    check_error(path, await post(app, path, b"[" * 200 + b"]" * 200), 400, broken)
    check_error(path, await post(app, path, b"[]"), 400, "invalid_body")
    wrong = await call(app, path, method="DELETE")
    check_error(path, wrong, 405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    unknown = await call(app, path + "/", b"{}")
    assert unknown.json()["message"] == f"Route not found: POST {path}/"


@pytest.mark.parametrize("path", [path for path in ROUTES if path not in COUNTING])
async def test_model_and_drain_are_checked_on_every_route(path: str, executor: Executor) -> None:
    app = everything(executor)
    body = json.dumps({"model": "zz", **BODIES[path]}).encode()
    check_error(path, await post(app, path, body), 404, "model_not_found")
    too_many = {f"x_dynamo_meta_{number}": "v" for number in range(65)}
    check_error(path, await post(app, path, **too_many), 431, None)
    app.service.drain()
    check_error(path, await post(app, path), 503, "draining")


@pytest.mark.parametrize("path", ROUTES)
async def test_request_id_is_echoed_and_requests_are_bounded_on_every_route(path: str, executor: Executor) -> None:
    app = everything(executor)
    assert (await post(app, path, b"{}", x_request_id="r1")).headers["x-request-id"] == "r1"
    assert not app.service.running
    bounded = everything(executor, max_concurrent_requests=1)
    bounded.service.running.add(object())  # type: ignore[arg-type]
    check_error(path, await post(bounded, path), 503, "overloaded")


@pytest.mark.parametrize("path", ROUTES)
async def test_body_that_is_read_in_a_thread_is_answered_alike(path: str, executor: Executor) -> None:
    app = everything(executor)
    small = await post(app, path, json.dumps({"model": "zz", **BODIES[path]}).encode())
    large = await post(app, path, json.dumps({"model": "zz", **BODIES[path]}).encode() + b" " * 20_000)
    assert (small.status, small.text) == (large.status, large.text)


async def test_route_of_an_unregistered_family_is_not_there_whatever_the_method(executor: Executor) -> None:
    app = application(served(ScriptedEngine(says())), executor=executor)
    for path in ("/v1/classify", "/v1/pooling", "/v1/rerank"):
        for method in ("POST", "GET", "OPTIONS"):
            reply = await call(app, path, b"{", method=method)
            assert reply.status == 404
            assert "is registered yet" in reply.json()["message"]


async def test_not_implemented_routes_say_so_whatever_the_method(executor: Executor) -> None:
    app = everything(executor)
    for path, method in (("/v1/realtime", "GET"), ("/v1/realtime", "POST"), ("/v1/videos/stream", "POST")):
        reply = await call(app, path, method=method)
        assert (reply.status, reply.json()["error"]["code"]) == (501, "not_implemented")


async def test_description_has_every_route_with_its_body(executor: Executor) -> None:
    document = (await call(everything(executor), "/openapi.json", method="GET")).json()
    for path in ROUTES:
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]["schema"]
        name = content["$ref"].rpartition("/")[2]
        assert set(BODIES[path]) <= set(document["components"]["schemas"][name]["properties"]), path
        assert {"200", "400", "404", "503", "529"} <= set(operation["responses"])
        streams = "text/event-stream" in operation["responses"]["200"]["content"]
        assert streams == (path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"))
    assert "requestBody" not in document["paths"]["/v1/realtime"]["get"]


def test_paths_must_differ() -> None:
    check_paths(HttpPathsConfig())
    for paths in (
        HttpPathsConfig(chat="/health"),
        HttpPathsConfig(rerank="/v1/responses/input_tokens"),
        HttpPathsConfig(pooling="/busy_threshold"),
        HttpPathsConfig(live="/v1/models/live"),
    ):
        with pytest.raises(ConfigError, match="two routes have the path"):
            check_paths(paths)


def test_what_cannot_be_served_is_told_and_why() -> None:
    assert why_unservable(card()) is None
    assert why_unservable(card(model_type="")) is None
    assert why_unservable(card(model_type="Embedding")) is None
    assert why_unservable(card(model_type="Embedding", model_input="Text")) is None
    assert why_unservable(card(model_type="Rerank", model_input="Text")) is None
    assert "model_input must be Text" in str(why_unservable(card(model_type="Rerank")))
    assert why_unservable(card(model_input="Text")) is None
    assert "Tensor is not served" in str(why_unservable(card(model_type="TensorBased", model_input="Tensor")))
    with pytest.raises(NotTokenized):
        NoTokenizer().encode("x", False)
