"""``HttpService``: OpenAI's API over Python engines of this process, as recorded from Dynamo's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dynamo_es.llm as llm
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.errors import DynamoException
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.llm import HttpAsyncEngine, HttpError, HttpService, PythonAsyncEngine, exceptions
from tests.support.runtimes import make_runtime

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data/golden/services/http_async_engine_errors.json").read_text()
)["cases"]  # fmt: skip
LIMIT_S = 60.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chunk(content: str, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content, "role": "assistant"}, "finish_reason": finish}
    return {"id": "1", "choices": [choice], "created": 1, "model": "h", "object": "chat.completion.chunk"}


def raised(name: str) -> BaseException:
    """The error of a recorded case."""
    if name.startswith("http"):
        return HttpError(int(name[4:]), "msg")
    if name in ("rq", "ss"):
        owner = {"rq": exceptions.RouterQueueLimitExceeded, "ss": exceptions.SelectionServiceError}[name]
        return owner.__new__(owner, "emsg")
    kind = getattr(exceptions, name, None) or getattr(asyncio, name, None) or getattr(__import__("builtins"), name)
    error: BaseException = kind("emsg")
    return error


class Engine:
    """Says "ok", or what it is told to; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.closed = 0

    async def chat(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        said = request["messages"][-1]["content"]
        try:
            if said == "forever":
                while True:
                    yield chunk("more ")
                    await asyncio.sleep(0.001)
            if said == "envelope":
                yield {"_dynamo_annotated": True, "event": "note", "comment": ["of no chunk"]}
                yield {"_dynamo_annotated": True, "data": chunk("ok", "stop")}
                return
            if said == "late":
                yield chunk("o")
                raise ValueError("late")
            if said != "ok":
                raise raised(said)
            yield chunk("o")
            yield chunk("k", "stop")
        finally:
            self.closed += 1

    async def complete(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        if request["prompt"] != "ok":
            raise HttpError(404, "msg")
        for text, finish in (("he", None), ("y", "stop")):
            choice = {"index": 0, "text": text, "finish_reason": finish}
            yield {"id": "c", "choices": [choice], "created": 1, "model": "h", "object": "text_completion"}


class Served:
    """A service with a client."""

    def __init__(self, service: HttpService, engine: Engine, client: httpx.AsyncClient) -> None:
        self.service = service
        self.engine = engine
        self.client = client

    async def chat(self, said: str, model: str = "h", **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": said}], **more}
        return await self.client.post(CHAT, json=body)


@contextlib.asynccontextmanager
async def serving(
    enabled: bool = True, telemetry: TelemetryConfig | None = None, env: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Served]:
    runtime = make_runtime(telemetry=telemetry)
    engine, loop = Engine(), asyncio.get_running_loop()
    service = HttpService(0, env={"DYN_HTTP_HOST": "127.0.0.1", **(env or {})}, **options)
    service.add_chat_completions_model("h", "sum", HttpAsyncEngine(engine.chat, loop))
    service.add_completions_model("h", "sum", HttpAsyncEngine(engine.complete, loop))
    if enabled:
        service.enable_endpoint("chat", True)
        service.enable_endpoint("completion", True)
    ready: asyncio.Future[FrontendServer] = loop.create_future()
    task = asyncio.create_task(service.run(runtime, on_ready=ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            url = f"http://127.0.0.1:{ready.result().port}"
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                yield Served(service, engine, client)
    finally:
        service.shutdown()
        async with asyncio.timeout(LIMIT_S):
            assert await task == ()
        assert not runtime.core.started  # it has no part in a fleet
        await runtime.close()


def flat(response: httpx.Response) -> dict[str, Any]:
    """A body without the members in OpenAI's form, which Dynamo does not send."""
    return {name: value for name, value in response.json().items() if name != "error"}


async def test_answers_and_errors_are_those_recorded() -> None:
    async with serving() as served:
        for case in GOLDEN:
            said, _, form = case["case"].removeprefix("h:").partition(":")
            response = await served.chat(said, **({"stream": True} if form else {}))
            assert response.status_code == case["status"], case["case"]
            if form:
                assert response.text == case["body"]
            else:
                assert flat(response) == json.loads(case["body"]), case["case"]


async def test_an_engine_gets_what_the_client_sent_and_its_chunks_reach_it_as_they_are() -> None:
    async with serving() as served:
        await served.chat("ok", temperature=0.5)
        response = await served.chat("envelope", stream=True)
        assert served.engine.requests[0] == {
            "model": "h", "messages": [{"role": "user", "content": "ok"}], "temperature": 0.5,
        }  # fmt: skip
        assert served.engine.requests[1]["stream"] is True
        first, done, _ = response.text.split("\n\n")
        assert json.loads(first.removeprefix("data: ")) == chunk("ok", "stop")
        assert done == "data: [DONE]"
        unary = await served.client.post(COMPLETIONS, json={"model": "h", "prompt": "ok"})
        assert [choice["text"] for choice in unary.json()["choices"]] == ["hey"]
        refused = await served.client.post(COMPLETIONS, json={"model": "h", "prompt": "no"})
        assert (refused.status_code, refused.json()["message"]) == (404, "msg")
        unprocessable = await served.chat("http422")
        assert json.loads(unprocessable.json()["message"]) == {
            "message": "msg", "type": "Unprocessable Entity", "code": 422,
        }  # fmt: skip
        assert flat(await served.chat("http0"))["details"] == {"backend_status": 500}


async def test_a_client_that_leaves_ends_its_engine() -> None:
    async with serving() as served:
        body = {"model": "h", "messages": [{"role": "user", "content": "forever"}], "stream": True}
        async with served.client.stream("POST", CHAT, json=body) as response:
            async for _ in response.aiter_bytes():
                break
        async with asyncio.timeout(LIMIT_S):
            while not served.engine.closed:
                await asyncio.sleep(0.01)


async def test_requests_are_in_the_access_log_too(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    async with serving(env={"DYN_ES_ACCESS_LOG": str(path)}) as served:
        assert (await served.chat("ok")).status_code == 200
        assert (await served.chat("http404", stream=False)).status_code == 404
        assert (await served.client.get("/health")).status_code == 200
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert (first["route"], first["status"], first["model"]) == (CHAT, 200, "h")
    assert (first["finish_reason"], first["worker_id"]) == ("stop", None)
    assert (second["status"], second["error_type"]) == (404, "not_found")
    assert third["route"] == "/health"


async def test_an_early_error_has_a_status_if_streams_wait_for_their_first_item() -> None:
    async with serving(wait_for_first_item=True) as served:
        response = await served.chat("http404", stream=True)
        assert (response.status_code, response.json()["message"]) == (404, "msg")
        assert (await served.chat("ok", stream=True)).status_code == 200


async def test_models_come_and_go_and_routes_are_there_once_enabled() -> None:
    async with serving(enabled=False) as served:
        service, client = served.service, served.client
        assert (await served.chat("ok")).status_code == 404
        assert (await client.post("/v1/messages", json={})).status_code == 404
        assert (await client.post("/v1/embeddings", json={})).status_code == 400
        service.enable_endpoint("chat", True)
        service.enable_endpoint("anthropic_messages", True)
        assert (await served.chat("ok")).status_code == 200
        message = {"model": "h", "max_tokens": 5, "messages": [{"role": "user", "content": "ok"}]}
        told = (await client.post("/v1/messages", json=message)).json()
        assert told["content"] == [{"type": "text", "text": "ok"}]
        models = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["h"]
        ready = (await client.get("/v1/models/h/ready")).json()
        assert list(ready["namespaces"]) == ["__local_chat_h", "__local_completions_h"]
        assert (await client.get("/health")).json()["status"] == "healthy"
        assert "dynamo_frontend_requests_total" in (await client.get("/metrics")).text
        service.remove_chat_completions_model("h")
        assert (await served.chat("ok")).json()["message"] == "Model not found"
        assert (service.list_chat_completions_models(), service.list_completions_models()) == ([], ["h"])
        service.enable_endpoint("chat", False)
        assert "is registered yet" in (await served.chat("ok")).json()["message"]


async def test_what_is_refused() -> None:
    service, loop = HttpService(), asyncio.get_running_loop()
    engine = HttpAsyncEngine(Engine().chat, loop)
    service.add_chat_completions_model("m", "sum", engine)
    for call, kind, text in (
        (lambda: HttpService(70000), OverflowError, "out of range integral type conversion attempted"),
        (lambda: HttpService("x"), TypeError, "argument 'port': 'str' object cannot be interpreted as an integer"),
        (lambda: service.add_chat_completions_model("m", "sum", engine), DynamoException, "Model already exists: m"),
        (lambda: service.remove_completions_model("zz"), DynamoException, "Model not found: zz"),
        (lambda: service.add_completions_model("n", "sum", PythonAsyncEngine(Engine().chat, loop)), TypeError,
         "argument 'engine': 'PythonAsyncEngine' object cannot be converted to 'HttpAsyncEngine'"),
        (lambda: service.enable_endpoint("bogus", True), DynamoException,
         "Invalid endpoint type: 'bogus'. Valid types are: chat, completion, embedding, images, audios, videos, "
         "realtime, classify, pooling, rerank, responses, anthropic_messages, generate, batch"),
        (lambda: service.enable_endpoint("chat", 1), TypeError,
         "argument 'enabled': 'int' object cannot be converted to 'PyBool'"),
    ):  # fmt: skip
        with pytest.raises(kind) as told:
            call()
        assert str(told.value) == text
    with pytest.raises(TypeError, match="argument 'runtime': 'int' object cannot be converted to 'DistributedRuntime'"):
        await service.run(5)  # type: ignore[arg-type]


async def test_a_port_that_is_taken_is_told() -> None:
    async with serving() as served:
        port = served.client.base_url.port
        runtime = make_runtime()
        with pytest.raises(DynamoException, match=f"cannot listen on 127.0.0.1:{port}"):
            await HttpService(port, env={"DYN_HTTP_HOST": "127.0.0.1"}).run(runtime)
        await runtime.close()


def test_names_are_dynamos() -> None:
    assert issubclass(llm.HttpAsyncEngine, llm.PythonAsyncEngine)
