"""Traces: of what a client is in, through frontend and router, to the worker; sent to a collector over OTLP.

Where OpenTelemetry is needed and the extra ``otel`` is not installed, tests are skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from dynamo_es.clock import SystemClock
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend.access_log import AccessLog
from dynamo_es.frontend.extras import MissingExtra
from dynamo_es.frontend.routes import taken_paths
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.llm import HttpAsyncEngine, HttpService
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.request_server import Batch
from dynamo_es.telemetry.open import endpoint_of, open_tracing
from tests.support.runtimes import make_runtime, wait_for
from tests.support.served_fleet import CHAT, ServedFleet, served_fleet
from tests.unit.frontend.asgi_client import Reply, call

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
MARK = "Xyzzy-4711 " * 40
REPLY = [[{"token_ids": [72]}], [{"token_ids": [105], "finish_reason": "stop"}]]


def is_installed() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:
        return False


needs_otel = pytest.mark.skipif(not is_installed(), reason="needs the extra otel")


async def ask(fleet: ServedFleet, parent: str | None = PARENT, app: Any = None, **body: Any) -> Reply:
    headers = {"content-type": "application/json"} | ({} if parent is None else {"traceparent": parent})
    chat = {"model": "m", "messages": [{"role": "user", "content": MARK}], **body}
    return await call(app or fleet.app, CHAT, json.dumps(chat).encode(), headers=headers)


def remembering(contexts: list[Context]) -> Callable[[Any, Context], AsyncIterator[Batch]]:
    async def answer(request: Any, context: Context) -> AsyncIterator[Batch]:
        contexts.append(context)
        for frames in REPLY:
            yield Batch(frames)

    return answer


async def test_a_clients_trace_reaches_the_worker_and_the_log_without_opentelemetry() -> None:
    contexts: list[Context] = []
    async with served_fleet() as fleet:
        await fleet.worker(remembering(contexts))
        assert (await ask(fleet)).status == 200
        assert (await ask(fleet, None)).status == 200
        assert (await ask(fleet, "nonsense")).status == 200
        records = await fleet.requests_records(9)
    assert [context.trace_headers() for context in contexts] == [{"traceparent": PARENT}, None, None]
    assert [context.trace_id for context in contexts] == [TRACE, None, None]
    first = {record.key for record in records if ("traceparent", PARENT.encode()) in record.headers}
    assert first == {contexts[0].id().encode()}
    assert sum(len(record.headers) == 2 for record in records) == 3  # of the first request: routed, prefilled, finished


async def test_the_access_log_names_worker_overlap_and_trace() -> None:
    lines: list[dict[str, Any]] = []

    class Kept:
        def offer(self, line: bytes) -> None:
            lines.append(json.loads(line))

    async with served_fleet() as fleet:
        await fleet.mock_worker()
        app = AccessLog(fleet.app, Kept(), SystemClock(), taken_paths(HttpPathsConfig()))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            # Its KV events reach the index later than its answer reaches the client.
            while not lines or not lines[-1]["overlap_blocks"]:
                assert (await ask(fleet, app=app, max_tokens=2)).status == 200
        (worker_id,) = {rank.worker_id for rank in fleet.models.routers()[0][1].router._candidates()}
    line = lines[-1]
    assert (line["worker_id"], line["dp_rank"], line["prefill_worker_id"]) == (worker_id, 0, worker_id)
    assert (line["trace_id"], line["status"], line["output_tokens"]) == (TRACE, 200, 2)
    assert (line["finish_reason"], lines[0]["overlap_blocks"]) == ("length", 0)
    assert MARK[:10] not in json.dumps(lines)


# -- the collector -----------------------------------------------------------------------------------------------------


class Collector:
    """Takes spans over OTLP/HTTP, and decodes them with OpenTelemetry's own schema."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        self.bodies.append(body)
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = values(part.resource.attributes)
            for scope in part.scope_spans:
                self.spans += scope.spans
                self.resources += [resource] * len(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    def named(self, start: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(start)]


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for item in attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def telemetry(url: str, **changes: Any) -> TelemetryConfig:
    return TelemetryConfig(enabled=True, endpoint=endpoint_of(url), **changes)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@needs_otel
@pytest.mark.usefixtures("soon")
async def test_a_request_is_one_trace_from_the_frontend_to_the_worker() -> None:
    contexts: list[Context] = []
    async with collecting() as collector, served_fleet(telemetry=telemetry(collector.url)) as fleet:
        runtime = await fleet.worker(remembering(contexts))
        reply = await ask(fleet, stream=True, stream_options={"include_usage": True})
        assert reply.status == 200
        await wait_for(lambda: len(collector.spans) >= 5)
        records = await fleet.requests_records(3)
        page = (await fleet.get("/metrics")).text
    spans = {span.name: span for span in collector.spans}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    request = spans[f"POST {CHAT}"]
    handle = spans["handle dynamo/backend/generate"]
    assert (request.parent_span_id.hex(), handle.parent_span_id) == (SPAN, spans["dispatch"].span_id)
    for name in ("preprocess", "route", "dispatch"):
        assert spans[name].parent_span_id == request.span_id, name
        assert request.start_time_unix_nano <= spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano
        assert spans[name].end_time_unix_nano <= request.end_time_unix_nano
    worker_id = str(runtime.core.instance_id)
    decision = values(spans["route"].attributes)
    assert (decision["dynamo.worker_id"], decision["dynamo.router_mode"]) == (worker_id, "kv")
    assert (decision["dynamo.candidate_count"], decision["dynamo.overlap_blocks"]) == (1, 0)
    assert decision["dynamo.candidates"][0].startswith(f"{worker_id}:0 overlap=0 cost=")
    assert any(place.startswith("dynamo.kv-events/0@") for place in decision["dynamo.log_positions"])
    assert values(spans["dispatch"].attributes)["dynamo.worker_id"] == worker_id
    assert values(spans["dispatch"].attributes)["dynamo.outcome"] == "ok"
    assert [event.name for event in spans["dispatch"].events] == ["first_output"]
    told = values(request.attributes)
    assert (told["http.response.status_code"], told["gen_ai.response.model"], told["dynamo.stream"]) == (200, "m", True)
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (2, ["stop"])
    assert told["dynamo.request_id"] == values(handle.attributes)["dynamo.request_id"] == contexts[0].id()
    # What the handler calls is in the trace as well, below the worker's span.
    assert contexts[0].span_id == handle.span_id.hex()
    assert {resource["dynamo.role"] for resource in collector.resources} == {"frontend", "worker"}
    # The log's records lead to the request's span.
    expected = ("traceparent", f"00-{TRACE}-{request.span_id.hex()}-01".encode())
    assert all(expected in record.headers for record in records)
    assert b"Xyzzy" not in b"".join(collector.bodies)
    assert "dynamo_es_trace_spans_exported_total" in page
    assert 'dynamo_es_trace_spans_dropped_total{cause="full"} 0.0' in page


@needs_otel
@pytest.mark.usefixtures("soon")
async def test_failures_and_refusals_are_told_and_sampling_is_the_clients() -> None:
    contexts: list[Context] = []

    async def fails(request: Any, context: Context) -> AsyncIterator[Batch]:
        contexts.append(context)
        yield Batch([{"token_ids": [72]}])
        raise RuntimeError(MARK)

    async with collecting() as collector, served_fleet(telemetry=telemetry(collector.url)) as fleet:
        await fleet.worker(fails)
        assert (await ask(fleet, f"00-{TRACE}-{SPAN}-00")).status == 500
        assert (await ask(fleet, None)).status == 500
        assert (await ask(fleet, temperature=9)).status == 400
        await wait_for(lambda: len(collector.named("POST")) >= 2 and collector.named("handle"))
    # The first is not sampled: it goes on in its trace, and is not recorded.
    assert (contexts[0].trace_id, contexts[0].trace.flags) == (TRACE, 0)  # type: ignore[union-attr]
    assert contexts[1].trace_id is not None
    failed, refused = collector.named("POST")
    assert (failed.trace_id.hex(), failed.status.code) == (contexts[1].trace_id, 2)
    assert values(failed.attributes)["error.type"] == "internal"
    (dispatch,), (handle,) = collector.named("dispatch"), collector.named("handle")
    assert values(dispatch.attributes)["dynamo.outcome"] == "error"
    assert values(handle.attributes)["error.type"] == "Unknown"
    assert (refused.trace_id.hex(), refused.status.code) == (TRACE, 0)
    assert values(refused.attributes)["error.type"] == "validation"
    assert len(collector.named("route")) == 1
    assert b"Xyzzy" not in b"".join(collector.bodies)


@needs_otel
async def test_a_collector_that_is_away_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    async with collecting() as gone:
        pass
    async with served_fleet(telemetry=telemetry(gone.url, queue=4)) as fleet:
        await fleet.worker(remembering([]))
        for _ in range(8):
            assert (await ask(fleet)).status == 200
        tracing = fleet.core.tracing
        assert tracing is not None
        await wait_for(lambda: tracing.dropped_full and tracing.failed)
        page = (await fleet.get("/metrics")).text
        assert tracing.exported == 0
        assert 'dynamo_es_trace_spans_dropped_total{cause="failed"}' in page
        began = asyncio.get_running_loop().time()
        await tracing.close()
        assert asyncio.get_running_loop().time() - began < 60
    assert tracing.failed + tracing.dropped_full <= 8 * 4


@needs_otel
def test_nothing_is_imported_while_traces_are_off() -> None:
    code = (
        "import sys, dynamo_es.cli.launch, dynamo_es.engines.mock_worker, dynamo_es.telemetry.open as o\n"
        "from dynamo_es.config.telemetry_options import TelemetryConfig\n"
        "assert o.open_tracing(TelemetryConfig(), role='frontend', instance_id=1) is None\n"
        "assert 'opentelemetry.sdk' not in sys.modules and 'google.protobuf' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_library_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EXPORTER, None)
    with pytest.raises(MissingExtra, match=r"of the extra 'otel'; install it .*leave --otel-export out"):
        open_tracing(TelemetryConfig(enabled=True), role="worker", instance_id=1)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        (None, None),
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/traces", "https://c/otlp/traces"),
    ],
)
def test_a_collectors_address_without_a_path_is_completed(url: str | None, endpoint: str | None) -> None:
    assert endpoint_of(url) == endpoint


@needs_otel
@pytest.mark.usefixtures("soon")
async def test_engines_of_the_frontends_own_process_are_in_the_trace_as_well() -> None:
    inside: list[dict[str, str] | None] = []

    async def engine(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        inside.append(context.trace_headers())
        if request["messages"][0]["content"] == "fail":
            raise ValueError("no")
        choice = {"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}
        yield {"id": "1", "choices": [choice], "created": 1, "model": "h", "object": "chat.completion.chunk"}

    async with collecting() as collector, served_engine(engine, telemetry(collector.url)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for said, status in (("ok", 200), ("fail", 400)):
                body = {"model": "h", "messages": [{"role": "user", "content": said}]}
                assert (await client.post(CHAT, json=body, headers={"traceparent": PARENT})).status_code == status
        await wait_for(lambda: sum(span.name == "dispatch" for span in collector.spans) == 2)
    spans = {span.span_id.hex(): span for span in collector.spans}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    for headers, outcome in zip(inside, ("ok", "error"), strict=True):
        assert headers is not None
        hop = spans[headers["traceparent"].split("-")[2]]
        assert (hop.name, values(hop.attributes)["dynamo.outcome"]) == ("dispatch", outcome)
        request = spans[hop.parent_span_id.hex()]
        assert (request.name, request.parent_span_id.hex()) == (f"POST {CHAT}", SPAN)


@asynccontextmanager
async def served_engine(engine: Any, traces: TelemetryConfig) -> AsyncIterator[str]:
    """A Python engine behind ``HttpService``; its URL."""
    runtime, loop = make_runtime(telemetry=traces), asyncio.get_running_loop()
    service = HttpService(0, env={"DYN_HTTP_HOST": "127.0.0.1"})
    service.add_chat_completions_model("h", "sum", HttpAsyncEngine(engine, loop))
    service.enable_endpoint("chat", True)
    ready: asyncio.Future[FrontendServer] = loop.create_future()
    task = asyncio.create_task(service.run(runtime, on_ready=ready.set_result))
    try:
        async with asyncio.timeout(60):
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        yield f"http://127.0.0.1:{ready.result().port}"
    finally:
        service.shutdown()
        await task
        await runtime.close()
