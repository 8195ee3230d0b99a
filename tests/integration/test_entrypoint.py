"""``make_engine`` and ``run_input``: an engine of a script behind HTTP, the terminal, or as a worker of the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.http_error import HttpError
from dynamo_es.llm import (
    EngineType,
    EntrypointArgs,
    FrontendRoute,
    KvRouterConfig,
    MockEngineArgs,
    ModelRuntimeConfig,
    PythonAsyncEngine,
    RouterConfig,
    RouterMode,
    make_engine,
    run_input,
)
from dynamo_es.log.memory import MemoryLog
from dynamo_es.models.errors import ModelFetchError
from dynamo_es.models.fetch import Hub
from dynamo_es.runtime.model_card import BUILTIN_MODEL
from dynamo_es.runtime.runtime import DistributedRuntime
from tests.support.runtimes import PATIENT, SharedLog, make_runtime, running, wait_for

DATA = Path(__file__).parents[1] / "data"
SMOLLM = str(DATA / "models/smollm2-135m-instruct")
GOLDEN = {
    case["case"]: case["result"]
    for case in json.loads((DATA / "golden/services/entrypoint_errors.json").read_text())["cases"]
}
LIMIT_S = 60.0
ENV = {"DYN_HTTP_HOST": "127.0.0.1", "DYN_TOKEN_ECHO_DELAY_MS": "0"}
FAST_ENGINE = MockEngineArgs(num_gpu_blocks=512, block_size=16, speedup_ratio=0.0)
CHAT = "/v1/chat/completions"


def asks(model: str, said: str = "Hé llo", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": said}], **more}


@contextlib.asynccontextmanager
async def open_log() -> AsyncIterator[SharedLog]:
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    try:
        yield SharedLog(log)
    finally:
        await log.close()


@contextlib.asynccontextmanager
async def over_http(
    args: EntrypointArgs,
    log: SharedLog | None = None,
    routes: Any = None,
    env: Mapping[str, str] = ENV,
) -> AsyncIterator[httpx.AsyncClient]:
    runtime = make_runtime(log, role="frontend", runtime=PATIENT)
    ready: asyncio.Future[FrontendServer] = asyncio.get_running_loop().create_future()
    engine = await make_engine(runtime, args, env=env)
    async with running(runtime, run_input(runtime, "http", engine, routes, on_ready=ready.set_result)) as task:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        url = f"http://127.0.0.1:{ready.result().port}"
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            yield client


@contextlib.asynccontextmanager
async def worker(args: EntrypointArgs, log: SharedLog, path: str) -> AsyncIterator[DistributedRuntime]:
    runtime = make_runtime(log, runtime=PATIENT)
    async with running(runtime, run_input(runtime, path, await make_engine(runtime, args, env=ENV))) as task:
        await wait_for(lambda: task.done() or (runtime.core.started and runtime.core.registry.state.models))
        yield runtime


async def ready(client: httpx.AsyncClient, model: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await client.get(f"/v1/models/{model}/ready")).status_code != 200:
            await asyncio.sleep(0.01)


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [name for name, result in GOLDEN.items() if name.startswith("input:")])
async def test_recorded_inputs(case: str) -> None:
    runtime = make_runtime()
    path, result = case.removeprefix("input:"), GOLDEN[case]
    engine = await make_engine(runtime, EntrypointArgs(EngineType.Echo), env=ENV)
    if result["err"] == "TimeoutError":  # it runs until it is told to end
        task = asyncio.ensure_future(run_input(runtime, path, engine))
        await wait_for(lambda: task.done() or (runtime.core.started and runtime.core.registry.state.instances))
        assert not task.done()
        (instance,) = runtime.core.registry.state.instances.values()
        assert (instance.namespace, instance.component, instance.endpoint) == (
            ("NS", "C", "E") if path == "dyn://" else ("a", "b", "E")
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        with pytest.raises(DynamoException) as raised:
            run_input(runtime, path, engine)
        assert str(raised.value) == result["msg"]
    await runtime.close()


async def test_engines_that_cannot_be_made(tmp_path: Path) -> None:
    runtime = make_runtime()
    nowhere = Hub(endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
    missing = str(tmp_path / "no")
    aic = GOLDEN["mock_aic"]["msg"].partition(": ")[0]
    mock, echo, dynamic = EngineType.Mocker, EngineType.Echo, EngineType.Dynamic
    typed: list[tuple[EntrypointArgs, type[Exception], str]] = [
        (EntrypointArgs(echo, "no/model"), ModelFetchError, "Failed to fetch model 'no/model' at revision 'main'"),
        (EntrypointArgs(mock, extra_engine_args=missing), ConfigError, f'mocker args from "{missing}": '),
        (EntrypointArgs(echo, template_file=missing), ConfigError, "No such file or directory (os error 2)"),
        (EntrypointArgs(mock, mocker_engine_args=MockEngineArgs(
            aic_backend="vllm", aic_model_path=missing)), ConfigError, aic),
        (EntrypointArgs(dynamic, router_config=RouterConfig(
            RouterMode.RoundRobin, KvRouterConfig(serve_indexer=True))), ConfigError, "--router-mode=kv"),
        (EntrypointArgs(dynamic, router_config=RouterConfig(
            RouterMode.KV, KvRouterConfig(router_prefill_load_model="aic"))), ConfigError, "aic_perf_config"),
    ]  # fmt: skip
    for args, kind, text in typed:
        with pytest.raises(kind) as raised:
            await make_engine(runtime, args, hub=nowhere, env=ENV)
        assert text in str(raised.value)
    engine = await make_engine(runtime, EntrypointArgs(echo), env=ENV)
    for call, text in (
        (lambda: make_engine(runtime, 5), "argument 'args': 'int' object cannot be converted to 'EntrypointArgs'"),
        (lambda: run_input(runtime, "http", 5),
         "argument 'engine_config': 'int' object cannot be converted to 'EngineConfig'"),
        (lambda: run_input(5, "http", engine),
         "argument 'distributed_runtime': 'int' object cannot be converted to 'DistributedRuntime'"),
        (lambda: run_input(runtime, "http", engine, [5]), "'int' object cannot be converted to 'FrontendRoute'"),
    ):  # fmt: skip
        with pytest.raises(TypeError) as refused:
            call()
        assert str(refused.value) == text
    for path, message in (("/health", "conflicts with GET /health"), ("/own", "only supported by the input http")):
        route = FrontendRoute("GET", path, lambda context: {})
        with pytest.raises(ValueError, match=message):
            run_input(runtime, "http" if path == "/health" else "text", engine, [route])
    with pytest.raises(ConfigError, match="Dynamic asks workers"):
        await run_input(runtime, "dyn://a.b.c", await make_engine(runtime, EntrypointArgs(dynamic), env=ENV))
    slow = await make_engine(runtime, EntrypointArgs(echo, http_port=0), env={**ENV, "DYN_TOKEN_ECHO_DELAY_MS": "x"})
    with pytest.raises(ConfigError, match="DYN_TOKEN_ECHO_DELAY_MS=x"):
        await run_input(runtime, "http", slow)
    assert not runtime.core.started
    await runtime.close()


# -- engines of this process -------------------------------------------------------------------------------------------


async def test_echo_over_http() -> None:
    hello = FrontendRoute("GET", "/hello", lambda context: {"models": context.model_display_names()})
    async with over_http(EntrypointArgs(EngineType.Echo, http_port=0), routes=[hello]) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["dynamo"]
        assert said(await client.post(CHAT, json=asks("dynamo", max_tokens=2))) == "Hé llo"
        streamed = await client.post(CHAT, json=asks("dynamo", "ab", stream=True))
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n")[:-1]]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["a", "b", ""]
        both = (await client.post("/v1/completions", json={"model": "dynamo", "prompt": ["ab", "c"]})).json()
        assert [choice["text"] for choice in both["choices"]] == ["ab", "c"]
        assert (await client.get("/hello")).json() == {"models": ["dynamo"]}
        assert (await client.get("/health")).json()["models"]["dynamo"]["ready"] is True


async def test_a_mock_engine_over_http() -> None:
    args = EntrypointArgs(
        EngineType.Mocker, SMOLLM, "smol", http_port=0, mocker_engine_args=FAST_ENGINE, metrics_prefix="own"
    )
    async with over_http(args) as client:
        answer = await client.post(CHAT, json=asks("smol", max_tokens=4))
        assert said(answer)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (await client.post("/v1/completions", json={"model": "smol", "prompt": "a"})).status_code == 200
        assert (await client.post(CHAT, json=asks("other"))).status_code == 404
        assert "own_requests_total" in (await client.get("/metrics")).text


async def test_a_model_without_a_name_has_its_path(tmp_path: Path) -> None:
    arguments = tmp_path / "mock.json"
    arguments.write_text(json.dumps({"num_gpu_blocks": 128, "block_size": 8, "speedup_ratio": 0}))
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    args = EntrypointArgs(
        EngineType.Mocker, SMOLLM, http_port=0, extra_engine_args=str(arguments), template_file=str(template)
    )
    async with over_http(args) as client:
        answer = await client.post(CHAT, json=asks(SMOLLM, "Hello", max_tokens=1))
        assert answer.json()["usage"]["prompt_tokens"] == 1  # only the template of this file adds nothing


# -- the fleet ---------------------------------------------------------------------------------------------------------


async def test_workers_of_the_fleet_over_http_with_a_router_of_the_script() -> None:
    config = RouterConfig(RouterMode.KV, KvRouterConfig(overlap_score_credit=0.5), active_prefill_tokens_threshold=7)
    runtime_config = ModelRuntimeConfig()
    runtime_config.reasoning_parser = "basic"
    mock = EntrypointArgs(
        EngineType.Mocker, BUILTIN_MODEL, "m", mocker_engine_args=FAST_ENGINE, runtime_config=runtime_config
    )
    front = EntrypointArgs(EngineType.Dynamic, router_config=config, http_port=0, namespace="ns")
    async with open_log() as log, worker(mock, log, "dyn://ns.mock.generate") as own, over_http(front, log) as client:
        (card,) = own.core.registry.state.models.values()
        assert (card.display_name, card.model_input, card.kv_cache_block_size) == ("m", "Tokens", 16)
        assert card.runtime_config["reasoning_parser"] == "basic"
        await ready(client, "m")
        asked = asks("m", max_tokens=2, nvext={"extra_fields": ["worker_id"]})
        answer = await client.post(CHAT, json=asked)
        assert said(answer)
        assert answer.json()["nvext"]["worker_id"]["decode_worker_id"] == own.core.instance_id
        thresholds = (await client.get("/busy_threshold")).json()["thresholds"]
        assert thresholds[0]["active_prefill_tokens_threshold"] == 7


async def test_an_echo_as_a_worker() -> None:
    front = EntrypointArgs(EngineType.Dynamic, http_port=0)
    async with (
        open_log() as log,
        worker(EntrypointArgs(EngineType.Echo, model_name="e"), log, "dyn://ns.echo.generate") as own,
        over_http(front, log) as client,
    ):
        (card,) = own.core.registry.state.models.values()
        assert (card.display_name, card.model_input, card.model_type) == ("e", "Text", "Chat")
        await ready(client, "e")
        assert said(await client.post(CHAT, json=asks("e"))) == "Hé llo"
        assert (await client.post("/v1/completions", json={"model": "e", "prompt": "x"})).status_code == 404


async def test_a_script_s_chat_engine_answers_chat_and_asks_workers() -> None:
    made: list[Any] = []

    async def factory(identity: Any, card: Any, routed: Any) -> PythonAsyncEngine:
        made.append((identity.triple(), card.name()))

        async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            if request["messages"][0]["content"] == "no":
                raise HttpError(400, "Validation: not this")
            head = {"id": "own", "created": 1, "model": request["model"], "object": "chat.completion.chunk"}
            tokens = {"token_ids": [1, 2, 3], "stop_conditions": {"max_tokens": 3}, "sampling_options": {}}
            async for frame in routed.generate({**tokens, "output_options": {}, "eos_token_ids": []}, context=context):
                count = len(frame.data()["token_ids"])
                yield {**head, "choices": [{"index": 0, "delta": {"content": "x" * count}, "finish_reason": None}]}
            yield {**head, "choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]}

        return PythonAsyncEngine(generate, asyncio.get_running_loop())

    front = EntrypointArgs(EngineType.Dynamic, http_port=0, chat_engine_factory=factory)
    mock = EntrypointArgs(EngineType.Mocker, model_name="m", mocker_engine_args=FAST_ENGINE)
    async with open_log() as log, worker(mock, log, "dyn://ns.mock.generate"), over_http(front, log) as client:
        await ready(client, "m")
        assert made == [(("ns", "mock", "generate"), "m")]
        answer = await client.post(CHAT, json=asks("m", "Hello"))
        assert (said(answer), answer.json()["id"]) == ("xxx", "own")
        refused = await client.post(CHAT, json=asks("m", "no"))
        assert (refused.status_code, refused.json()["message"]) == (400, "Validation: not this")
        plain = await client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2})
        assert plain.json()["usage"]["completion_tokens"] == 2


# -- the terminal ------------------------------------------------------------------------------------------------------


async def talk(monkeypatch: pytest.MonkeyPatch, path: str, typed: str, args: EntrypointArgs) -> str:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "stdout", shown)
    runtime = make_runtime(role="frontend")
    async with asyncio.timeout(LIMIT_S):
        await run_input(runtime, path, await make_engine(runtime, args, env=ENV))
    await runtime.close()
    return shown.getvalue()


async def test_a_chat_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = await talk(monkeypatch, "text", "Hello\n/quit\n", EntrypointArgs(EngineType.Echo))
    assert shown.startswith("chatting with dynamo;")
    assert shown.endswith("> Hello\n> ")


async def test_standard_input_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await talk(monkeypatch, "stdin", "two\nlines", EntrypointArgs(EngineType.Echo)) == "two\nlines\n"


# -- a script of Dynamo's ----------------------------------------------------------------------------------------------

SCRIPT = """
from dynamo.llm import (
    AicPerfConfig, EngineType, EntrypointArgs, KvRouterConfig, RouterConfig, RouterMode, make_engine, run_input,
)
from dynamo.runtime import DistributedRuntime, dynamo_worker


def arguments(engine_type, **more):
    routing = RouterConfig(
        RouterMode.KV, KvRouterConfig(overlap_score_credit=1.0, router_temperature=0.0, use_kv_events=True),
        active_decode_blocks_threshold=0.9, enforce_disagg=False,
    )
    given = {
        "http_host": "127.0.0.1", "http_port": 0, "kv_cache_block_size": 16, "router_config": routing,
        "migration_limit": 1, "metrics_prefix": None, "enable_anthropic_api": True, "tokenizer_backend": "default",
        "namespace_prefix": "dyn",
    }
    return EntrypointArgs(engine_type, **given, **more)


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    await make_engine(runtime, arguments(EngineType.Dynamic))
    engine = await make_engine(runtime, arguments(EngineType.Echo, model_name="m"))
    await run_input(runtime, "stdin", engine)
"""


async def test_a_script_moves_over_by_its_import_root(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("DYN_ES_LOG", "memory://")
    monkeypatch.setenv("DYN_TOKEN_ECHO_DELAY_MS", "0")
    script: dict[str, Any] = {}
    exec(SCRIPT.replace("from dynamo.", "from dynamo_es."), script)
    async with asyncio.timeout(LIMIT_S):
        await script["main"]()
    assert shown.getvalue() == "Hello\n"
