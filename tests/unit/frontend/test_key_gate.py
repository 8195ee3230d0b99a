"""API keys before the application: who is let in, what a key sees, how a refusal looks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry

from dynamo_es.clock import ManualClock
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend.api_keys import KeyEntry, KeyRing, digest_of, new_key
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.key_gate import KeyGate
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
KIND = {"content-type": "application/json"}


class Gated:
    """An application behind a gate, with keys ``all``, ``m`` (model m only), ``slow`` (rate), ``admin``."""

    def __init__(self, executor: ThreadPoolExecutor, *, probes_open: bool = True, **directory: Any) -> None:
        self.engine = ScriptedEngine(says(frame("Hello", "stop")))
        self.keys: dict[str, str] = {}
        self.clock = ManualClock()
        entries = []
        rights: dict[str, dict[str, Any]] = {
            "all": {}, "m": {"models": ("m",)}, "admin": {"admin": True},
            "slow": {"requests_per_minute": 60, "burst": 2}, "one": {"max_concurrent": 1},
        }  # fmt: skip
        for name, more in rights.items():
            key_id, self.keys[name] = new_key()
            entry = KeyEntry(key_id, digest_of(self.keys[name]), name, "2026-05-01T12:00:00Z")
            entries.append(msgspec.structs.replace(entry, **more))
        self.ring = KeyRing(entries, self.clock)
        self.inner = application(
            served(self.engine, "m"),
            served(self.engine, "n", context_length=7),
            executor=executor,
            config=FrontendConfig(enable_anthropic_api=True),
            extensions=[FrontendRoute("GET", "/extra", lambda context: {})],
            **directory,
        )
        self.app: Any = KeyGate(
            self.inner, self.ring, HttpPathsConfig(), CollectorRegistry(), "p", probes_open=probes_open
        )

    async def ask(
        self, path: str, key: str | None = None, body: Any = None, *, method: str = "POST", **headers: str
    ) -> Reply:
        given = dict(KIND)
        if key is not None:
            given["authorization"] = f"Bearer {self.keys.get(key, key)}"
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await call(
            self.app, path, b"" if body is None else msgspec.json.encode(body), method=method, headers=given
        )


@pytest.fixture
def gated(executor: ThreadPoolExecutor) -> Gated:
    return Gated(executor)


def routes_of(app: FrontendApp) -> Iterator[tuple[str, str]]:
    """Path and method of every route that is registered, whoever added it."""
    for path in app._routes:
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            yield path, method
    for route in app.admin.routes:  # type: ignore[attr-defined]
        path = route.path.replace("{model_id:path}", "m")
        assert "{" not in path, "a new kind of route: say here how it is called"
        for method in route.methods:
            yield path, method
        if isinstance(route, APIRoute):
            yield path, "OPTIONS"


async def test_SEC_06_no_route_answers_without_a_key_but_the_probes(gated: Gated) -> None:
    walked = set(routes_of(gated.inner))
    assert {(CHAT, "POST"), ("/busy_threshold", "GET"), ("/openapi.json", "GET"), ("/extra", "GET")} <= walked
    key = gated.keys["all"]
    for path, method in sorted(walked):
        if path in ("/health", "/live", "/metrics"):
            assert (await gated.ask(path, method=method)).status != 401
            continue
        wrong = [{}, {"authorization": "Bearer wrong"}, {"x_api_key": key.upper()}, {"authorization": f"Bearer {key}x"}]
        for headers in (*wrong, {"authorization": key}, {"authorization": f"Basic {key}"}, {"x_api_key": ""}):
            reply = await gated.ask(path, method=method, **headers)
            assert reply.status == 401, (path, method, headers)
            assert reply.headers["www-authenticate"] == "Bearer"
        assert (await gated.ask(path, "admin", method=method)).status != 401
    assert gated.engine.requests == []


@pytest.mark.parametrize("path", ["/live/", "//live", "/LIVE", "/live/x", "/", "/nope", "/v1/chat/completions/", ""])
async def test_SEC_06_paths_that_are_almost_open_are_closed(gated: Gated, path: str) -> None:
    assert (await gated.ask(path, method="GET")).status == 401


async def test_probes_can_be_closed_too(executor: ThreadPoolExecutor) -> None:
    gated = Gated(executor, probes_open=False)
    for path in ("/health", "/live", "/metrics"):
        assert (await gated.ask(path, method="GET")).status == 401
        assert (await gated.ask(path, "all", method="GET")).status == 200


async def test_a_key_in_either_header_lets_in(gated: Gated) -> None:
    body = {"model": "m", **HI}
    key = gated.keys["all"]
    for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer {key}"}, {"x_api_key": key}):
        assert (await gated.ask(CHAT, body=body, **headers)).status == 200
    # A proxy's own login beside the client's key does not shut it out.
    assert (await gated.ask(CHAT, body=body, authorization="Basic eDp5", x_api_key=key)).status == 200
    assert len(gated.engine.requests) == 4
    assert key not in repr(gated.engine.requests)


async def test_a_refusal_has_the_form_of_the_route(gated: Gated) -> None:
    reply = await gated.ask(CHAT, "wrong", {"model": "m", **HI}, x_request_id="r1")
    assert reply.json()["code"] == 401
    assert reply.json()["type"] == "Unauthorized"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["x-request-id"] == "r1"
    reply = await gated.ask("/v1/messages", None, {"model": "m", "max_tokens": 1, **HI})
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "authentication_error"
    assert (await gated.ask("/v1/models", method="HEAD")).body == b""


async def test_a_key_for_some_models_neither_asks_nor_sees_others(executor: ThreadPoolExecutor) -> None:
    gated = Gated(executor, aliases={"mm": "m", "nn": "n"}, pending={"o": "starting"})
    for model, status in (("m", 200), ("mm", 200), ("n", 404), ("nn", 404), ("o", 404), ("nope", 404)):
        replies = [
            await gated.ask(CHAT, "m", {"model": model, **HI}),
            await gated.ask("/v1/completions", "m", {"model": model, "prompt": "x"}),
            await gated.ask("/v1/responses", "m", {"model": model, "input": "x"}),
            await gated.ask("/v1/messages", "m", {"model": model, "max_tokens": 1, **HI}),
            await gated.ask(f"/v1/models/{model}", "m", method="GET"),
            await gated.ask(f"/v1/models/{model}/ready", "m", method="GET"),
        ]
        assert [reply.status for reply in replies] == [status] * 6, model
    # What may not be asked looks as what is not there.
    bodies = [(await gated.ask(CHAT, "m", {"model": name, **HI})).body for name in ("n", "o", "nope")]
    assert len(set(bodies)) == 1
    listed = (await gated.ask("/v1/models", "m", method="GET")).json()["data"]
    assert sorted(item["id"] for item in listed) == ["m", "mm"]
    listed = (await gated.ask("/v1/models", "m", method="GET", anthropic_version="2023-06-01")).json()
    assert [item["id"] for item in listed["data"]] == ["m", "mm"]
    listed = (await gated.ask("/v1/models", "all", method="GET")).json()["data"]
    assert sorted(item["id"] for item in listed) == ["m", "mm", "n", "nn"]
    assert (await gated.ask(CHAT, "all", {"model": "o", **HI})).status == 503


async def test_a_line_feed_makes_no_second_path_of_a_route(gated: Gated) -> None:
    for path in ("/busy_threshold\n", "/v1/models/m\n", "/openapi.json\n"):
        assert (await gated.ask(path, "all", method="GET")).status == 404
    assert (await gated.ask("/live\n", method="GET")).status == 401


async def test_only_an_admin_key_sees_and_sets_busy_thresholds(gated: Gated) -> None:
    for method in ("GET", "POST"):
        assert (await gated.ask("/busy_threshold", "all", {"model": "m"}, method=method)).status == 403
        assert (await gated.ask("/busy_threshold", "admin", {"model": "m"}, method=method)).status == 200


async def test_a_key_over_its_rate_gets_429_and_is_told_when_to_come_back(gated: Gated) -> None:
    body = {"model": "m", **HI}
    assert [(await gated.ask(CHAT, "slow", body)).status for _ in range(3)] == [200, 200, 429]
    reply = await gated.ask(CHAT, "slow", body)
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert "60 requests a minute" in reply.json()["message"]
    reply = await gated.ask("/v1/messages", "slow", {"model": "m", "max_tokens": 1, **HI})
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert (await gated.ask(CHAT, "all", body)).status == 200
    assert len(gated.engine.requests) == 3
    gated.clock.advance(math.ceil(1.0))
    assert (await gated.ask(CHAT, "slow", body)).status == 200


async def test_a_key_with_its_requests_in_progress_gets_429_until_one_ends(gated: Gated) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        begun.set()
        await end.wait()
        yield [frame("Hello", "stop")]

    gated.engine.script = script
    body = {"model": "m", **HI, "stream": True}
    first = asyncio.create_task(gated.ask(CHAT, "one", body))
    async with asyncio.timeout(60):
        await begun.wait()
    gated.ring.replace([caller.entry for _, caller in gated.ring._callers.values()])  # the file is read again
    reply = await gated.ask(CHAT, "one", body)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert reply.json()["error"]["code"] == "concurrency_limit_exceeded"
    assert (await gated.ask("/v1/models", "all", method="GET")).status == 200
    end.set()
    assert (await first).status == 200
    assert (await gated.ask(CHAT, "one", body)).status == 200


async def test_SEC_08_a_request_without_a_key_is_answered_before_its_body_is_read(gated: Gated) -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 1024, "more_body": True}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    await gated.app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert read == 0
