"""Cases of security that hold for every request, whatever the route."""

from __future__ import annotations

import ast
import builtins
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.routing import Route

import dynamo_es
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.asgi import FrontendApp
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
REDIRECTS = "http://allowed.example/302-to-the-inside"
INSIDE = [
    "http://127.0.0.1:{port}/", "http://169.254.169.254/latest/meta-data", "http://[::1]:{port}/",
    "http://[::ffff:10.0.0.1]/", "http://0x7f000001:{port}/", "http://localhost:{port}/", "file:///etc/hostname",
    "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/", REDIRECTS,
]  # fmt: skip


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(frame("Hello", "stop")))


@pytest.fixture
def app(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> FrontendApp:
    config = FrontendConfig(enable_anthropic_api=True)
    return application(served(engine), served(engine, "e", model_type="Embedding"), executor=executor, config=config)


async def ask(app: FrontendApp, path: str, body: Any, **headers: str) -> Reply:
    return await call(app, path, msgspec.json.encode(body), headers={"content-type": "application/json", **headers})


def chat_with(part: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}


MEDIA: list[Callable[[str], tuple[str, dict[str, Any]]]] = [
    lambda url: (CHAT, chat_with({"type": "image_url", "image_url": {"url": url}})),
    lambda url: (CHAT, chat_with({"type": "image_url", "image_url": url})),
    lambda url: (CHAT, chat_with({"type": "video_url", "video_url": {"url": url}})),
    lambda url: (CHAT, chat_with({"type": "audio_url", "audio_url": {"url": url}})),
    lambda url: (
        "/v1/responses",
        {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    ),
    lambda url: (
        "/v1/messages",
        {
            "model": "m", "max_tokens": 1,
            "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
        },
    ),
]  # fmt: skip


async def test_SEC_01_SEC_02_no_url_of_a_request_is_ever_fetched(
    app: FrontendApp, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No media are fetched here at all, so neither a first address nor a redirect can lead inside."""
    opened: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: opened.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: opened.append(arguments) or [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        for url in INSIDE:
            for make in MEDIA:
                path, body = make(url.replace("{port}", str(port)))
                assert (await ask(app, path, body)).status == 400, (url, path)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert opened == []
    assert engine.requests == []


async def test_SEC_03_no_rendering_route_takes_a_template(app: FrontendApp, engine: ScriptedEngine) -> None:
    evil = {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}
    bodies = {
        CHAT: HI,
        "/v1/completions": {"model": "m", "prompt": "x"},
        "/v1/responses": {"model": "m", "input": "x"},
        "/v1/messages": {**HI, "max_tokens": 1},
    }
    for path, body in bodies.items():
        for more in (evil, {"chat_template_kwargs": evil}, {"chat_template_args": evil}):
            reply = await ask(app, path, {**body, **more})
            if path in (CHAT, "/v1/completions"):
                assert reply.status == 400, (path, more)
        assert not any("range(10**9)" in repr(request) for request in engine.requests)


NAMES = [
    "../../etc", "/etc/passwd", "a/../../b", "..%2f", "a\0b", "..\\..\\windows", "C:\\x", "x" * 5000, "~root",
    ".", "..", "file:///etc/passwd", "m/../m", "m\n", " m", "m:../../etc",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_SEC_04_a_name_from_a_request_is_looked_up_and_never_a_path(
    name: str, app: FrontendApp, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Any] = []
    for module, attribute in ((builtins, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
        inner = getattr(module, attribute)

        def noted(path: Any, *more: Any, inner: Any = inner, **named: Any) -> Any:
            touched.append(path)
            return inner(path, *more, **named)

        monkeypatch.setattr(module, attribute, noted)
    replies = [
        await ask(app, CHAT, {**HI, "model": name}),
        await ask(app, "/v1/completions", {"model": name, "prompt": "x"}),
        await ask(app, "/v1/embeddings", {"model": name, "input": "x"}),
        await call(app, f"/v1/models/{name}", method="GET"),
        await call(app, f"/v1/models/{name}/ready", method="GET"),
    ]
    monkeypatch.undo()
    assert [reply.status for reply in replies] == [404] * 5
    paths = [os.fspath(path) for path in touched if isinstance(path, str | os.PathLike)]
    assert [path for path in paths if path == name or path.endswith(f"/{name}")] == []
    assert engine.requests == []


def test_SEC_05_nothing_that_runs_what_it_reads_is_imported_or_called() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {"eval", "exec", "compile", "__import__"}
    yaml_calls = {"load", "load_all", "unsafe_load", "full_load", "unsafe_load_all", "full_load_all"}
    root = Path(dynamo_es.__file__).parents[1]
    files = [path for name in ("dynamo_es", "streams", "schemas") for path in (root / name).rglob("*.py")]
    assert len(files) > 200
    found = []
    hint = re.compile(r"pickle|dill|marshal|shelve|joblib|yaml|(?<![.\w])(?:eval|exec|compile|__import__)\(")
    for path in files:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if hint.search(text) else ():
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").partition(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
                found.append((path.name, node.lineno, node.func.id))
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "yaml"
                and node.attr in yaml_calls
            ):
                found.append((path.name, node.lineno, f"yaml.{node.attr}"))
            found += [(path.name, node.lineno, name) for name in names if name in forbidden]  # type: ignore[attr-defined]
    assert found == []


async def test_SEC_09_values_that_stop_an_engine_are_refused_on_completions_too(
    app: FrontendApp, engine: ScriptedEngine
) -> None:
    changes: list[dict[str, Any]] = [
        {"echo": True, "max_tokens": 0}, {"logit_bias": {"191222": -100}}, {"logit_bias": {"AI": 1}},
        {"logit_bias": {"5": 1e9}}, {"max_tokens": -1}, {"max_tokens": 10**12}, {"n": 10**6},
        {"stop": ["x"] * 10_000}, {"best_of": 10**6}, {"prompt": [10**9]}, {"prompt": [-1]}, {"prompt": ["x"] * 10_000},
    ]  # fmt: skip
    for change in changes:
        reply = await ask(app, "/v1/completions", {"model": "m", "prompt": "x", **change})
        assert reply.status == 400, change
        assert reply.json()["error"]["param"] in change, change
    assert engine.requests == []


async def test_SEC_11_ranges_are_not_looked_at_and_no_route_serves_files(app: FrontendApp) -> None:
    ranges = "bytes=" + ",".join(f"{place}-" for place in range(10_000))
    for route in app.admin.routes:  # type: ignore[attr-defined]
        assert type(route).__name__ in ("Route", "APIRoute"), "a mounted application: does it serve files?"
        assert isinstance(route, Route)
        path = route.path.replace("{model_id:path}", "m")
        plain = await call(app, path, method="GET", headers={})
        ranged = await call(app, path, method="GET", headers={"range": ranges})
        assert ranged.status == plain.status
        assert "content-range" not in ranged.headers
        if path not in ("/metrics", "/health"):
            assert ranged.body == plain.body
