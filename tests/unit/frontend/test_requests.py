"""Bodies through the whole application, without sockets: refusals, limits, what reaches the worker."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.asgi import FrontendApp
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(frame("ok", "stop")))


@pytest.fixture
def app(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> FrontendApp:
    return application(served(engine, context_length=2000), executor=executor, pending={"later": "starting"})


async def post(app: FrontendApp, body: Any, path: str = CHAT, **more: Any) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(app, path, data, **more)


def openai_error(reply: Reply) -> dict[str, Any]:
    body = json.loads(reply.body)
    assert set(body) >= {"message", "type", "code", "error"}
    assert body["code"] == reply.status
    assert body["error"]["message"] == body["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "m", "messages": {"role": "user"}}, 400, "messages", "invalid_body"),
        ({"model": "m"}, 400, "messages", "invalid_body"),
        (b"not json", 400, None, "invalid_body"),
        ({**HI, "model": "nope"}, 404, "model", "model_not_found"),
        ({**HI, "foo": 1}, 400, "foo", "invalid_value"),
        ({**HI, "model": "later"}, 503, None, "model_not_ready"),
    ],
    ids=["messages object", "messages missing", "not json", "unknown model", "unknown member", "not ready"],
)
async def test_PROTO_16_errors_have_both_shapes_and_the_field(
    app: FrontendApp, engine: ScriptedEngine, body: Any, status: int, param: str | None, code: str
) -> None:
    reply = await post(app, body)
    error = openai_error(reply)
    assert (reply.status, error["param"], error["code"]) == (status, param, code)
    assert reply.headers["content-type"] == "application/json"
    assert engine.requests == []


async def test_PROTO_16_wrong_method_and_path(app: FrontendApp) -> None:
    for path, method, status in ((CHAT, "GET", 405), ("/v1/models", "POST", 405), ("/v1/nope", "POST", 404)):
        reply = await call(app, path, method=method)
        assert reply.status == status
        openai_error(reply)
    assert (await call(app, CHAT, method="GET")).headers["allow"] == "POST"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_PROTO_16_no_model_is_registered_yet(executor: ThreadPoolExecutor, path: str) -> None:
    reply = await call(application(executor=executor), path, b"{}", headers={"x-request-id": "mine"})
    assert reply.status == 404
    error = openai_error(reply)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "registered yet" in error["message"]
    assert "dynamo-es worker" in error["message"]
    assert reply.headers["x-request-id"] == "mine"


async def test_a_route_that_no_registered_model_serves_says_so(executor: ThreadPoolExecutor) -> None:
    model = served(ScriptedEngine(says(frame("x", "stop"))), model_type="Completions")
    reply = await call(application(model, executor=executor), CHAT, b"{}")
    assert reply.status == 404
    assert CHAT in openai_error(reply)["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 25}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
    ],
)
async def test_PROTO_17_one_sentence_and_the_right_param(app: FrontendApp, change: dict[str, Any], param: str) -> None:
    reply = await post(app, {**HI, **change})
    error = openai_error(reply)
    assert (reply.status, error["param"]) == (400, param)
    assert len(error["message"]) < 160
    assert "\n" not in error["message"]


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template_args"])
async def test_SEC_03_template_in_template_arguments_is_refused(
    app: FrontendApp, engine: ScriptedEngine, name: str
) -> None:
    evil = "{% for i in range(10**9) %}x{% endfor %}"
    assert (await post(app, {**HI, name: {"chat_template": evil}})).status == 400
    assert (await post(app, {**HI, "chat_template": evil})).status == 400
    assert engine.requests == []
    assert (await post(app, {**HI, name: {"enable_thinking": False, "messages": []}})).status == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logit_bias": {"191222": -100}}, "logit_bias"),
        ({"logit_bias": {"AI": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e9}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 2_000_000}, "max_tokens"),
        ({"n": 10**6}, "n"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
async def test_SEC_09_engine_killers_are_refused(
    app: FrontendApp, engine: ScriptedEngine, change: dict[str, Any], param: str
) -> None:
    reply = await post(app, {**HI, **change})
    assert (reply.status, openai_error(reply)["param"]) == (400, param)
    assert engine.requests == []


async def test_SEC_09_nan_and_deep_nesting_are_refused(app: FrontendApp, engine: ScriptedEngine) -> None:
    nan = json.dumps({**HI, "temperature": 1}).replace("1}", "NaN}").encode()
    assert (await post(app, nan)).status == 400
    for depth in (128, 100_000):
        deep = json.dumps(HI).encode()[:-1] + b',"metadata":' + b"[" * depth + b"]" * depth + b"}"
        reply = await post(app, deep)
        assert reply.status == 400
        assert "recursion limit exceeded" in reply.text
    flat = {**HI, "metadata": [[] for _ in range(500)]}
    assert (await post(app, flat)).status == 200
    assert len(engine.requests) == 1


async def test_prompt_longer_than_the_context_is_refused(app: FrontendApp, engine: ScriptedEngine) -> None:
    for size in (2001, 500_000):
        reply = await post(app, {"model": "m", "prompt": "x" * size}, COMPLETIONS)
        error = openai_error(reply)
        assert (reply.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert engine.requests == []
    assert (await post(app, {"model": "m", "prompt": "x" * 2000}, COMPLETIONS)).status == 200


async def test_prompt_never_shows_in_an_error_or_a_log(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "my-secret-prompt-" * 8
    engine = ScriptedEngine(says(RuntimeError(f"engine saw {secret}")))
    app = application(served(engine), executor=executor)
    for stream in (False, True):
        reply = await post(app, {**HI, "messages": [{"role": "user", "content": secret}], "stream": stream})
        assert "my-secret-prompt" not in reply.text
        assert "Internal server error" in reply.text
    assert "my-secret-prompt" not in caplog.text


async def test_limits_on_size_and_content_type(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = application(served(engine), executor=executor, config=FrontendConfig(body_limit_mb=1))
    big = await post(app, {**HI, "messages": [{"role": "user", "content": "x" * 1024 * 1024}]})
    assert big.status == 413
    assert "limit of 1 MB set by DYN_HTTP_BODY_LIMIT_MB" in big.text
    for content_type, status in (
        ("application/json; charset=utf-8", 200),
        ("application/vnd.x+JSON", 200),
        ("text/plain", 415),
        ("", 415),
    ):
        assert (await post(app, HI, headers={"content-type": content_type})).status == status
    assert (await post(app, HI, headers={})).status == 415


async def test_what_the_worker_gets(app: FrontendApp, engine: ScriptedEngine) -> None:
    body = {
        "model": "m",
        "prompt": "ab",
        "max_tokens": 5,
        "temperature": 0.7,
        "stop": ["X"],
        "stop_token_ids": [7],
        "logit_bias": {"5": 1},
        "echo": True,
        "suffix": "s",
        "best_of": 3,
        "n": 2,
        "logprobs": 2,
        "cache_salt": "k",
        "min_tokens": 2,
        "guided_regex": "a+",
        "nvext": {"agent_hints": {"priority": 3, "osl": 9}, "backend_instance_id": 4, "annotations": ["request_id"]},
    }
    assert (await post(app, body, COMPLETIONS)).status == 200
    sent = engine.requests[0]
    assert sent["token_ids"] == [97, 98]
    assert sent["eos_token_ids"] == [257, 262]
    assert sent["annotations"] == ["request_id"]
    assert sent["routing"] == {
        "backend_instance_id": 4,
        "cache_salt": "k",
        "priority": 3,
        "priority_jump": 3.0,
        "expected_output_tokens": 9,
    }
    assert sent["extra_args"] == {"nvext": {"cache_salt": "k"}, "echo": True, "suffix": "s"}
    sampling = {key: value for key, value in sent["sampling_options"].items() if value is not None}
    assert sampling == {
        "n": 2,
        "best_of": 3,
        "temperature": 0.699999988079071,
        "guided_decoding": {"regex": "a+"},
        "logit_bias": {"5": 1.0},
    }
    stops = {key: value for key, value in sent["stop_conditions"].items() if value is not None}
    assert stops == {
        "max_tokens": 5,
        "stop": ["X"],
        "stop_token_ids": [7],
        "stop_token_ids_hidden": [257, 262],
        "min_tokens": 2,
    }
    assert sent["output_options"]["prompt_logprobs"] == 1


async def test_request_ids(app: FrontendApp, engine: ScriptedEngine) -> None:
    chosen = "0f8fad5b-d9cb-469f-a165-70867728950e"
    headers = {"content-type": "application/json", "x-request-id": "abc", "x-dynamo-request-id": chosen}
    reply = await post(app, HI, headers={**headers, "x-dynamo-meta-team": "blue"})
    assert reply.headers["x-request-id"] == "abc"
    assert json.loads(reply.body)["id"] == f"chatcmpl-{chosen}"
    assert engine.contexts[0].id() == chosen
    assert dict(engine.contexts[0].metadata) == {"team": "blue"}
    reply = await post(app, {**HI, "n": 0}, headers={**headers, "x-dynamo-request-id": "no uuid"})
    assert reply.headers["x-request-id"] == "abc"
    many = {f"x-dynamo-meta-{number}": "v" for number in range(65)}
    reply = await post(app, HI, headers={**headers, **many})
    assert (reply.status, "limit of 64 entries" in reply.text) == (431, True)


async def test_metadata_headers_by_another_name(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = application(served(engine), executor=executor, config=FrontendConfig(metadata_header="our-"))
    headers = {"content-type": "application/json", "Our-Team": "blue", "x-dynamo-meta-team": "red"}
    await post(app, HI, headers=headers)
    assert dict(engine.contexts[0].metadata) == {"team": "blue"}


async def test_batched_prompts_keep_their_order(executor: ThreadPoolExecutor) -> None:
    async def script(request: dict[str, Any], context: Any) -> Any:
        text = bytes(request["token_ids"]).decode()
        for letter in text:
            yield [frame(letter)]
        yield [frame("", "stop")]

    engine = ScriptedEngine(script)
    app = application(served(engine), executor=executor)
    body = {"model": "m", "prompt": ["ab", "cd"], "stream_options": None}
    answer = json.loads((await post(app, body, COMPLETIONS)).body)
    assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "ab"), (1, "cd")]
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    reply = await post(app, {**body, "stream": True, "stream_options": {"include_usage": True}}, COMPLETIONS)
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = [json.loads(event) for event in events[:-1]]
    assert [one["choices"][0]["index"] for one in chunks[:-1]] == [0, 0, 0, 1, 1, 1]
    assert {one["id"][-2:] for one in chunks[:3]} == {"-0"}
    assert chunks[-1]["usage"]["total_tokens"] == 8


async def test_failure_of_one_prompt_of_a_batch_ends_the_others(executor: ThreadPoolExecutor) -> None:
    async def script(request: dict[str, Any], context: Any) -> Any:
        if request["token_ids"] == [98]:
            raise ConnectionError
        await context.async_killed_or_stopped()
        yield [frame("never", "stop")]

    engine = ScriptedEngine(script)
    app = application(served(engine), executor=executor)
    assert (await post(app, {"model": "m", "prompt": ["a", "b"]}, COMPLETIONS)).status == 500
    assert sorted(engine.ended) == ["cancelled", "failed"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("wanted", [None, False, True])
async def test_PROTO_09_usage_chunk_only_when_asked_for(app: FrontendApp, path: str, wanted: bool | None) -> None:
    body: dict[str, Any] = {"model": "m", "stream": True}
    body |= {"messages": HI["messages"]} if path == CHAT else {"prompt": "Hi"}
    if wanted is not None:
        body["stream_options"] = {"include_usage": wanted}
    text = (await post(app, body, path)).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    extra = [chunk for chunk in chunks if not chunk["choices"]]
    assert len(extra) == (1 if wanted else 0)
    assert all(chunk.get("usage") is None for chunk in chunks if chunk["choices"])
    assert text.endswith("data: [DONE]\n\n")
    if wanted:
        unary = {key: value for key, value in body.items() if not key.startswith("stream")}
        assert extra[0]["usage"] == json.loads((await post(app, unary, path)).body)["usage"]
        assert chunks[-1] is extra[0]


async def test_PROTO_10_role_once_and_one_finish_reason_per_index(executor: ThreadPoolExecutor) -> None:
    frames = [frame("a", index=0), frame("c", index=1), frame("d", "stop", index=1), frame("b", "length", index=0)]
    app = application(served(ScriptedEngine(says(frames))), executor=executor)
    body = {**HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    text = (await post(app, body)).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index, reason in ((0, "length"), (1, "stop")):
        own = [choice for choice in choices if choice["index"] == index]
        assert sum("role" in choice["delta"] for choice in own) == 1
        assert [choice["finish_reason"] for choice in own] == [None, reason]
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_PROTO_13_failure_after_the_first_chunk_is_an_error_frame(executor: ThreadPoolExecutor) -> None:
    from dynamo_es.errors import Disconnected

    app = application(served(ScriptedEngine(says(frame("a"), frame("b"), Disconnected("x")))), executor=executor)
    text = (await post(app, {**HI, "stream": True})).text
    events = text.strip().split("\n\n")
    assert len(events) == 4
    error = json.loads(events[2][6:])["error"]
    assert error == {"message": "Service temporarily unavailable", "type": "service_unavailable", "code": 503}
    assert events[3] == "data: [DONE]"
    assert '"finish_reason":"stop"' not in text
    assert 'status="error"' in (await call(app, "/metrics", method="GET")).text


async def test_PROTO_13_failure_in_our_own_output_stage_is_an_error_frame(executor: ThreadPoolExecutor) -> None:
    app = application(served(ScriptedEngine(says(frame("a"), {"token_ids": ["x"]}))), executor=executor)
    text = (await post(app, {**HI, "stream": True, "stop": ["zz"], "stop_token_ids": [1]})).text
    assert text.endswith("data: [DONE]\n\n")
    bad = application(served(ScriptedEngine(says(frame("a"), {"token_ids": 5}))), executor=executor)
    text = (await post(bad, {**HI, "stream": True})).text
    assert '"type":"internal_server_error","code":500' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_engine_whose_own_task_was_cancelled_is_an_internal_error(executor: ThreadPoolExecutor) -> None:
    async def script(request: dict[str, Any], context: Any) -> Any:
        raise asyncio.CancelledError
        yield []

    app = application(served(ScriptedEngine(script)), executor=executor)
    assert (await post(app, HI)).status == 500
    assert '"internal_server_error"' in (await post(app, {**HI, "stream": True})).text


async def test_annotations_come_before_the_first_chunk(app: FrontendApp) -> None:
    body = {**HI, "stream": True, "nvext": {"annotations": ["token_ids", "request_id", "formatted_prompt", "other"]}}
    events = (await post(app, body)).text.split("\n\n")
    assert [event.split("\n")[0] for event in events[:3]] == [
        "event: request_id",
        "event: formatted_prompt",
        "event: token_ids",
    ]
    assert events[1].split("\n")[1] == ': "<|user|>Hi<|end|><|assistant|>"'
    assert events[3].startswith("data: ")


async def test_everything_that_is_ready_goes_out_in_one_send(executor: ThreadPoolExecutor) -> None:
    app = application(served(ScriptedEngine(says([frame("a"), frame("b")], frame("c", "stop")))), executor=executor)
    reply = await post(app, {**HI, "stream": True})
    assert [part.count(b"data: ") for part in reply.parts] == [2, 1, 1]


async def test_administrative_routes(app: FrontendApp) -> None:
    async def get(path: str) -> Reply:
        return await call(app, path, method="GET", headers={})

    health = json.loads((await get("/health")).body)
    assert health == {"status": "healthy", "endpoints": [], "instances": [], "log": {"state": "up"}}
    assert json.loads((await get("/live")).body)["status"] == "live"
    listed = json.loads((await get("/v1/models")).body)["data"]
    assert [(one["id"], one["context_window"]) for one in listed] == [("m", 2000)]
    assert json.loads((await get("/v1/models/m")).body)["id"] == "m"
    assert (await get("/v1/models/org/none")).status == 404
    assert (await get("/v1/models/later")).status == 503
    assert json.loads((await get("/v1/models/m/ready")).body) == {"model": "m", "ready": True, "namespaces": {}}
    assert (await get("/v1/models/later/ready")).status == 503
    assert (await get("/v1/models/org/none/ready")).status == 404
    assert (await get("/docs")).status == 303
    assert (await get("/docs/")).status == 200
    head = await call(app, "/live", method="HEAD", headers={})
    assert head.status == 200
    assert (await get("/metrics")).headers["content-type"] == "text/plain; charset=utf-8"


async def test_inference_routes_are_in_the_api_description(app: FrontendApp) -> None:
    document = json.loads((await call(app, "/openapi.json", method="GET", headers={})).body)
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"200", "400", "404", "500", "503", "529"} <= set(chat["responses"])
    schema = document["components"]["schemas"]["ChatRequest"]
    assert set(schema["required"]) == {"model", "messages"}
    assert "/health" in document["paths"]


async def test_concurrency_bound_refuses_with_both_shapes(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = application(served(engine), executor=executor, config=FrontendConfig(max_concurrent_requests=1))
    app.service.running.add(object())  # type: ignore[arg-type]
    reply = await post(app, HI)
    assert (reply.status, openai_error(reply)["code"]) == (503, "overloaded")
    app.service.running.clear()
    assert (await post(app, HI)).status == 200


async def test_draining_service_refuses_and_says_so(app: FrontendApp) -> None:
    app.service.drain()
    reply = await post(app, HI)
    assert (reply.status, json.loads(reply.body)["message"]) == (503, "Service is not ready")
    assert (await call(app, "/health", method="GET")).status == 503
    assert json.loads((await call(app, "/live", method="GET")).body)["status"] == "shutting_down"
    assert (await post(app, b"{")).status == 400


async def test_OPS_03_labels_do_not_grow_with_what_clients_send(app: FrontendApp) -> None:
    async def page() -> int:
        return len((await call(app, "/metrics", method="GET")).text.splitlines())

    await post(app, HI)
    await post(app, {**HI, "model": "x"})
    await call(app, "/nope")
    before = await page()
    for number in range(200):
        headers = {"content-type": "application/json", "x-tenant-id": f"t{number}", "user-agent": f"a{number}"}
        await post(app, {**HI, "model": f"model-{number}"}, headers=headers)
        await call(app, f"/nope/{number}")
    assert await page() == before
    text = (await call(app, "/metrics", method="GET")).text
    assert 'model="unknown_model"' in text
    assert "model-1" not in text


async def test_metrics_of_one_request(executor: ThreadPoolExecutor) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    usage["prompt_tokens_details"] = {"cached_tokens": 1}  # type: ignore[assignment]
    script = says(frame("a"), frame("b"), frame("c", "stop", completion_usage=usage))
    app = application(served(ScriptedEngine(script)), executor=executor)
    await post(app, {"model": "m", "prompt": "xy", "stream": True}, COMPLETIONS)
    text = (await call(app, "/metrics", method="GET")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    prefix = "dynamo_frontend_"
    labels = '{endpoint="completions",error_type="",model="m",request_type="stream",status="success"}'
    assert lines[f"{prefix}requests_total{labels}"] == "1.0"
    assert lines[f'{prefix}input_sequence_tokens_sum{{model="m"}}'] == "2.0"
    assert lines[f'{prefix}output_sequence_tokens_sum{{model="m"}}'] == "3.0"
    assert lines[f'{prefix}output_tokens_total{{model="m"}}'] == "3.0"
    assert lines[f'{prefix}cached_tokens_sum{{model="m"}}'] == "1.0"
    assert lines[f'{prefix}time_to_first_token_seconds_count{{model="m"}}'] == "1.0"
    assert lines[f'{prefix}inter_token_latency_seconds_count{{model="m"}}'] == "2.0"
    for gauge in ("active", "inflight", "queued"):
        assert lines[f'{prefix}{gauge}_requests{{model="m"}}'] == "0.0"
