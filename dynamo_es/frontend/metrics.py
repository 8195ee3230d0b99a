"""Prometheus metrics of the HTTP frontend (spec/frontend.md 5.1), in a registry that is passed in.

Labels are bounded: ``model`` is a primary name of a registered model or ``unknown_model``. The children of a model are
looked up once and kept; ``forget`` drops those of a model that left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dynamo_es.frontend.errors import CLIENT_CLOSED, OVERLOADED

UNKNOWN_MODEL = "unknown_model"
CONTENT_TYPE = "text/plain; charset=utf-8"

_DURATION = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
_FIRST_TOKEN = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
_INTER_TOKEN = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21, 0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44),
    80,
)
_INPUT = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
_OUTPUT = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
_TOKENIZE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1)
_TEMPLATE = (0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05)

_FAILURES = {
    400: ("InvalidRequest", "request.invalid"),
    404: ("NotFound", "request.not_found"),
    413: ("PayloadTooLarge", "request.payload_too_large"),
    415: ("UnsupportedMedia", "request.unsupported_media"),
    CLIENT_CLOSED: ("Cancelled", "request.cancelled"),
    501: ("NotImplemented", "runtime.not_implemented"),
    503: ("Unavailable", "backend.unavailable"),
    504: ("Timeout", "backend.timeout"),
    OVERLOADED: ("CapacityExhausted", "capacity.pool_exhausted"),
}

_OBSERVED_TOKENS = 32
"""Observations of inter-token latency that one arrival may cost; a frame of thousands of tokens must not block."""


def error_type(status: int) -> str:
    """Label ``error_type`` for an HTTP status; empty for success."""
    if status < 400:
        return ""
    named = {404: "not_found", CLIENT_CLOSED: "cancelled", 501: "not_implemented", 503: "unavailable"}
    if status in named:
        return named[status]
    if status in (OVERLOADED, 429):
        return "overload"
    return "validation" if status < 500 else "internal"


class FrontendMetrics:
    """The families, and a cache of label children.

    Args:
        registry: Where they are registered; one frontend a registry.
        prefix: ``dynamo_frontend``.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str = "dynamo_frontend") -> None:
        self.registry = registry
        self._prefix = prefix
        self._models: dict[str, ModelMetrics] = {}
        self._outcomes: dict[tuple[str, str, str, int], Counter] = {}
        request = ["endpoint", "model", "request_type"]
        self._started = self._counter("requests_started_total", "Requests accepted by a handler", request)
        self._finished = self._counter(
            "requests_total", "Requests finished", ["endpoint", "error_type", "model", "request_type", "status"]
        )
        self._failures = self._counter("failures_total", "Terminal failures by class", ["class", "reason"])
        self._cancelled = self._counter("model_cancellation_total", "Requests whose client went away", request)
        self._refused = self._counter(
            "requests_refused_total", "Requests refused before they were read: too many in progress", ["endpoint"]
        )
        self._active = self._gauge("active_requests", "Requests from handler entry to response completion", ["model"])
        self._inflight = self._gauge("inflight_requests", "Requests at a worker", ["model"])
        self._queued = self._gauge("queued_requests", "Requests waiting for their first token", ["model"])
        self.disconnected_clients = self._gauge("disconnected_clients", "Clients that went away, being cleaned up", [])
        self._duration = self._histogram("request_duration_seconds", "Time to the end of a request", _DURATION)
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", "Time between tokens", _INTER_TOKEN)
        self._input = self._histogram("input_sequence_tokens", "Prompt length in tokens", _INPUT)
        self._output = self._histogram("output_sequence_tokens", "Output length in tokens", _OUTPUT)
        self._cached = self._histogram("cached_tokens", "Prompt tokens found in a KV cache", _INPUT)
        self._tokens = self._counter("output_tokens_total", "Generated tokens", ["model"])
        self.tokenize_seconds = self._histogram("tokenize_seconds", "Time to tokenize a prompt", _TOKENIZE, [])
        self.template_seconds = self._histogram("template_seconds", "Time to render a chat", _TEMPLATE, [])

    def model(self, name: str | None) -> ModelMetrics:
        """Children of a registered model's primary name; None: ``unknown_model``."""
        label = UNKNOWN_MODEL if name is None else name
        found = self._models.get(label)
        if found is None:
            found = self._models[label] = ModelMetrics(self, label)
        return found

    def forget(self, name: str) -> None:
        """Drop the gauges of a model that left, and the cache of its children; counters stay in the registry."""
        self._models.pop(name, None)
        for key in [key for key in self._outcomes if key[1] == name]:
            del self._outcomes[key]
        for gauge in (self._active, self._inflight, self._queued):
            if (name,) in gauge._metrics:
                gauge.remove(name)

    def refused(self, endpoint: str) -> None:
        """Count a request that was over the concurrency bound."""
        self._refused.labels(endpoint).inc()

    def finished(self, endpoint: str, model: str, request_type: str, status: int) -> None:
        """Count the end of a request."""
        key = (endpoint, model, request_type, status)
        child = self._outcomes.get(key)
        if child is None:
            outcome = "success" if status < 400 else "error"
            child = self._finished.labels(endpoint, error_type(status), model, request_type, outcome)
            self._outcomes[key] = child
        child.inc()
        if status >= 400:
            self._failures.labels(*_FAILURES.get(status, _FAILURES[400] if status < 500 else _INTERNAL)).inc()

    def text(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Sequence[str]) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ("model",)
    ) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self.registry)


_INTERNAL = ("Internal", "runtime.internal")


class ModelMetrics:
    """Children of one model label, resolved once.

    ``active``, ``inflight`` and ``queued`` are plain counts that the gauges read when the page is asked for.
    """

    __slots__ = (
        "_cancelled",
        "_started",
        "active",
        "between",
        "cached",
        "duration",
        "first",
        "inflight",
        "input",
        "label",
        "output",
        "queued",
        "tokens",
    )

    def __init__(self, families: FrontendMetrics, label: str) -> None:
        self.label = label
        self.active = self.inflight = self.queued = 0
        families._active.labels(label).set_function(lambda: self.active)
        families._inflight.labels(label).set_function(lambda: self.inflight)
        families._queued.labels(label).set_function(lambda: self.queued)
        self.duration = families._duration.labels(label)
        self.first = families._first.labels(label)
        self.between = families._between.labels(label)
        self.input = families._input.labels(label)
        self.output = families._output.labels(label)
        self.cached = families._cached.labels(label)
        self.tokens = families._tokens.labels(label)
        self._started = _Children(families._started)
        self._cancelled = _Children(families._cancelled)

    def started(self, endpoint: str, request_type: str) -> None:
        """Count a request that a handler took."""
        self._started.get(endpoint, self.label, request_type).inc()

    def cancelled(self, endpoint: str, request_type: str) -> None:
        """Count a request whose client went away."""
        self._cancelled.get(endpoint, self.label, request_type).inc()


class _Children:
    __slots__ = ("_family", "_found")

    def __init__(self, family: Any) -> None:
        self._family = family
        self._found: dict[tuple[str, str, str], Any] = {}

    def get(self, endpoint: str, model: str, request_type: str) -> Any:
        key = (endpoint, model, request_type)
        child = self._found.get(key)
        if child is None:
            child = self._found[key] = self._family.labels(*key)
        return child


class RequestMeter:
    """Measures one request from its first token on. ``now`` is monotonic seconds.

    ``open`` when the request goes to a worker, ``tokens`` for each arrival, ``close`` at the end, whatever the end is.
    """

    __slots__ = ("_arrival", "_model", "_open", "_start", "generated")

    def __init__(self, model: ModelMetrics, start: float) -> None:
        self._model = model
        self._start = start
        self._arrival: float | None = None
        self._open = False
        self.generated = 0

    def open(self, prompt_tokens: int) -> None:
        """The request goes to a worker."""
        self._open = True
        self._model.inflight += 1
        self._model.queued += 1
        self._model.input.observe(prompt_tokens)

    def tokens(self, now: float, count: int) -> None:
        """``count`` tokens arrived."""
        if count <= 0:
            return
        model = self._model
        self.generated += count
        model.tokens.inc(count)
        if self._arrival is None:
            model.queued -= 1
            model.first.observe(now - self._start)
        else:
            gap = (now - self._arrival) / count
            for _ in range(min(count, _OBSERVED_TOKENS)):
                model.between.observe(gap)
        self._arrival = now

    def close(self, now: float, cached_tokens: int | None) -> None:
        """The request is over."""
        model = self._model
        if self._open:
            self._open = False
            model.inflight -= 1
            if self._arrival is None:
                model.queued -= 1
            model.output.observe(self.generated)
            if cached_tokens is not None:
                model.cached.observe(cached_tokens)
        model.duration.observe(now - self._start)
