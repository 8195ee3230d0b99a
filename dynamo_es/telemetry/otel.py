"""Traces over OpenTelemetry's SDK: spans for each request, its preprocessing, each decision and each worker.

Needs the extra ``otel``: only ``telemetry.open`` imports this module. Spans are passed on explicitly, not by context
variables: requests of one event loop are told apart by who owns them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.context import Context as OtelContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from dynamo_es import __version__
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.runtime.trace_context import SAMPLED, TraceContext
from dynamo_es.runtime.tracing import Attribute, Facts

if TYPE_CHECKING:
    from dynamo_es.frontend.access_log import AccessEntry

_BATCH_SPANS = 512
_CLOSE_S = 3.0
"""How long the end of a process waits for spans to be sent."""


class CountingExporter(SpanExporter):
    """An exporter that counts what another one does. ``export`` runs on the processor's thread only.

    Attributes:
        exported, failed: Spans that the collector took, and did not take.
    """

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._closed = False
        self.exported = self.failed = 0

    @property
    def done(self) -> int:
        """Spans that wait no more."""
        return self.exported + self.failed

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            if not self._closed:
                result = self._inner.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self.exported += len(spans)
            else:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """OpenTelemetry's batching, with a bound that counts what it refuses. Spans end on one event loop.

    Attributes:
        dropped_full: Spans that found no room.
    """

    def __init__(self, exporter: CountingExporter, bound: int) -> None:
        super().__init__(exporter, max_queue_size=bound, max_export_batch_size=min(bound, _BATCH_SPANS))
        self._counts = exporter
        self._bound = bound
        self._accepted = 0
        self.dropped_full = 0

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._accepted - self._counts.done >= self._bound:
            self.dropped_full += 1
            return
        self._accepted += 1
        super().on_end(span)


class OtelTracing:
    """The traces of one process: ``RequestTracer``, ``HandlerTracer``, ``TraceCounts``. Belongs to one event loop."""

    def __init__(
        self,
        config: TelemetryConfig,
        endpoint: str | None,
        *,
        role: str,
        instance_id: int,
        exporter: SpanExporter | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Starts the thread that exports. ``endpoint``: None: as the environment says. ``exporter``: another one."""
        self._exporter = CountingExporter(exporter if exporter is not None else OTLPSpanExporter(endpoint))
        self._processor = BoundedProcessor(self._exporter, config.queue)
        own = {
            "service.name": config.service_name,
            "service.version": __version__,
            "service.instance.id": f"{instance_id:x}",
            "dynamo.role": role,
        }
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create(own),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("dynamo_es", __version__)
        self.now_ns = now_ns

    @property
    def exported(self) -> int:
        """As ``TraceCounts``."""
        return self._exporter.exported

    @property
    def dropped_full(self) -> int:
        """As ``TraceCounts``."""
        return self._processor.dropped_full

    @property
    def failed(self) -> int:
        """As ``TraceCounts``."""
        return self._exporter.failed

    def request(self, method: str, route: str, caller: TraceContext | None) -> RequestSpan:
        """As ``RequestTracer``."""
        span = self.start(
            f"{method} {route}", caller, SpanKind.SERVER, {"http.request.method": method, "http.route": route}
        )
        return RequestSpan(self, span, caller)

    def handling(self, endpoint: str, request_id: str, caller: TraceContext | None) -> HandlerSpan:
        """As ``HandlerTracer``."""
        facts: dict[str, Attribute] = {"dynamo.endpoint": endpoint, "dynamo.request_id": request_id}
        return HandlerSpan(self.start(f"handle {endpoint}", caller, SpanKind.SERVER, facts), caller)

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Attribute] | None = None,
        at_ns: int | None = None,
    ) -> Span:
        """A span that is to be ended."""
        began = self.now_ns() if at_ns is None else at_ns
        return self._tracer.start_span(name, _otel_context(parent), kind, attributes, start_time=began)

    async def close(self) -> None:
        """Send what waits, for a few seconds at most; then nothing is sent any more. Safe to call twice."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        # A thread of its own: the loop's pool would be waited for at the end of the process.
        threading.Thread(target=end, name="trace-export-end", daemon=True).start()
        for _ in range(2):
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await ended.wait()
                return
            except TimeoutError:
                self._exporter.shutdown()  # ends its pauses between attempts; what is left fails at once


class RequestSpan:
    """The span of a request at the frontend: a ``RequestTrace`` and a ``HopTracer``.

    Attributes:
        context: Its place in the trace.
    """

    __slots__ = ("_mark_ns", "_span", "_tracing", "context")

    def __init__(self, tracing: OtelTracing, span: Span, caller: TraceContext | None) -> None:
        self._tracing = tracing
        self._span = span
        self._mark_ns = 0
        self.context = _context_of(span, caller)

    def body_read(self) -> None:
        """As ``RequestTrace``."""
        self._mark_ns = self._tracing.now_ns()

    def preprocessed(self, prompt_tokens: int) -> None:
        """As ``RequestTrace``."""
        if self._span.is_recording():
            tokens: dict[str, Attribute] = {"gen_ai.usage.input_tokens": prompt_tokens}
            span = self._tracing.start("preprocess", self.context, attributes=tokens, at_ns=self._mark_ns or None)
            span.end(self._tracing.now_ns())

    def deciding(self, stage: str, attempt: int) -> OtelHop:
        """As ``HopTracer``."""
        return OtelHop(self._tracing, self.context, stage, attempt)

    def ended(self, entry: AccessEntry) -> None:
        """As ``RequestTrace``."""
        span = self._span
        if span.is_recording():
            span.set_attributes(request_facts(entry))
            if entry.error_type is not None and (entry.status >= 500 or entry.error_type == "internal"):
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._tracing.now_ns())


class OtelHop:
    """A ``Hop``: one span for the decision, another one for the time at the worker."""

    __slots__ = ("_began_ns", "_named", "_parent", "_span", "_tracing")

    def __init__(self, tracing: OtelTracing, parent: TraceContext, stage: str, attempt: int) -> None:
        self._tracing = tracing
        self._parent = parent
        self._began_ns = tracing.now_ns()
        self._named: dict[str, Attribute] = {"dynamo.stage": stage or "aggregated", "dynamo.attempt": attempt}
        self._span: Span | None = None

    def dispatched(self, facts: Facts) -> TraceContext:
        tracing, parent = self._tracing, self._parent
        now = tracing.now_ns()
        decision = tracing.start("route", parent, attributes=self._named, at_ns=self._began_ns)
        known: Mapping[str, Attribute] = {}
        if decision.is_recording():
            known = facts()
            decision.set_attributes(known)
        decision.end(now)
        worker = {name: known[name] for name in ("dynamo.worker_id", "dynamo.dp_rank") if name in known}
        self._span = tracing.start("dispatch", parent, SpanKind.CLIENT, {**self._named, **worker}, now)
        return _context_of(self._span, parent)

    def answered(self) -> None:
        if self._span is not None:
            self._span.add_event("first_output", timestamp=self._tracing.now_ns())

    def ended(self, outcome: str, detail: str) -> None:
        span = self._span
        if span is None:  # nobody was found
            span = self._tracing.start("route", self._parent, attributes=self._named, at_ns=self._began_ns)
        span.set_attribute("dynamo.outcome", outcome)
        if outcome in ("error", "migrated"):
            span.set_attribute("error.type", detail or outcome)
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._tracing.now_ns())


class HandlerSpan:
    """A ``Handling``."""

    __slots__ = ("_span", "context")

    def __init__(self, span: Span, caller: TraceContext | None) -> None:
        self._span = span
        self.context = _context_of(span, caller)

    def ended(self, error: str | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def request_facts(entry: AccessEntry) -> dict[str, Attribute]:
    """What a request came to, as attributes; what is not known is left out."""
    reasons = entry.finish_reason
    values: dict[str, Attribute | None] = {
        "http.response.status_code": entry.status,
        "dynamo.request_id": entry.request_id,
        "dynamo.x_request_id": entry.x_request_id,
        "dynamo.stream": entry.stream,
        "dynamo.cached_tokens": entry.cached_tokens,
        "dynamo.client_disconnected": entry.disconnected or None,
        "dynamo.api_key_id": entry.api_key,
        "gen_ai.response.model": entry.model,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "gen_ai.response.finish_reasons": None if reasons is None else reasons.split(","),
        "dynamo.time_to_first_token_ms": entry.ttft_ms,
        "error.type": entry.error_type,
    }
    return {name: value for name, value in values.items() if value is not None}


def _otel_context(parent: TraceContext | None) -> OtelContext:
    empty = OtelContext()
    if parent is None:
        return empty
    known = SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags & SAMPLED),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
    return set_span_in_context(NonRecordingSpan(known), empty)


def _context_of(span: Span, parent: TraceContext | None) -> TraceContext:
    known = span.get_span_context()
    state = "" if parent is None else parent.state
    above = None if parent is None else parent.span_id
    return TraceContext(f"{known.trace_id:032x}", f"{known.span_id:016x}", int(known.trace_flags), state, above)
